"""The report of `ksopt bench models`: sentences, tables, Markdown, CSV and JSON.

The dense model is the first column of every table, and each time is compared with the faster of
its two ways.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ksopt.bench.models.results import (
    DENSE,
    IMPLEMENTATIONS,
    KS_KSOPT,
    LINEAR_AUTOTUNED,
    LINEAR_KSOPT,
    Case,
    ImplementationResult,
)
from ksopt.measure.timing import Comparison, compare
from ksopt.report import document, output_folder, tables
from ksopt.report.document import Section
from ksopt.report.tables import Table

SCHEMA = "ksopt.bench.models.summary/1"
_TITLE = "Models with Kronecker-sparse layers beside dense ones"
_SUBJECT = ("model", "dtype", "pass", "mode")
_KSOPTS = (KS_KSOPT, LINEAR_KSOPT, LINEAR_AUTOTUNED)


def sentences(cases: Sequence[Case]) -> list[str]:
    """The answer: ksopt's faster way compared with the dense model."""
    answers = []
    for case in cases:
        ours = [way for way in case.ways if way.name in _KSOPTS and way.time is not None]
        best = min(ours, key=lambda way: way.time.median_us if way.time else 0.0, default=None)
        rival = case.rival
        if best is None or best.time is None or rival is None or rival.time is None:
            continue
        verdict = compare(best.time, rival.time).value
        answers.append(
            f"{case.subject}: {best.name} takes {best.time.median_us / 1e3:.2f} ms, "
            f"{_over(best, rival):.2f} of the dense model's {rival.time.median_us / 1e3:.2f} ms "
            f"({verdict}), with {100 * _share(case):.0f} % of the weights of its linear layers."
        )
    return answers


def main_tables(cases: Sequence[Case]) -> list[Table]:
    """The tables for the terminal."""
    memory = [memory_table(cases)] if _has_memory(cases) else []
    shown = (times_table(cases), *memory, parameters_table(cases), sites_table(cases))
    return [table for table in shown if table.rows]


def times_table(cases: Sequence[Case]) -> Table:
    """A row for each case: milliseconds of each way, and their ratio to the dense model's."""
    return _by_way(cases, lambda case, way: _time_cell(case, way))


def memory_table(cases: Sequence[Case]) -> Table:
    """A row for each case: GiB at the peak of a call, and their ratio to the dense model's."""

    def cell(case: Case, way: ImplementationResult) -> str:
        dense = case.way(DENSE)
        if way.peak_bytes is None:
            return ""
        text = f"{way.peak_bytes / 2**30:.2f}"
        if dense is None or way is dense or not dense.peak_bytes:
            return text
        return f"{text} ({way.peak_bytes / dense.peak_bytes:.2f})"

    return _by_way(cases, cell)


def parameters_table(cases: Sequence[Case]) -> Table:
    """A row for each model: parameters, and the chains' share of the linear layers' weights."""
    models = {(case.subject.model, case.inputs): case for case in cases}
    heads = ("model", ">dense parameters", ">KS parameters", "input", ">blocks", ">chains")
    rows = []
    for (model, shape), case in models.items():
        ks = next((way.parameters for way in case.ways if way.name not in IMPLEMENTATIONS[:2]), 0)
        dense = next((way.parameters for way in case.ways if way.name == DENSE), 0)
        share = f"{ks:,} ({100 * _share(case):.0f} % of the linear layers' weights)"
        sizes = "x".join(map(str, shape))
        rows.append((model, f"{dense:,}", share, sizes, str(case.blocks), str(case.chains)))
    return tables.of(heads, rows)


def first_calls_table(cases: Sequence[Case]) -> Table:
    """A row for each case: seconds of each way's first call."""

    def cell(case: Case, way: ImplementationResult) -> str:
        return "" if way.first_s is None else f"{way.first_s:.1f}"

    return _by_way(cases, cell)


def errors_table(cases: Sequence[Case]) -> Table:
    """A row for each case and kind of result: relative errors against float64."""
    rows, columns = [], _columns(cases)
    for case in cases:
        kinds = dict.fromkeys(kind for way in case.ways for kind in way.errors)
        for kind in kinds:
            cells = [
                f"{way.errors[kind]:.1e}" if way is not None and kind in way.errors else ""
                for way in map(case.way, columns)
            ]
            rows.append((*_words(case), kind, *cells))
    return tables.of((*_SUBJECT, "of", *(f">{name}" for name in columns)), rows)


