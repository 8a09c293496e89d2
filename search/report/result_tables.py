"""Tables of a layer's measurements, for the terminal, the page and markdown."""

from __future__ import annotations

from collections.abc import Sequence

from ksopt.report import tables
from ksopt.report.tables import Table
from ksopt.search import diagnostics, metrics, timing_noise
from ksopt.search.report import phrases
from ksopt.search.report.reported_latency import ReportedLatencies
from ksopt.search.results import (
    Finalist,
    LayerResult,
    Recommendation,
    SearchResult,
    TrialRecord,
    Verdict,
)


def answers_table(result: SearchResult) -> Table:
    """Table of the fastest chain of each layer size and budget beside the dense layer."""
    if result.request.is_one_layer:
        (layer,) = result.layers
        return layer_answers_table(layer)
    tables_of_layers = [(layer.size, layer_answers_table(layer)) for layer in result.layers]
    return tables.of(
        ("INxOUT", *tables_of_layers[0][1].columns),
        [[str(size), *row] for size, table in tables_of_layers for row in table.rows],
        title="Fastest chain of each layer size and budget",
    )


def layer_answers_table(layer: LayerResult) -> Table:
    """Table of the fastest chain of each step beside the dense layer."""
    heads = ["chain", ">weights", ">dense", ">latency", ">efficiency"]
    # By the request, so that tables of several sizes have the same columns.
    measured = metrics.measured(layer.request)
    heads += [f">{metric.title}" for metric in measured]
    rows = []
    for answer in layer.recommendations:
        chosen, speedup, cells = answer.chosen, "", [""] * len(heads)
        if chosen is not None:
            known, speedup = chosen.facts, _speedup(chosen)
            cells = [
                str(known.chain),
                f"{known.nnz:,}",
                phrases.microseconds(chosen.dense.median_us),
                phrases.microseconds(chosen.latency.median_us),
                f"{chosen.efficiency:.2f}",
                *(metric.cell(chosen.values) for metric in measured),
            ]
        rows.append([answer.budget.text, speedup, _verdict(answer), *cells])
    size = layer.request.size
    return tables.of(
        # The most important columns first: a telephone shows no more without scrolling.
        ("budget", ">speedup", "verdict", *heads),
        rows,
        title=f"Fastest chain of each budget for {phrases.layer(size)}",
    )


def surrounded_table(layer: LayerResult) -> Table:
    """Table of the fastest chain of each step in each of the other surroundings."""
    rows = [
        [
            str(one.around),
            answer.budget.text,
            _speedup(answer.chosen),
            _verdict(answer),
            str(answer.chosen.facts.chain),
            f"{answer.chosen.facts.nnz:,}",
            phrases.microseconds(answer.chosen.dense.median_us),
            phrases.microseconds(answer.chosen.latency.median_us),
        ]
        for one in layer.surrounded
        for answer in one.recommendations
        if answer.chosen is not None
    ]
    heads = ("surroundings", "budget", ">speedup", "verdict", "chain", ">weights", ">dense")
    return tables.of((*heads, ">latency"), rows)


def _speedup(chosen: Finalist) -> str:
    if timing_noise.warning(chosen):
        return phrases.speed_span(chosen.latency, chosen.dense)
    return f"{1 / chosen.ratio:.2f}x"


def _verdict(answer: Recommendation) -> str:
    """The verdict; "measure again" if the times of a recommended chain are doubtful."""
    chosen = answer.chosen
    if answer.verdict is Verdict.USE and chosen is not None and timing_noise.warning(chosen):
        return "measure again"
    return answer.verdict.value


def finalists_table(result: LayerResult) -> Table:
    """Table of all finalists and their origins."""
    rows = []
    for place, one in enumerate(result.finalists):
        alike = diagnostics.within_noise_of(one, result.finalists)
        noise = ", ".join(str(other + 1) for other in alike)
        rows.append([str(place + 1), *_finalist_cells(one), noise, one.origin])
    heads = [">", *_FINALIST_HEADS, "ties with", "chosen by"]
    # Other metrics stand beside the latency.
    return _with_metrics(heads, rows, heads.index(">latency") + 1, result.finalists)


def front_table(trials: Sequence[TrialRecord]) -> Table:
    """Table of the trials of a front, each beside the dense layer, with all metrics."""
    rows = []
    for trial in trials:
        known = trial.facts
        rows.append(
            [
                "" if trial.ratio is None else f"{1 / trial.ratio:.2f}x",
                str(known.chain),
                "" if trial.latency is None else phrases.microseconds(trial.latency.median_us),
                f"{known.nnz:,}",
                phrases.percent(known.share),
                str(trial.number),
                trial.origin,
            ]
        )
    heads = [">speedup", "chain", ">latency", ">weights", ">of dense", ">trial", "chosen by"]
    return _with_metrics(heads, rows, heads.index(">trial"), trials)


def _with_metrics(
    heads: list[str], rows: list[list[str]], at: int, of: Sequence[Finalist | TrialRecord]
) -> Table:
    """A table with columns, from ``at`` on, for the metrics that some row has."""
    for metric in reversed(metrics.stored()):
        if any(metric.name in one.values for one in of):
            heads.insert(at, f">{metric.title}")
            for row, one in zip(rows, of, strict=True):
                row.insert(at, metric.cell(one.values))
    return tables.of(heads, rows)


def trials_table(trials: Sequence[TrialRecord], times: ReportedLatencies) -> Table:
    """Table of trials with their reported times."""
    rows = []
    for trial in trials:
        known = trial.facts
        is_whole = trial.ratio is not None
        latency_us = times.latency_us(trial) if is_whole else None
        ratio = times.ratio(trial) if is_whole else None
        rows.append(
            [
                str(trial.number),
                "" if ratio is None else f"{1 / ratio:.2f}x",
                str(known.chain),
                f"{known.nnz:,}",
                "" if latency_us is None else phrases.microseconds(latency_us),
                f"{known.rho:.4f}",
                trial.origin,
                trial.reason or "",
            ]
        )
    heads = [
        ">trial",
        ">speedup",
        "chain",
        ">weights",
        ">latency",
        ">rho",
        "chosen by",
        "given up or failed because",
    ]
    if not any(trial.reason for trial in trials):
        heads, rows = heads[:-1], [row[:-1] for row in rows]
    return _with_metrics(heads, rows, heads.index(">rho"), trials)


_FINALIST_HEADS = (
    ">speedup",
    "against dense",
    "chain",
    ">weights",
    ">of dense",
    ">latency",
    ">rho",
    ">efficiency",
)


def _finalist_cells(finalist: Finalist) -> list[str]:
    known = finalist.facts
    return [
        f"{1 / finalist.ratio:.2f}x",
        finalist.versus_dense.value,
        str(known.chain),
        f"{known.nnz:,}",
        phrases.percent(known.share),
        phrases.microseconds(finalist.latency.median_us),
        f"{known.rho:.4f}",
        f"{finalist.efficiency:.2f}",
    ]
