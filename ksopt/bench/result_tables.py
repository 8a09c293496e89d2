"""The tables of a benchmark's results: lines aggregated into numbers and classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ksopt.bench import results_folder
from ksopt.bench.results import Line, Row
from ksopt.errors import InvalidInputError
from ksopt.measure.measurement import quantile
from ksopt.patterns.chain import Pattern
from ksopt.patterns.surroundings import ALONE, Surroundings
from ksopt.report import tables

# Upper ends of the classes of rho: rho of the paper's patterns runs from 0.002 to 0.042.
_RHO_ENDS = (0.004, 0.007, 0.011, 0.016, 0.022, 0.032)


@dataclass(frozen=True)
class Series:
    """The lines of one folder, and the setting of their measurement.

    Attributes:
        folder: of the results.
        setting: the contents of setting.json.
        lines: one per subject, in the order measured.
    """

    folder: Path
    setting: Mapping[str, Any]
    lines: tuple[Line, ...]

    @classmethod
    def read(cls, folder: Path) -> Series:
        """Read a folder's measurements; no hardware is needed.

        Raises:
            InvalidInputError: the folder holds no benchmark.
        """
        setting = results_folder.read_setting(folder)
        try:
            measured = results_folder.read_rows(folder)
        except OSError as error:
            raise InvalidInputError(
                f"{folder} holds no {results_folder.ROWS} ({error.strerror})"
            ) from None
        return cls(folder, setting, tuple(Line.of(rows) for rows in measured.values()))

    @property
    def rows(self) -> list[Row]:
        """The rows of all lines."""
        return [row for line in self.lines for row in line.rows]

    @property
    def identity(self) -> Mapping[str, Any]:
        """The request and machine of the measurements."""
        identity: Mapping[str, Any] = self.setting["identity"]
        return identity

    @property
    def runs(self) -> Sequence[Mapping[str, Any]]:
        """The commands and devices of the runs."""
        runs: Sequence[Mapping[str, Any]] = self.setting.get("runs", [])
        return runs

    @property
    def label(self) -> str:
        """A name that distinguishes the folders of a report."""
        graphs = ", graphs" if self.identity["graph"] else ""
        batches = sorted({line.subject.batch for line in self.lines})
        shown = ", ".join(f"{batch:,}" for batch in batches)
        around = "".join(f", {one}" for one in self.surroundings)
        where = f"{self.identity['dtype']}, {self.identity['layout']}"
        return f"{where}, batch {shown}{graphs}{around}"

    @property
    def surroundings(self) -> list[Surroundings]:
        """What is computed with the products, if anything is."""
        return [one for one in {line.subject.around: 1 for line in self.lines} if one != ALONE]

    @property
    def is_complete(self) -> bool:
        """Whether every subject of the request is measured."""
        return len(self.lines) == len(self.identity["subjects"])


def efficiencies(lines: Sequence[Line]) -> list[float]:
    """The efficiencies of the lines that have a time, in ascending order."""
    return sorted(e for line in lines if (e := line.ours.efficiency) is not None)


def ratios(lines: Sequence[Line], other: Callable[[Line], Row | None]) -> list[float]:
    """The time of a row of each line over ksopt's, in ascending order."""
    return sorted(r for line in lines if (r := line.ratio(other(line))) is not None)


def best(line: Line) -> Row | None:
    """PyTorch's best eager row in any layout."""
    return line.best


def overall_table(series: Sequence[Series]) -> tables.Table:
    """A row per folder: the distribution in a few numbers."""
    heads = (
        *("setting", ">products", ">median efficiency", ">10th percentile"),
        *(">times PyTorch's best", ">slower", ">in this layout", ">slower"),
        *(">times the paper's ways", ">times compiled"),
    )
    rows = []
    for one in series:
        lines = one.lines
        compiled = ratios(lines, lambda line: line.best_compiled)
        rows.append(
            (
                one.label,
                f"{len(lines):,}" + ("" if one.is_complete else f" of {_requested(one):,}"),
                _median(efficiencies(lines)),
                _median(efficiencies(lines), 0.1),
                _median(ratios(lines, best)),
                str(sum(line.is_slower is True for line in lines)),
                _median(ratios(lines, lambda line: line.best_here)),
                str(sum(line.is_slower_here is True for line in lines)),
                _median(ratios(lines, lambda line: line.best_paper)),
                f"{_median(compiled)} ({len(compiled)})" if compiled else "",
            )
        )
    return tables.of(heads, rows)


def lines_table(lines: Sequence[Line], title: str = "") -> tables.Table:
    """A row per product: ksopt beside PyTorch's best."""
    heads = (
        *("product", ">batch", ">floor us", ">ksopt us", ">p20 to p80", ">efficiency", "chosen"),
        *("PyTorch's best", ">us", ">times", "slower"),
    )
    return tables.of(heads, [_cells(line) for line in lines], title)