def sites_table(cases: Sequence[Case]) -> Table:
    """A row for each case and way of ksopt: the lowered sites."""
    heads = (
        *_SUBJECT, "way", ">chains", "lowered/left to PyTorch/not recognised",
        ">linear flops lowered", ">pass ms", ">deciding s",
    )  # fmt: skip
    rows = []
    for case, way in _of_ksopt(cases):
        sites = way.sites
        assert sites is not None
        counts = f"{sites.lowered}/{sites.not_lowered}/{sites.not_recognised}"
        pass_ms, deciding = f"{1e3 * sites.pass_s:.0f}", f"{sites.deciding_s:.1f}"
        share = f"{100 * sites.share:.0f} %"
        rows.append((*_words(case), way.name, str(case.chains), counts, share, pass_ms, deciding))
    return tables.of(heads, rows)


def decisions_table(cases: Sequence[Case]) -> Table:
    """A row for each distinct site: its count, the decision and its reason."""
    heads = (*_SUBJECT, "way", "chain", ">rows", ">sites", "decision", "reason")
    rows = []
    for case, way in _of_ksopt(cases):
        known: dict[tuple[str, ...], int] = {}
        for site in way.sites.sites if way.sites is not None else ():
            parts = (site["chain"] or "", site["batch"], site["verdict"], site["reason"])
            key = tuple(map(str, parts))
            known[key] = known.get(key, 0) + 1
        for (chain, batch, verdict, why), count in known.items():
            rows.append((*_words(case), way.name, chain, batch, str(count), verdict, why))
    return tables.of(heads, rows)


def write(folder: Path, cases: Sequence[Case], setting: Mapping[str, Any]) -> None:
    """Write models.md, models.csv and models.json.

    Raises:
        InvalidInputError: the folder cannot be written.
    """
    texts = {
        "models.md": document.markdown(_TITLE, sections(cases, setting)),
        "models.csv": to_csv(cases),
        "models.json": to_json(cases, setting),
    }
    output_folder.write(folder, texts)


def sections(cases: Sequence[Case], setting: Mapping[str, Any]) -> list[Section]:
    """The report's sections."""
    faults = [fault for case in cases for fault in case.faults]
    run = (setting.get("runs") or [{}])[-1]
    device = [
        (key, str(value)) for key, value in run.get("device", {}).items() if value is not None
    ]
    first = [
        Section("Answer", lead=tuple(sentences(cases)), paragraphs=tuple(faults)),
        Section("Times", paragraphs=(_TIMES,), table=times_table(cases)),
        Section("Parameters", table=parameters_table(cases)),
    ]
    if _has_memory(cases):
        first.append(Section("Peak memory", paragraphs=(_MEMORY,), table=memory_table(cases)))
    return [
        *first,
        Section(
            "Errors", ("Relative, against the same model in float64.",), (), errors_table(cases)
        ),
        Section("First calls", paragraphs=(_FIRST,), table=first_calls_table(cases)),
        Section("Sites", table=sites_table(cases)),
        Section("Decisions", table=decisions_table(cases)),
        Section("Measured on", table=tables.of(("", ""), device), code=str(run.get("command", ""))),
    ]


_TIMES = (
    "Milliseconds, median of runs in turns; behind them, as a share of the faster of the dense "
    "model's two ways. A step is forward, loss, backward and plain SGD. KS is the model in plain "
    "PyTorch, as its author spells it; KSLinear the same chains and weights as layers of ksopt. "
    "With max-autotune Inductor also times kernels for what is left to it. "
    "In the mode graphs all ways are compiled for CUDA graphs."
)
_MEMORY = (
    "GiB at the peak of a call, the model's own parameters included; behind them, as a share of "
    "the dense model's."
)
_FIRST = (
    "Seconds of the first call, compilation included. They compare with --fresh-caches only: "
    "without, torch and ksopt take from their caches what is there."
)


