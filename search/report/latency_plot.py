"""Latency against weights as an inline SVG: no script, colours from the page's style sheet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import log10

from ksopt.report import svg
from ksopt.search.pareto import pareto_front
from ksopt.search.recommend import asked_for
from ksopt.search.report import phrases
from ksopt.search.results import SearchResult, TrialRecord


@dataclass(frozen=True)
class _Frame:
    """Where data lands on the drawing, in its own pixels; the y axis is logarithmic."""

    width: int
    height: int
    left: float
    right: float
    top: float
    bottom: float
    least_weights: float
    most_weights: float
    low_us: float
    high_us: float

    def x(self, weights: float) -> float:
        share = (weights - self.least_weights) / (self.most_weights - self.least_weights)
        return self.left + (self.right - self.left) * share

    def y(self, latency_us: float) -> float:
        share = log10(latency_us / self.low_us) / log10(self.high_us / self.low_us)
        return self.bottom + (self.top - self.bottom) * share


def latency_plot(result: SearchResult, width: int, height: int) -> str:
    """The plot as an ``<svg>`` element; nothing if no trial was measured.

    A point is a trial. Its height is its latency over the dense layer's, as measured in turns with
    it, times the dense layer's latency of the final: so points of several runs share one scale.
    """
    measured = [trial for trial in result.trials if trial.ratio is not None]
    if not measured or not result.finalists:
        return ""
    dense_us = result.finalists[0].dense.median_us
    frame = _frame(result, measured, dense_us, width, height)
    front = pareto_front(asked_for(measured, result.request), ("parameters", "latency_us"))
    parts = [
        *_axes(frame),
        *_budgets(result, frame),
        *_dense_line(frame, dense_us),
        _front(front, frame, dense_us),
        *(_point(trial, frame, dense_us) for trial in measured),
        *_chosen(result, frame, dense_us),
    ]
    label = (
        f"Latency against weights of {len(measured)} chains; the dense layer takes "
        f"{phrases.microseconds(dense_us)}"
    )
    return svg.svg(parts, width, height, label)


def _frame(
    result: SearchResult, trials: Sequence[TrialRecord], dense_us: float, width: int, height: int
) -> _Frame:
    latencies = [dense_us, *(dense_us * (trial.ratio or 1.0) for trial in trials)]
    most = max(result.request.steps[-1].parameters, *(trial.facts.nnz for trial in trials))
    least = min(trial.facts.nnz for trial in trials)
    return _Frame(
        width=width,
        height=height,
        left=62,
        right=width - 12,
        top=26,
        bottom=height - 44,
        # From 0, unless that would leave a large part of the drawing empty.
        least_weights=0.85 * least if least > 0.25 * most else 0.0,
        most_weights=1.06 * most,
        low_us=min(latencies) / 1.25,
        high_us=max(latencies) * 1.2,
    )


def _axes(frame: _Frame) -> list[str]:
    parts = []
    for tick in svg.log_ticks(frame.low_us, frame.high_us):
        y = frame.y(tick)
        parts.append(f'<path class="grid" d="M{frame.left:.1f} {y:.1f}H{frame.right:.1f}"/>')
        text = phrases.microseconds(tick).removesuffix(" us").removesuffix(".00").removesuffix(".0")
        text = svg.short(tick) if tick >= 1e6 else text  # what has room beside the axis
        parts.append(svg.text(frame.left - 6, y + 4, text, "end"))
    count = 6 if frame.width > 500 else 4
    for tick in svg.linear_ticks(frame.least_weights, frame.most_weights, count):
        x = frame.x(tick)
        parts.append(f'<path class="axis" d="M{x:.1f} {frame.bottom:.1f}v5"/>')
        parts.append(svg.text(x, frame.bottom + 18, svg.short(tick), "middle"))
    parts.append(
        f'<path class="axis" d="M{frame.left:.1f} {frame.top:.1f}V{frame.bottom:.1f}'
        f'H{frame.right:.1f}"/>'
    )
    parts.append(svg.text((frame.left + frame.right) / 2, frame.height - 8, "weights", "middle"))
    parts.append(svg.text(4, 14, "latency, us", "start"))
    return parts


def _budgets(result: SearchResult, frame: _Frame) -> list[str]:
    parts = []
    for answer in result.recommendations:
        x = frame.x(answer.budget.parameters)
        parts.append(f'<path class="budget" d="M{x:.1f} {frame.top:.1f}V{frame.bottom:.1f}"/>')
        parts.append(svg.text(x, frame.top - 6, answer.budget.text, "middle", "budget-text"))
    return parts


def _dense_line(frame: _Frame, dense_us: float) -> list[str]:
    y, took = frame.y(dense_us), phrases.microseconds(dense_us)
    # Under the line where there is no room between it and the budgets' names.
    at = y - 6 if y - frame.top > svg.FONT + 4 else y + svg.FONT + 4
    return [
        f'<path class="dense" d="M{frame.left:.1f} {y:.1f}H{frame.right:.1f}"/>',
        svg.text(frame.right, at, f"dense {took}", "end", "dense-text"),
    ]


def _front(front: Sequence[TrialRecord], frame: _Frame, dense_us: float) -> str:
    """Steps: between two points of the front, the left one is the best that the weights allow."""
    steps = ""
    for trial in front:
        x, y = frame.x(trial.facts.nnz), frame.y(dense_us * (trial.ratio or 1.0))
        steps += f"H{x:.1f}V{y:.1f}" if steps else f"M{x:.1f} {y:.1f}"
    return f'<path class="front" d="{steps}H{frame.right:.1f}"/>'


def _point(trial: TrialRecord, frame: _Frame, dense_us: float) -> str:
    x, y = frame.x(trial.facts.nnz), frame.y(dense_us * (trial.ratio or 1.0))
    tip = (
        f"{trial.facts.chain}: {phrases.weights(trial.facts)}; "
        f"{phrases.times(trial.ratio or 1.0)} dense"
    )
    title = f"<title>{escape(tip)}</title>"
    return {
        1: f'<path class="point" d="M{x - 4:.1f} {y - 4:.1f}h8v8h-8z">{title}</path>',
        2: f'<circle class="point" cx="{x:.1f}" cy="{y:.1f}" r="4">{title}</circle>',
        3: f'<path class="point" d="M{x:.1f} {y - 5:.1f}l5 9h-10z">{title}</path>',
    }[len(trial.facts.chain)]


def _chosen(result: SearchResult, frame: _Frame, dense_us: float) -> list[str]:
    """A ring around each step's fastest chain, at its trial's point."""
    places = {trial.number: trial for trial in result.trials}
    parts = []
    for answer in result.recommendations:
        if answer.chosen is not None:
            trial = places[answer.chosen.trial]
            x, y = frame.x(trial.facts.nnz), frame.y(dense_us * (trial.ratio or 1.0))
            parts.append(f'<circle class="chosen" cx="{x:.1f}" cy="{y:.1f}" r="9"/>')
    return parts
