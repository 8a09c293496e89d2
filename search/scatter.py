"""Measured latency against a prediction as an inline SVG; both axes are logarithmic."""

from __future__ import annotations

from html import escape
from math import log10

from ksopt import plots
from ksopt.search.evidence import Predictor
from ksopt.search.result import SearchResult


def scatter(result: SearchResult, predictor: Predictor, width: int, height: int) -> str:
    """The plot as an ``<svg>`` element; nothing if fewer than two chains have both.

    Pruned chains, whose few repeats are less certain, are drawn as crosses.
    """
    found = [
        (value, trial)
        for trial in result.trials
        if trial.ratio_seen is not None and (value := predictor.value(trial.facts)) is not None
    ]
    if len(found) < 2:
        return ""
    left, right, top, bottom = 62.0, width - 12.0, 26.0, height - 44.0
    xs = [value for value, _ in found]
    ys = [trial.ratio_seen or 1.0 for _, trial in found]
    low_x, high_x, low_y, high_y = min(xs) / 1.1, max(xs) * 1.1, min(ys) / 1.2, max(ys) * 1.2

    def x(value: float) -> float:
        return left + (right - left) * log10(value / low_x) / log10(high_x / low_x)

    def y(value: float) -> float:
        return bottom + (top - bottom) * log10(value / low_y) / log10(high_y / low_y)

    parts = []
    for tick in plots.log_ticks(low_y, high_y):
        parts.append(f'<path class="grid" d="M{left:.1f} {y(tick):.1f}H{right:.1f}"/>')
        parts.append(plots.text(left - 6, y(tick) + 4, f"{tick:g}", "end"))
    last = left - 40
    for tick in plots.log_ticks(low_x, high_x):
        parts.append(f'<path class="axis" d="M{x(tick):.1f} {bottom:.1f}v5"/>')
        if x(tick) - last >= 40:  # a label beside another, not on it
            parts.append(plots.text(x(tick), bottom + 18, f"{tick:g}", "middle"))
            last = x(tick)
    frame = f"M{left:.1f} {top:.1f}V{bottom:.1f}H{right:.1f}"
    parts.append(f'<path class="axis" d="{frame}"/>')
    parts.append(plots.text((left + right) / 2, height - 8, predictor.name, "middle"))
    parts.append(plots.text(4, 14, "latency over dense", "start"))
    for value, trial in found:
        at_x, at_y = x(value), y(trial.ratio_seen or 1.0)
        tip = f"{trial.facts.chain}: {predictor.name} {value:.4g}, latency over dense "
        title = f"<title>{escape(tip)}{trial.ratio_seen:.3g}</title>"
        if trial.state == "pruned":
            cross = f"M{at_x - 3:.1f} {at_y - 3:.1f}l6 6m0 -6l-6 6"
            parts.append(f'<path class="axis" d="{cross}">{title}</path>')
        else:
            parts.append(
                f'<circle class="point" cx="{at_x:.1f}" cy="{at_y:.1f}" r="4">{title}</circle>'
            )
    label = f"Measured latency against {predictor.name} of {len(found)} chains"
    return plots.svg(parts, width, height, label)
