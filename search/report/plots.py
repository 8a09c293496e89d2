"""Plots of a report as inline SVG, without scripts; colours are in the page's style sheet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ksopt.patterns.chain import Chain
from ksopt.report import svg
from ksopt.report.document import Figure
from ksopt.report.svg import Tip
from ksopt.search import timing_noise
from ksopt.search.diagnostics import Predictor
from ksopt.search.metrics import LATENCY, METRICS, PARAMETERS, Metric
from ksopt.search.pareto import pareto_front
from ksopt.search.recommend import admitted
from ksopt.search.report import phrases
from ksopt.search.report.axes import Axes, Box, Scale, beside
from ksopt.search.report.reported_latency import ReportedLatencies
from ksopt.search.results import Finalist, LayerResult, Recommendation, TrialRecord
from ksopt.system.plurals import counted

WIDE, NARROW = (800, 376), (360, 340)
_SHOWN_TIMES_DENSE = 4.0


def figure(drawn: Callable[[int, int], str], name: str) -> Figure:
    """A figure drawn for a wide and a narrow screen; ``name`` is that of its file."""
    return Figure(drawn(*WIDE), drawn(*NARROW), name)


def latency_plot(
    result: LayerResult, chosen: Recommendation | None, width: int, height: int
) -> str:
    """Plot of latency against weights as an ``<svg>`` element; empty if no trial was measured.

    A point is a trial, at the latency of the tables (`ReportedLatencies`). The stepped line joins
    the points that no other beats in both.

    Args:
        result: Of the layer.
        chosen: The answer whose chain is labelled; None for none.
        width, height: Of the drawing.
    """
    measured = [trial for trial in result.trials if trial.ratio is not None]
    if not measured or not result.finalists:
        return ""
    dense_us, latency_us = _dense_us(result), _latencies(result)

    def place(trial: TrialRecord) -> tuple[float, float]:
        return float(trial.facts.nnz), latency_us(trial)

    most = max(result.request.steps[-1].parameters, *(trial.facts.nnz for trial in measured))
    least = min(trial.facts.nnz for trial in measured)
    # From 0, unless a large part of the drawing would be empty.
    low = 0.85 * least if least > 0.25 * most else 0.0
    axes = Axes(
        width,
        height,
        Scale(PARAMETERS.axis, low, 1.06 * most),
        _latency_scale(result),
    )
    parts = axes.drawn()
    for answer in result.recommendations:
        x = axes.x(answer.budget.parameters)
        parts.append(f'<path class="budget" d="M{x:.1f} {axes.top:.1f}V{axes.bottom:.1f}"/>')
        parts.append(svg.text(x, axes.top - 6, answer.budget.text, "middle", "budget-text"))
    dense = f"dense {phrases.microseconds(dense_us)}"
    parts += axes.dense_line(dense_us, dense)
    front = _lowest(map(place, admitted(measured, result.request)))
    parts += axes.steps(front)
    named = None if chosen is None or chosen.chosen is None else chosen.chosen.trial
    taken = [axes.dense_box(dense_us, dense), *axes.step_boxes(front)]
    parts += _marks(result, measured, axes, place, named=named, taken=taken)
    label = (
        f"Latency against weights of {counted(len(measured), 'chain')}; the dense layer takes "
        f"{phrases.microseconds(dense_us)}"
    )
    return svg.svg(parts, width, height, label)


def beyond(result: LayerResult, pruned: bool = False) -> str:
    """Sentence on chains that are too slow for the plots of latency; empty if there are none.

    Args:
        result: Of the layer.
        pruned: Whether the plot includes pruned chains.
    """
    most, latency_us = _most_us(result), _latencies(result)
    drawn = [one for one in result.trials if one.ratio is not None or (pruned and one.ratio_seen)]
    times = [latency_us(trial) for trial in drawn]
    slower = sum(time > most for time in times)
    if not slower:
        return ""
    take, lie = ("1 chain takes", "lies") if slower == 1 else (f"{slower} chains take", "lie")
    return f"{take} more than {phrases.microseconds(most)} and {lie} on the edge."


def _dense_us(result: LayerResult) -> float:
    return ReportedLatencies(result).dense_us


def _latencies(result: LayerResult) -> Callable[[TrialRecord], float]:
    """The function from a trial to its latency, or the dense layer's if it has none."""
    times = ReportedLatencies(result)
    return lambda trial: times.latency_us(trial) or times.dense_us


