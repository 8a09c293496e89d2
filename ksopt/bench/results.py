"""The stored results of a benchmark: a row per way, and a line per subject with all its rows."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ksopt.bench.request import INDUCTOR, PAPER, PRODUCT_ONLY, Subject
from ksopt.measure.timing import Comparison, Measurement, compare
from ksopt.patterns.surroundings import ALONE

OURS = "ksopt"
WRONG = "wrong: "
FAILED = "failed: "


@dataclass(frozen=True)
class Row:
    """The result of one way to compute one product.

    Attributes:
        subject: The product.
        way: ``ksopt``, a baseline's name, or an ``inductor_`` one.
        layout: Of this way's input and result.
        bytes_moved: By the product: x, y and the nonzero weights, once each; see `Subject`.
        flops: Of the product.
        floor_us: The roofline's floor on the GPU that measured.
        latency: Time of a call; None where ``reason`` has the reason.
        reason: The reason there is no time; beside a time, a remark such as an early stop.
        chosen: For ksopt, the name of the chosen kernel and the reason.
        predicted_us: By the cost models; None where they have no prediction.
    """

    subject: Subject
    way: str
    layout: str
    bytes_moved: int
    flops: int
    floor_us: float
    latency: Measurement | None
    reason: str = ""
    chosen: str = ""
    predicted_us: float | None = None

    @property
    def efficiency(self) -> float | None:
        """The roofline floor over the measured time; None without a time."""
        return None if self.latency is None else self.floor_us / self.latency.median_us

    @property
    def is_fault(self) -> bool:
        """Whether the way computed a wrong result, or could not compute at all."""
        return self.reason.startswith((WRONG, FAILED))

    @property
    def is_own_fault(self) -> bool:
        """Whether it is a fault of ksopt; those of PyTorch's ways are only reported."""
        return self.way == OURS and self.is_fault

    def to_json(self) -> dict[str, Any]:
        """The row as JSON values; `from_json` reads them."""
        value = asdict(self)
        value["subject"] = self.subject.to_json()
        return value

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Row:
        """The row that `to_json` wrote."""
        subject = Subject.from_json(value["subject"])
        latency = None if value["latency"] is None else Measurement(**value["latency"])
        return cls(**(value | {"subject": subject, "latency": latency}))


@dataclass(frozen=True)
class Line:
    """The rows of one subject as a comparison: ksopt beside the best of PyTorch.

    Attributes:
        ours: ksopt's row.
        rows: All rows of the subject.
        best: PyTorch's fastest eager row in any layout; None if none has a time.
        best_here: PyTorch's fastest eager row in ksopt's layout.
        best_paper: The fastest of the ways that the paper compares with, in any layout.
        best_compiled: Inductor's faster row, if it was measured.
    """

    ours: Row
    rows: tuple[Row, ...]
    best: Row | None
    best_here: Row | None
    best_paper: Row | None
    best_compiled: Row | None

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Line:
        """The comparison of one subject's rows, of which one is ksopt's."""
        ours = next(row for row in rows if row.way == OURS)
        theirs = [
            row for row in rows if row.way not in (OURS, PRODUCT_ONLY) and row.latency is not None
        ]
        eager = [row for row in theirs if row.way not in INDUCTOR]
        return cls(
            ours=ours,
            rows=tuple(rows),
            best=_fastest(eager),
            best_here=_fastest([row for row in eager if row.layout == ours.layout]),
            best_paper=_fastest([row for row in eager if row.way in PAPER]),
            best_compiled=_fastest([row for row in theirs if row.way in INDUCTOR]),
        )

    @property
    def subject(self) -> Subject:
        """The product of the line."""
        return self.ours.subject

    def ratio(self, other: Row | None) -> float | None:
        """The time of another row over ksopt's; None if one of them has no time."""
        if other is None or other.latency is None or self.ours.latency is None:
            return None
        return other.latency.median_us / self.ours.latency.median_us

    @property
    def is_slower(self) -> bool | None:
        """Whether ksopt is slower than PyTorch's best by more than the noise of both."""
        return _slower(self.ours, self.best)

    @property
    def is_slower_here(self) -> bool | None:
        """Whether ksopt is slower than PyTorch's best in ksopt's own layout, beyond noise."""
        return _slower(self.ours, self.best_here)