def to_json(cases: Sequence[Case], setting: Mapping[str, Any]) -> str:
    """The results as one JSON document, for --json and models.json."""
    run = (setting.get("runs") or [{}])[-1]
    value = {
        "schema": SCHEMA,
        "command": run.get("command"),
        "device": run.get("device"),
        "cases": [_case_json(case) for case in cases],
    }
    return json.dumps(value, indent=2) + "\n"


def _case_json(case: Case) -> dict[str, Any]:
    subject = case.subject
    return {
        "model": subject.model,
        "dtype": subject.dtype,
        "pass": subject.pass_,
        "mode": subject.mode,
        "blocks": case.blocks,
        "chains": case.chains,
        "weights": case.weights[0],
        "weights_replaced": case.weights[1],
        "inputs": list(case.inputs),
        "ways": [
            _row(case, way) | {"sites": list(way.sites.sites) if way.sites else []}
            for way in case.ways
        ],
    }


def to_csv(cases: Sequence[Case]) -> str:
    """A line for each case and way."""
    rows = []
    for case in cases:
        subject = dict(zip(_SUBJECT, _words(case), strict=True))
        shape = {"blocks": case.blocks, "inputs": "x".join(map(str, case.inputs))}
        for way in case.ways:
            row = _row(case, way)
            row["faults"] = "; ".join(row["faults"])
            rows.append(subject | shape | row)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _row(case: Case, way: ImplementationResult) -> dict[str, Any]:
    took, rival, sites, errors = way.time, case.rival, way.sites, way.errors
    against = rival.time if rival is not None else None
    return {
        "way": way.name,
        "us": took and took.median_us,
        "p20_us": took and took.p20_us,
        "p80_us": took and took.p80_us,
        "over_dense": _over(way, rival),
        "against_dense": took and against and compare(took, against).value,
        "parameters": way.parameters,
        "peak_bytes": way.peak_bytes,
        "first_s": way.first_s,
        "lowered": sites and sites.lowered,
        "not_lowered": sites and sites.not_lowered,
        "not_recognised": sites and sites.not_recognised,
        "pass_s": sites and sites.pass_s,
        "deciding_s": sites and sites.deciding_s,
        "logits_error": errors.get("logits"),
        "loss_error": errors.get("loss"),
        "gradient_error": errors.get("gradients"),
        "worst_gradient_error": errors.get("worst gradient"),
        "faults": list(way.faults),
    }


def _by_way(cases: Sequence[Case], cell: Callable[[Case, ImplementationResult], str]) -> Table:
    """A row for each case, a column for each way."""
    rows, columns = [], _columns(cases)
    for case in cases:
        ways = map(case.way, columns)
        rows.append((*_words(case), *("" if way is None else cell(case, way) for way in ways)))
    return tables.of((*_SUBJECT, *(f">{name}" for name in columns)), rows)


def _columns(cases: Sequence[Case]) -> list[str]:
    """The ways that any case has, the dense one first."""
    return [name for name in IMPLEMENTATIONS if any(case.way(name) is not None for case in cases)]


def _time_cell(case: Case, way: ImplementationResult) -> str:
    if way.time is None:
        return "wrong" if way.faults else ""
    text, rival = f"{way.time.median_us / 1e3:.2f}", case.rival
    if rival is None or rival.time is None:
        return text
    is_noise = way is not rival and compare(way.time, rival.time) is Comparison.WITHIN_NOISE
    return f"{text} ({_over(way, rival):.2f}{', noise' if is_noise else ''})"


def _over(way: ImplementationResult, rival: ImplementationResult | None) -> float | None:
    if way.time is None or rival is None or rival.time is None:
        return None
    return way.time.median_us / rival.time.median_us


def _has_memory(cases: Sequence[Case]) -> bool:
    return any(way.peak_bytes is not None for case in cases for way in case.ways)


def _share(case: Case) -> float:
    return case.weights[0] / case.weights[1]


def _words(case: Case) -> tuple[str, str, str, str]:
    subject = case.subject
    return subject.model, subject.dtype, subject.pass_, subject.mode


def _of_ksopt(cases: Sequence[Case]) -> Iterable[tuple[Case, ImplementationResult]]:
    return ((case, way) for case in cases for way in case.ways if way.sites is not None)
