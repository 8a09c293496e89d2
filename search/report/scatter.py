"""Measured latency against a prediction as an inline SVG; both axes are logarithmic."""

from __future__ import annotations

from html import escape

from ksopt.report import svg
from ksopt.search.diagnostics import Predictor
from ksopt.search.report.log_axes import LogAxes
from ksopt.search.results import SearchResult


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
    xs = [value for value, _ in found]
    ys = [trial.ratio_seen or 1.0 for _, trial in found]
    axes = LogAxes(width, height, min(xs) / 1.1, max(xs) * 1.1, min(ys) / 1.2, max(ys) * 1.2)
    parts = axes.drawn(predictor.name, "latency over dense")
    for value, trial in found:
        x, y = axes.x(value), axes.y(trial.ratio_seen or 1.0)
        tip = f"{trial.facts.chain}: {predictor.name} {value:.4g}, latency over dense "
        title = f"<title>{escape(tip)}{trial.ratio_seen:.3g}</title>"
        if trial.state == "pruned":
            cross = f"M{x - 3:.1f} {y - 3:.1f}l6 6m0 -6l-6 6"
            parts.append(f'<path class="axis" d="{cross}">{title}</path>')
        else:
            parts.append(f'<circle class="point" cx="{x:.1f}" cy="{y:.1f}" r="4">{title}</circle>')
    label = f"Measured latency against {predictor.name} of {len(found)} chains"
    return svg.svg(parts, width, height, label)