def _fastest(rows: Sequence[Row]) -> Row | None:
    return min(rows, key=_median, default=None)


def _median(row: Row) -> float:
    assert row.latency is not None
    return row.latency.median_us


def _slower(ours: Row, other: Row | None) -> bool | None:
    if other is None or other.latency is None or ours.latency is None:
        return None
    return compare(ours.latency, other.latency) is Comparison.SLOWER


def rows_csv(rows: Sequence[Row]) -> str:
    """The text of bench.csv: every row."""
    heads = (
        *("chain", "batch", "way", "layout", "median_us", "p20_us", "p80_us", "repeats"),
        *("bytes", "flops", "floor_us", "efficiency", "reason", "chosen"),
        "predicted_us",
    )
    lines = []
    for row in rows:
        took = row.latency
        times = (took.median_us, took.p20_us, took.p80_us, took.repeats) if took else ("",) * 4
        where = (row.subject.chain, row.subject.batch, row.way, row.layout)
        product = (row.bytes_moved, row.flops, row.floor_us, row.efficiency)
        lines.append((*where, *times, *product, row.reason, row.chosen, row.predicted_us))
    return _csv(heads, lines, [row.subject for row in rows])


def lines_csv(lines: Sequence[Line]) -> str:
    """The text of summary.csv: a line per subject."""
    heads = (
        *("chain", "batch", "layout", "rho", "floor_us", "ksopt_us", "p20_us", "p80_us"),
        *("efficiency", "chosen", "best", "best_layout", "best_us", "ratio", "slower"),
        *("best_in_layout", "best_in_layout_us", "ratio_in_layout", "slower_in_layout"),
        *("paper", "paper_layout", "paper_us", "ratio_paper"),
        *("compiled", "compiled_us", "ratio_compiled", "reason"),
    )
    cells_of_lines = []
    for line in lines:
        ours, took = line.ours, line.ours.latency
        times = (took.median_us, took.p20_us, took.p80_us) if took else ("",) * 3
        rho = line.subject.chain[0].rho if line.subject.is_pattern else None
        cells_of_lines.append(
            (
                *(line.subject.chain, line.subject.batch, ours.layout, rho, ours.floor_us),
                *(*times, ours.efficiency, ours.chosen),
                *(_named(line.best, True), line.ratio(line.best), line.is_slower),
                *(_named(line.best_here), line.ratio(line.best_here), line.is_slower_here),
                *(_named(line.best_paper, True), line.ratio(line.best_paper)),
                *(_named(line.best_compiled), line.ratio(line.best_compiled), ours.reason),
            )
        )
    return _csv(heads, [_flat(cells) for cells in cells_of_lines], [one.subject for one in lines])


def _named(row: Row | None, layout: bool = False) -> tuple[object, ...]:
    if row is None:
        return ("",) * (3 if layout else 2)
    return (row.way, *((row.layout,) if layout else ()), _median(row))


def _flat(cells: Sequence[object]) -> list[object]:
    return [value for cell in cells for value in (cell if isinstance(cell, tuple) else (cell,))]


def _csv(
    heads: Sequence[str], lines: Sequence[Sequence[object]], subjects: Sequence[Subject]
) -> str:
    """The table; with two columns more if any product has an epilogue or siblings."""
    if any(subject.around != ALONE for subject in subjects):
        heads = (*heads, "epilogue", "siblings")
        arounds = [subject.around for subject in subjects]
        more = [(" ".join(around.epilogue), around.siblings) for around in arounds]
        lines = [(*line, *cells) for line, cells in zip(lines, more, strict=True)]
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(heads)
    writer.writerows(lines)
    return stream.getvalue()
