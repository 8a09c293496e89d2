"""The output of a benchmark: a page, markdown, tables as CSV, JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ksopt.bench import plots, result_tables, results
from ksopt.bench.plots import Group
from ksopt.bench.result_tables import Grouping, Series
from ksopt.bench.results import Line
from ksopt.measure.device import DeviceRecord
from ksopt.report import document, output_folder, tables
from ksopt.report.document import Section

_SHOWN = 25
SCHEMA = "ksopt.bench.summary/1"


def write(series: Sequence[Series], folder: Path) -> None:
    """Write bench.html, bench.md, bench.csv and summary.csv.

    Args:
        series: the measurements; the CSV files concatenate those of several folders.
        folder: the output folder, created if it does not exist.

    Raises:
        InvalidInputError: the folder cannot be written.
    """
    lines = [line for one in series for line in one.lines]
    page = sections(series)
    texts = {
        "bench.csv": results.rows_csv([row for one in series for row in one.rows]),
        "summary.csv": results.lines_csv(lines),
        "bench.md": document.markdown(_TITLE, page),
        "bench.html": document.html(_TITLE, _where(series), page),
    }
    output_folder.write(folder, texts)


_TITLE = "ksopt's products beside PyTorch's"


def to_json(series: Sequence[Series]) -> str:
    """The measurements as one JSON document, for --json."""
    value = {
        "schema": SCHEMA,
        "series": [
            {
                "label": one.label,
                "setting": dict(one.setting),
                "complete": one.is_complete,
                "lines": [_line_json(line) for line in one.lines],
                "rows": [_row_json(row) for row in one.rows],
            }
            for one in series
        ],
    }
    return json.dumps(value, indent=2) + "\n"


def _line_json(line: Line) -> dict[str, Any]:
    return {
        **line.subject.to_json(),
        "efficiency": line.ours.efficiency,
        "chosen": line.ours.chosen,
        "best": line.best.way if line.best else None,
        "best_layout": line.best.layout if line.best else None,
        "ratio": line.ratio(line.best),
        "slower": line.is_slower,
        "ratio_in_layout": line.ratio(line.best_here),
        "slower_in_layout": line.is_slower_here,
        "ratio_paper": line.ratio(line.best_paper),
        "ratio_compiled": line.ratio(line.best_compiled),
    }


def _row_json(row: results.Row) -> dict[str, Any]:
    value = row.to_json()
    return value.pop("subject") | value | {"efficiency": row.efficiency}


def sections(series: Sequence[Series]) -> list[Section]:
    """The sections of the report, the answer first."""
    shown = [one for one in series if one.lines]
    if not shown:
        return [Section("Answer", ("Nothing was measured yet.",)), *_method(series)]
    return [
        _answer(shown),
        *_faults(shown),
        *_host_late(shown),
        *_small(shown),
        *_figures(shown),
        *_worst(shown),
        *_chosen(shown),
        *_method(shown),
    ]


def _where(series: Sequence[Series]) -> str:
    names = dict.fromkeys(str(one.identity["device name"]) for one in series)
    torches = dict.fromkeys(f"torch {one.identity['torch']}" for one in series)
    return "; ".join([", ".join(names), ", ".join(torches)])


def _answer(series: Sequence[Series]) -> Section:
    text = (
        "Efficiency is the roofline's floor over the measured time: 1 is as fast as this device "
        "moves the bytes or does the arithmetic. PyTorch's best is the fastest of its eager ways "
        "in either layout, its weights prepared beforehand; the paper's ways are those that "
        "it compares with (its own bmm, einsum, dense). In this layout is against PyTorch's best "
        "in ksopt's layout. The ratios are medians. Slower counts products on which ksopt is "
        "behind by more than the noise: each median outside the other's band from the 20th to the "
        "80th percentile."
    )
    return Section("Answer", (), (text,), result_tables.overall_table(series))


def _faults(series: Sequence[Series]) -> list[Section]:
    faults = result_tables.faults(series)
    if not faults:
        return []
    cells = [(r.subject.layer, str(r.subject.batch), r.way, r.layout, r.reason) for r in faults]
    table = tables.of(("product", ">batch", "way", "layout", "what is wrong"), cells)
    text = "These computed something wrong, or nothing, and have no times."
    return [Section("Faults", (text,), (), table)]


def _host_late(series: Sequence[Series]) -> list[Section]:
    rows = result_tables.host_late(series)
    if not rows:
        return []
    cells = [
        (row.subject.layer, str(row.subject.batch), row.way, row.layout,
         f"{row.latency.median_us:,.1f}" if row.latency else "")
        for row in rows
    ]  # fmt: skip
    table = tables.of(("product", ">batch", "way", "layout", ">us"), cells)
    text = (
        "The host took longer to launch these than the device can be kept busy, or waited for it: "
        "their times hold a part of the host's, and say little of the device."
    )
    return [Section("Times that hold a part of the host's", (text,), (), table)]


def _small(series: Sequence[Series]) -> list[Section]:
    lines = [
        line
        for one in series
        for line in one.lines
        if result_tables.dense_row(line) and _is_small(line)
    ]
    if not lines:
        return []
    text = "In place of a dense layer of the same size, multiplied by cuBLAS or the CPU's library."
    return [Section("Beside the dense layer", (), (text,), result_tables.dense_table(lines))]


def _is_small(line: Line) -> bool:
    """Whether a dense layer is the alternative: a chain, or a product of few rows."""
    return not line.subject.is_pattern or line.subject.batch <= 64


def _figures(series: Sequence[Series]) -> list[Section]:
    if not any(line.subject.is_pattern for one in series for line in one.lines):
        return []
    labels = [one.label for one in series]
    shares = plots.figure_of_shares(
        [(one.label, result_tables.efficiencies(one.lines)) for one in series], "efficiency"
    )
    by_rho = plots.figure_of_boxes(
        [
            Group(name, tuple(result_tables.ratios(part, result_tables.best) for part in parts))
            for name, parts in _split(series, result_tables.RHO)
        ],
        labels,
        "times faster than PyTorch's best",
        log=True,
        line=1.0,
    )
    by_d = plots.figure_of_boxes(
        [
            Group(name, tuple(result_tables.efficiencies(part) for part in parts))
            for name, parts in _split(series, result_tables.D)
        ],
        labels,
        "efficiency",
        log=False,
        line=1.0,
    )
    rho_text = (
        "Boxes from quartile to quartile, whiskers from the 5th to the 95th percentile, by "
        "rho = (b + c)/(b c), larger where moving data costs more than computing: as Figure 6 of "
        "the paper, whose ratio is to the fastest of bmm, einsum and bsr."
    )
    return [
        Section("Efficiency", figure=shares),
        Section("Ratio to PyTorch's best, by rho", (), (rho_text,), figure=by_rho),
        Section("Efficiency by class of d", figure=by_d),
        Section(
            "By class",
            table=result_tables.classes_table(
                series, (result_tables.RHO, result_tables.D, result_tables.A)
            ),
        ),
    ]


def _split(series: Sequence[Series], grouping: Grouping) -> list[tuple[str, list[list[Line]]]]:
    parts = [grouping.split(one.lines) for one in series]
    return [(name, [part[name] for part in parts]) for name in grouping.names]


def _worst(series: Sequence[Series]) -> list[Section]:
    listed = []
    for one in series:
        timed = [line for line in one.lines if line.ours.efficiency is not None]
        slower = [line for line in timed if line.is_slower or line.is_slower_here]
        slower.sort(key=lambda line: line.ratio(line.best) or 0.0)
        if slower:
            listed.append(
                Section(
                    f"Slower than PyTorch: {one.label}",
                    (),
                    _first_of(slower),
                    result_tables.lines_table(slower[:_SHOWN]),
                )
            )
        least = sorted(timed, key=lambda line: line.ours.efficiency or 0.0)
        if least:
            listed.append(
                Section(
                    f"Least efficient: {one.label}",
                    (),
                    _first_of(least),
                    result_tables.lines_table(least[:_SHOWN]),
                )
            )
    return listed


def _first_of(lines: Sequence[Line]) -> tuple[str, ...]:
    if len(lines) <= _SHOWN:
        return ()
    return (f"The first {_SHOWN} of {len(lines):,}; summary.csv has all.",)


def _chosen(series: Sequence[Series]) -> list[Section]:
    """The number of times each kernel was chosen, where that was recorded."""
    cells = []
    for one in series:
        names = Counter(
            part.partition("(")[0].strip()
            for line in one.lines
            for part in line.ours.chosen.split("; ")
            if part
        )
        cells += [(one.label, name, str(count)) for name, count in names.most_common()]
    if not cells:
        return []
    text = "summary.csv has the times that each choice was made by."
    return [
        Section("What ksopt chose", (), (text,), tables.of(("setting", "kernel", ">times"), cells))
    ]


def _method(series: Sequence[Series]) -> list[Section]:
    text = (
        "Every way was first checked against float64 on rows from the whole batch, its result's "
        "memory filled with NaN beforehand; a wrong one gets no time. All right ones were then "
        "timed in turns, L2 emptied before each sample, until their medians stood to 1 %; "
        "PyTorch's ways that are twice as slow as its fastest were timed twice only, and bench.csv "
        "says so. The floor counts x, y and the nonzero weights as moved once, at the speed of a "
        "large copy, or the arithmetic at the rate of a large matrix product, whichever is longer."
    )
    graphs = (
        "With graphs, a sample is one replay of a CUDA graph that calls the product once with each "
        "of 8 to 256 copies of the weights, after L2 was emptied: every call finds its weights "
        "cold, as in a model that runs token by token, and its input warm. The graph reads "
        "weights that were prepared before (ksopt.prepared_weights)."
    )
    layers = (
        "Products with an epilogue or siblings are layers: ksopt's operator computes all of one, "
        "as KSLinear does. PyTorch's ways are their products, side by side for siblings, and "
        "PyTorch's own operations behind them, in place; the dense layer is one matrix of all "
        "siblings, with its bias. All are checked against float64 of the whole layer. The floor "
        "counts as many products as there are siblings, and a bias and a residual as read once."
    )
    texts = (text, graphs) if any(one.identity["graph"] for one in series) else (text,)
    if any(one.surroundings for one in series):
        texts = (*texts, layers)
    method = [Section("How it was measured", (), texts)]
    for one in series:
        for number, run in enumerate(one.runs, 1):
            record = DeviceRecord(**run["device"]).rows()
            roofs = [
                (
                    f"roofline of {roof['device']}",
                    f"{roof['bandwidth'] / 1e9:,.0f} GB/s, {roof['rate'] / 1e12:,.1f} TFLOP/s "
                    f"({roof['rate_from']})",
                )
                for roof in run["rooflines"]
            ]
            which = f", run {number}" if len(one.runs) > 1 else ""
            code = [("code", str(one.identity["code"]))]
            method.append(
                Section(
                    f"Device: {one.label}{which}",
                    table=tables.of(("what", "value"), record + code + roofs),
                    code=str(run["command"]),
                    language="sh",
                )
            )
    return method
