"""What a run of `whole_models.py` measured, as tables, Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ksopt.compile.sites import Report, Site, Verdict
from ksopt.measure.device import DeviceRecord
from ksopt.measure.timing import Comparison, Measurement, compare
from ksopt.report import document, tables
from ksopt.report.document import Section
from ksopt.report.tables import Table
from ksopt.system.atomic_files import write_whole
from models.measuring import INDUCTOR, Way

SCHEMA = "ksopt.experiments.whole_models/1"
_TITLE = "Models with Kronecker-sparse layers under torch.compile"


@dataclass(frozen=True)
class Case:
    """A model in one dtype, and what came of each way to run it.

    Args:
        model: its name.
        dtype: torch's name of its element type.
        blocks: how many blocks it had.
        layers: how many of its layers are Kronecker-sparse.
        inputs: the shape of its input.
        dynamic: whether it was compiled for any batch and length.
        ways: the uncompiled model, Inductor, ksopt.
    """

    model: str
    dtype: str
    blocks: int
    layers: int
    inputs: tuple[int, ...]
    dynamic: bool
    ways: tuple[Way, ...]

    @property
    def name(self) -> str:
        """For a heading."""
        return f"{self.model} {self.dtype}"

    def way(self, name: str) -> Way:
        """The way of that name."""
        return next(way for way in self.ways if way.name == name)

    @property
    def faults(self) -> list[str]:
        """All that is wrong, in sentences."""
        return [f"{self.name}, {way.name}: {fault}" for way in self.ways for fault in way.faults]


def sentences(cases: Sequence[Case]) -> list[str]:
    """The answer: how each of ksopt's ways stands to Inductor."""
    found = []
    for case in cases:
        for way in case.ways:
            if way.is_ksopt and not way.faults:
                forward = _against(way.forward, case.way(INDUCTOR).forward)
                step = _against(way.step, case.way(INDUCTOR).step)
                found.append(
                    f"{case.name}, {way.name}: a forward pass {forward}; a training step {step}."
                )
    return found


def times_table(cases: Sequence[Case]) -> Table:
    """A row for each model, dtype and way: what it takes."""
    heads = (
        "model", "dtype", "way", ">forward ms", ">p20-p80", ">Inductor / this", ">step ms",
        ">p20-p80", ">Inductor / this",
    )  # fmt: skip
    rows = []
    for case in cases:
        rival = case.way(INDUCTOR)
        for way in case.ways:
            forward = (*_ms(way.forward), _ratio(way.forward, rival.forward))
            step = (*_ms(way.step), _ratio(way.step, rival.step))
            rows.append((case.model, case.dtype, way.name, *forward, *step))
    return tables.of(heads, rows)


def sites_table(cases: Sequence[Case]) -> Table:
    """A row for each model, dtype and way of ksopt: what was lowered, and what compiling took."""
    heads = (
        "model", "dtype", "way", ">KS layers", "lowered/kept/missed: forward", "step",
        ">linear flops lowered", ">Inductor compiles s", ">ksopt compiles s", ">pass ms",
        ">pass / Inductor", ">deciding s",
    )  # fmt: skip
    rows = []
    for case in cases:
        for way in case.ways:
            if not way.is_ksopt or way.forward_report is None or way.step_report is None:
                continue
            reports = (way.forward_report, way.step_report)
            rows.append(
                (
                    *(case.model, case.dtype, way.name, str(case.layers)),
                    *map(_counts, reports),
                    f"{100 * way.step_report.covered:.0f} %",
                    _pair(_compile_s(case.way(INDUCTOR)), 1),
                    _pair(_compile_s(way), 1),
                    _pair([1e3 * report.pass_s for report in reports], 0),
                    _pair([100 * share for share in pass_shares(case, way)], 1, " %"),
                    f"{sum(report.deciding_s for report in reports):.1f}",
                )
            )
    return tables.of(heads, rows)


def errors_table(cases: Sequence[Case]) -> Table:
    """A row for each model, dtype and way: relative errors against float64."""
    heads = ("model", "dtype", "way", ">logits", ">loss", ">gradients", ">worst gradient", "fault")
    rows = []
    for case in cases:
        for way in case.ways:
            own = way.errors
            if own is not None:
                worst = max(own.gradients.values(), default=0.0)
                cells = [f"{x:.1e}" for x in (own.logits, own.loss, own.gradient, worst)]
                fault = "; ".join(way.faults[:3])
                rows.append((case.model, case.dtype, way.name, *cells, fault))
    return tables.of(heads, rows)


def decisions_table(cases: Sequence[Case]) -> Table:
    """A row for each different site, with how often it was met, and why it was decided so."""
    heads = ("model", "dtype", "way", "chain", ">rows", ">sites", "decision", "reason")
    rows = []
    for case in cases:
        for way in case.ways:
            known: dict[tuple[str, ...], int] = {}
            for site in _sites(way):
                key = (str(site.chain or ""), str(site.batch), site.verdict.value, site.reason)
                known[key] = known.get(key, 0) + 1
            for (chain, batch, verdict, reason), count in known.items():
                where = (case.model, case.dtype, way.name)
                rows.append((*where, chain, batch, str(count), verdict, reason))
    return tables.of(heads, rows)