def _cells(line: Line) -> tuple[str, ...]:
    ours, other = line.ours, line.best
    took = ours.latency
    theirs = other.latency if other is not None else None
    ratio = line.ratio(other)
    return (
        line.subject.layer,
        f"{line.subject.batch:,}",
        f"{ours.floor_us:,.1f}",
        f"{took.median_us:,.1f}" if took else ours.reason,
        f"{took.p20_us:,.1f} to {took.p80_us:,.1f}" if took else "",
        f"{ours.efficiency:.2f}" if ours.efficiency is not None else "",
        "; ".join(name.partition("(")[0].strip() for name in ours.chosen.split("; ")),
        f"{other.way} {other.layout}" if other else "",
        f"{theirs.median_us:,.1f}" if theirs else "",
        f"{ratio:.2f}" if ratio is not None else "",
        "slower" if line.is_slower else "",
    )


def dense_table(lines: Sequence[Line]) -> tables.Table:
    """Chains beside the dense layer of the same size, in ksopt's layout."""
    heads = ("chain", ">batch", ">dense us", ">share of its weights", ">ksopt us", ">ksopt / dense")
    rows = []
    for line in lines:
        chain, took = line.subject.chain, line.ours.latency
        dense = dense_row(line)
        theirs = dense.latency if dense else None
        rows.append(
            (
                line.subject.layer,
                f"{line.subject.batch:,}",
                f"{theirs.median_us:,.2f}" if theirs else dense.reason if dense else "not asked",
                f"{100 * chain.nnz / (chain.in_features * chain.out_features):.1f} %",
                f"{took.median_us:,.2f}" if took else line.ours.reason,
                f"{took.median_us / theirs.median_us:.2f}" if took and theirs else "",
            )
        )
    return tables.of(heads, rows)


def dense_row(line: Line) -> Row | None:
    """The dense layer's row in ksopt's layout; None if it was not requested."""
    dense_rows = (r for r in line.rows if r.way == "dense" and r.layout == line.ours.layout)
    return next(dense_rows, None)


@dataclass(frozen=True)
class Grouping:
    """Classes of patterns, for tables and drawings.

    Attributes:
        title: the quantity that defines the classes.
        names: of the classes, in order.
        of: (pattern) -> the name of its class.
    """

    title: str
    names: tuple[str, ...]
    of: Callable[[Pattern], str]

    def split(self, lines: Sequence[Line]) -> dict[str, list[Line]]:
        """The lines of single patterns by class; includes every class, in order."""
        by_class: dict[str, list[Line]] = {name: [] for name in self.names}
        for line in lines:
            if line.subject.is_pattern:
                by_class[self.of(line.subject.chain[0])].append(line)
        return by_class


def _rho_name(index: int) -> str:
    if index == 0:
        return f"to {_RHO_ENDS[0]:g}"
    if index == len(_RHO_ENDS):
        return f"{_RHO_ENDS[-1]:g} on"
    return f"{_RHO_ENDS[index - 1]:g} to {_RHO_ENDS[index]:g}"


def _rho_class(pattern: Pattern) -> str:
    return _rho_name(sum(pattern.rho > end for end in _RHO_ENDS))


def _d_class(pattern: Pattern) -> str:
    if pattern.d == 1:
        return "d = 1"
    if pattern.d < 8:
        return "d from 2 to 7"
    return "d a multiple of 8" if pattern.d % 8 == 0 else "other d from 8"


def _a_class(pattern: Pattern) -> str:
    return "a = 1" if pattern.a == 1 else "a from 2 to 7" if pattern.a < 8 else "a from 8 on"


RHO = Grouping("rho", tuple(_rho_name(i) for i in range(len(_RHO_ENDS) + 1)), _rho_class)
D = Grouping("d", ("d = 1", "d from 2 to 7", "d a multiple of 8", "other d from 8"), _d_class)
A = Grouping("a", ("a = 1", "a from 2 to 7", "a from 8 on"), _a_class)


def classes_table(series: Sequence[Series], groupings: Sequence[Grouping]) -> tables.Table:
    """A row per class and folder: the numbers of `overall_table` for each class."""
    heads = ("class", "setting", ">patterns", ">median efficiency", ">10th percentile")
    rows = []
    for grouping in groupings:
        parts = [(one, grouping.split(one.lines)) for one in series]
        for name in grouping.names:
            for one, split in parts:
                lines = split[name]
                if lines:
                    shown = name if name.startswith(grouping.title) else f"{grouping.title} {name}"
                    ordered = efficiencies(lines)
                    numbers = (
                        _median(ordered),
                        _median(ordered, 0.1),
                        _median(ratios(lines, best)),
                    )
                    slower = sum(line.is_slower is True for line in lines)
                    rows.append((shown, one.label, str(len(lines)), *numbers, str(slower)))
    return tables.of((*heads, ">times PyTorch's best", ">slower"), rows)


def faults(series: Sequence[Series]) -> list[Row]:
    """The rows of ways that computed a wrong result or could not compute."""
    return [row for one in series for row in one.rows if row.is_fault]


def host_late(series: Sequence[Series]) -> list[Row]:
    """The rows whose times hold a part of the host's."""
    rows = (row for one in series for row in one.rows)
    return [row for row in rows if row.latency is not None and row.latency.is_host_late]


def _requested(series: Series) -> int:
    return len(series.identity["subjects"])


def _median(ordered: list[float], share: float = 0.5) -> str:
    return f"{quantile(ordered, share):.2f}" if ordered else ""
