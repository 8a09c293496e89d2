"""How near chains come to given weights against their size, as an inline SVG."""

from __future__ import annotations

from html import escape

from ksopt.report import svg
from ksopt.search.report import phrases
from ksopt.search.results import SearchResult, TrialRecord


def error_plot(result: SearchResult, width: int, height: int) -> str:
    """The plot as an ``<svg>`` element; nothing if no trial has an error.

    The stepped line is the least error that the weights allow, of what was measured.
    """
    found = [(t.facts.nnz, t.weight_error, t) for t in result.trials if t.weight_error is not None]
    if not found:
        return ""
    left, right, top, bottom = 62.0, width - 12.0, 26.0, height - 44.0
    most_x = 1.06 * max(result.request.steps[-1].parameters, *(nnz for nnz, _, _ in found), 1)
    most_y = 1.05 * max(max(error for _, error, _ in found), 1e-6)

    def x(nnz: float) -> float:
        return left + (right - left) * nnz / most_x

    def y(error: float) -> float:
        return bottom + (top - bottom) * error / most_y

    parts = []
    # Ticks of whole numbers, of millionths of the error.
    for tick in svg.linear_ticks(0, 1e6 * most_y, 5):
        parts.append(f'<path class="grid" d="M{left:.1f} {y(tick / 1e6):.1f}H{right:.1f}"/>')
        parts.append(svg.text(left - 6, y(tick / 1e6) + 4, f"{tick / 1e6:g}", "end"))
    for tick in svg.linear_ticks(0, most_x, 6 if width > 500 else 4):
        parts.append(f'<path class="axis" d="M{x(tick):.1f} {bottom:.1f}v5"/>')
        parts.append(svg.text(x(tick), bottom + 18, svg.short(tick), "middle"))
    parts.append(f'<path class="axis" d="M{left:.1f} {top:.1f}V{bottom:.1f}H{right:.1f}"/>')
    parts.append(svg.text((left + right) / 2, height - 8, "weights", "middle"))
    parts.append(svg.text(4, 14, "relative error to the given weights", "start"))
    steps, least = "", float("inf")
    for nnz, error, _ in sorted(found, key=lambda one: one[:2]):
        if error < least:
            least = error
            at = f"{x(nnz):.1f}", f"{y(error):.1f}"
            steps += f"H{at[0]}V{at[1]}" if steps else f"M{at[0]} {at[1]}"
    parts.append(f'<path class="front" d="{steps}H{right:.1f}"/>')
    parts += [_point(x(nnz), y(error), trial) for nnz, error, trial in found]
    for answer in result.recommendations:
        chosen = answer.chosen
        if chosen is not None and chosen.weight_error is not None:
            at_x, at_y = x(chosen.facts.nnz), y(chosen.weight_error)
            parts.append(f'<circle class="chosen" cx="{at_x:.1f}" cy="{at_y:.1f}" r="9"/>')
    label = f"Relative error against weights of {len(found)} chains"
    return svg.svg(parts, width, height, label)


def _point(x: float, y: float, trial: TrialRecord) -> str:
    tip = f"{trial.facts.chain}: {phrases.weights(trial.facts)}; error {trial.weight_error:.4g}"
    return (
        f'<circle class="point" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{escape(tip)}</title>'
        "</circle>"
    )