def pass_shares(case: Case, way: Way) -> list[float]:
    """The pass's time over Inductor's own compilation, for the forward graph and the step's."""
    theirs = _compile_s(case.way(INDUCTOR))
    reports = (way.forward_report, way.step_report)
    return [
        report.pass_s / seconds
        for report, seconds in zip(reports, theirs, strict=True)
        if report is not None and seconds
    ]


def write(folder: Path, cases: Sequence[Case], record: DeviceRecord, command: str) -> None:
    """Write models.md, models.csv and models.json."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "models.md", document.markdown(_TITLE, sections(cases, record, command)))
    write_whole(folder / "models.csv", to_csv(cases))
    value = {
        "schema": SCHEMA,
        "command": command,
        "device": asdict(record),
        "cases": [_case_json(case) for case in cases],
    }
    write_whole(folder / "models.json", json.dumps(value, indent=2) + "\n")


def sections(cases: Sequence[Case], record: DeviceRecord, command: str) -> list[Section]:
    """The report's sections."""
    faults = [fault for case in cases for fault in case.faults]
    return [
        Section("The answer", lead=tuple(sentences(cases)), paragraphs=tuple(faults)),
        Section(
            "Times",
            paragraphs=(
                "Median of interleaved runs. A step is forward, loss, backward and plain SGD.",
            ),
            table=times_table(cases),
        ),
        Section(
            "Sites and compilation",
            paragraphs=(
                "Pairs are the forward graph / the training step's. The compilations begin with "
                "empty caches, and their times hold the first run. The pass is ksopt's own part; "
                "what deciding takes is kept on disk and is spent once on a machine.",
            ),
            table=sites_table(cases),
        ),
        Section(
            "Errors",
            paragraphs=("Relative, against the same model in float64.",),
            table=errors_table(cases),
        ),
        Section("Decisions", table=decisions_table(cases)),
        Section("Measured on", table=tables.of(("", ""), record.rows()), code=command),
    ]


def to_csv(cases: Sequence[Case]) -> str:
    """A line for each model, dtype and way."""
    rows = [_row(case, way) for case in cases for way in case.ways]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _row(case: Case, way: Way) -> dict[str, Any]:
    row: dict[str, Any] = {
        "model": case.model,
        "dtype": case.dtype,
        "blocks": case.blocks,
        "layers": case.layers,
        "inputs": "x".join(map(str, case.inputs)),
        "dynamic": case.dynamic,
        "way": way.name,
    }
    rival = case.way(INDUCTOR)
    for name in ("forward", "step"):
        took: Measurement | None = getattr(way, name)
        against: Measurement | None = getattr(rival, name)
        report: Report | None = getattr(way, f"{name}_report")
        row |= {
            f"{name}_us": took and took.median_us,
            f"{name}_p20_us": took and took.p20_us,
            f"{name}_p80_us": took and took.p80_us,
            f"{name}_inductor_over_this": took and against and against.median_us / took.median_us,
            f"{name}_against_inductor": took and against and compare(took, against).value,
            f"{name}_compile_s": getattr(way, f"{name}_compile_s"),
            f"{name}_pass_s": report and report.pass_s,
            f"{name}_deciding_s": report and report.deciding_s,
        }
        for verdict in Verdict:
            key = f"{name}_{verdict.value.replace(' ', '_')}"
            row[key] = report and report.count(verdict)
    errors = way.errors
    row |= {
        "logits_error": errors and errors.logits,
        "loss_error": errors and errors.loss,
        "gradient_error": errors and errors.gradient,
        "faults": "; ".join(way.faults),
    }
    return row


def _case_json(case: Case) -> dict[str, Any]:
    return {
        "model": case.model,
        "dtype": case.dtype,
        "blocks": case.blocks,
        "layers": case.layers,
        "inputs": list(case.inputs),
        "dynamic": case.dynamic,
        "ways": [
            _row(case, way) | {"sites": [site.to_json() for site in _sites(way)]}
            for way in case.ways
        ],
    }


def _sites(way: Way) -> list[Site]:
    """The sites of both graphs, those of the forward pass first."""
    reports = [one for one in (way.forward_report, way.step_report) if one is not None]
    return [site for report in reports for site in report.sites]


def _compile_s(way: Way) -> list[float | None]:
    return [way.forward_compile_s, way.step_compile_s]


def _counts(report: Report) -> str:
    return "/".join(str(report.count(verdict)) for verdict in Verdict)


def _pair(values: Sequence[float | None], digits: int, unit: str = "") -> str:
    known = [f"{value:.{digits}f}" for value in values if value is not None]
    return f"{' / '.join(known)}{unit}" if known else ""


def _ms(took: Measurement | None) -> tuple[str, str]:
    if took is None:
        return "", ""
    return f"{took.median_us / 1e3:.2f}", f"{took.p20_us / 1e3:.2f}-{took.p80_us / 1e3:.2f}"


def _ratio(took: Measurement | None, rival: Measurement | None) -> str:
    if took is None or rival is None or took is rival:
        return ""
    ratio = f"{rival.median_us / took.median_us:.2f}"
    return f"{ratio} (noise)" if compare(took, rival) is Comparison.WITHIN_NOISE else ratio


def _against(took: Measurement | None, rival: Measurement | None) -> str:
    if took is None or rival is None:
        return "was not timed"
    ratio = rival.median_us / took.median_us
    text = f"takes {took.median_us / 1e3:.2f} ms, {ratio:.2f} times as fast as Inductor's"
    return f"{text} {rival.median_us / 1e3:.2f} ms ({compare(took, rival).value})"