def _lowest(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other beats in both coordinates, from left to right."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not front or y < front[-1][1]:
            front.append((x, y))
    return front


def _most_us(result: LayerResult) -> float:
    """Upper end of latency in plots; slower chains are on the edge, to leave room for others."""
    chosen = [one.chosen.ratio for one in result.recommendations if one.chosen is not None]
    return _dense_us(result) * max([_SHOWN_TIMES_DENSE, *chosen])


def _latency_scale(result: LayerResult) -> Scale:
    dense_us, latency_us = _dense_us(result), _latencies(result)
    times = [latency_us(t) for t in result.trials if t.ratio_seen is not None]
    return Scale.around(LATENCY.axis, [dense_us, *times], is_log=True, most=_most_us(result))


def metric_plot(result: LayerResult, metric: Metric, width: int, height: int) -> str:
    """Plot of a metric against `Metric.plotted_against`; empty if no trial has it.

    The stepped line is the best measured value up to a value of the other metric. The dense layer's
    value, if it was measured after the final, is a line.
    """
    if metric.plotted_against is None:
        return ""
    against = METRICS[metric.plotted_against]
    dense_us, latency_us = _dense_us(result), _latencies(result)

    def place(trial: TrialRecord) -> tuple[float, float]:
        x, y = against.of(trial), metric.of(trial)
        assert x is not None
        assert y is not None
        return latency_us(trial) if against is LATENCY else x, y

    trials = [
        trial
        for trial in result.trials
        if metric.of(trial) is not None and against.of(trial) is not None
    ]
    if not trials:
        return ""
    dense = next((one.dense_values.get(metric.name) for one in result.finalists), None)
    xs, ys = zip(*map(place, trials), strict=True)
    most = float(result.request.steps[-1].parameters)
    x_scale = Scale.around(against.axis, [most, *xs], against.is_log)
    axes = Axes(
        width,
        height,
        _latency_scale(result) if against is LATENCY else x_scale,
        Scale.around(metric.axis, [*ys, *([] if dense is None else [dense])], metric.is_log),
    )
    parts = axes.drawn()
    if against is LATENCY:
        x = axes.x(dense_us)  # chains to the left are faster than the dense layer
        parts.append(f'<path class="dense" d="M{x:.1f} {axes.top:.1f}V{axes.bottom:.1f}"/>')
    if dense is not None:
        parts += axes.dense_line(dense, f"dense {metric.shown(dense)}")
    reported = ReportedLatencies(result).trials
    front = pareto_front(admitted(reported, result.request), (against, metric))
    parts += axes.steps(map(place, front))
    parts += _marks(result, trials, axes, place, metric)
    label = f"{metric.title.capitalize()} against {against.axis} of {counted(len(trials), 'chain')}"
    return svg.svg(parts, width, height, label)


def scatter(result: LayerResult, predictor: Predictor, width: int, height: int) -> str:
    """Plot of measured latency against a prediction; empty if fewer than two chains have both.

    Pruned chains, whose few repeats are less certain, are drawn as crosses.
    """
    points = [
        (value, trial)
        for trial in result.trials
        if trial.ratio_seen is not None and (value := predictor.value(trial.facts)) is not None
    ]
    if len(points) < 2:
        return ""
    axes = Axes(
        width,
        height,
        Scale.around(predictor.name, [value for value, _ in points], is_log=True),
        _latency_scale(result),
    )
    dense_us, latencies, tips = _dense_us(result), _latencies(result), []
    parts = [*axes.drawn(), *axes.dense_line(dense_us, "dense")]
    for value, trial in points:
        latency_us = latencies(trial)
        x, y = axes.x(value), axes.y(latency_us)
        speed = f"{phrases.microseconds(latency_us)}, {phrases.times(latency_us / dense_us)} dense"
        tips.append(Tip(x, y, (str(trial.facts.chain), f"{predictor.name} {value:.4g}", speed)))
        if trial.state == "pruned":
            parts.append(f'<path class="axis" d="M{x - 3:.1f} {y - 3:.1f}l6 6m0 -6l-6 6"/>')
        else:
            parts.append(_mark(trial, x, y))
    parts += svg.hover(tips, width, height)
    label = f"Measured latency against {predictor.name} of {counted(len(points), 'chain')}"
    return svg.svg(parts, width, height, label)


def _marks(
    result: LayerResult,
    trials: Sequence[TrialRecord],
    axes: Axes,
    place: Callable[[TrialRecord], tuple[float, float]],
    metric: Metric | None = None,
    named: int | None = None,
    taken: Sequence[Box] = (),
) -> list[str]:
    """A mark for each trial, a ring around each step's fastest chain, and the label of one."""
    marks, tips, times = [], [], ReportedLatencies(result)
    for trial in trials:
        x_value, y_value = place(trial)
        x, y = axes.x(x_value), axes.y(y_value)
        marks.append(_mark(trial, x, y))
        tips.append(Tip(x, y, _facts(trial, times, metric, y_value)))
    by_number = {trial.number: trial for trial in trials}
    for answer in result.recommendations:
        if answer.chosen is not None and answer.chosen.trial in by_number:
            x_value, y_value = place(by_number[answer.chosen.trial])
            x, y = axes.x(x_value), axes.y(y_value)
            marks.append(f'<circle class="chosen" cx="{x:.1f}" cy="{y:.1f}" r="9"/>')
            if answer.chosen.trial == named:
                named = None  # once, where several steps have it
                marks += beside(axes, x, y, _name(answer.chosen), taken)
    return [*marks, *svg.hover(tips, axes.width, axes.height)]


def _name(chosen: Finalist) -> str:
    if timing_noise.warning(chosen):
        return f"looks fastest: {phrases.speed_span(chosen.latency, chosen.dense)}"
    latency = phrases.microseconds(chosen.latency.median_us)
    return f"use this: {latency}, {1 / chosen.ratio:.2f}x"


def _facts(
    trial: TrialRecord, times: ReportedLatencies, metric: Metric | None, value: float
) -> tuple[str, ...]:
    """Lines of a trial's tooltip."""
    lines = [str(trial.facts.chain)]
    ratio, latency_us = times.ratio(trial), times.latency_us(trial)
    if ratio is not None and latency_us is not None:
        lines.append(f"{phrases.microseconds(latency_us)}, {phrases.times(ratio)} dense")
    lines.append(phrases.weights(trial.facts))
    if metric is not None:
        lines.append(f"{metric.title} {metric.shown(value)}")
    return tuple(lines)


def _mark(trial: TrialRecord, x: float, y: float) -> str:
    chain = trial.facts.chain
    if not isinstance(chain, Chain):
        return f'<path class="point" d="M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z"/>'
    return {
        1: f'<path class="point" d="M{x - 4:.1f} {y - 4:.1f}h8v8h-8z"/>',
        2: f'<circle class="point" cx="{x:.1f}" cy="{y:.1f}" r="4"/>',
        3: f'<path class="point" d="M{x:.1f} {y - 5:.1f}l5 9h-10z"/>',
    }[len(chain)]
