"""Energy of a call against latency as an inline SVG; both axes are logarithmic."""

from __future__ import annotations

from html import escape

from ksopt.report import svg
from ksopt.search.pareto import pareto_front
from ksopt.search.recommend import asked_for
from ksopt.search.report import phrases
from ksopt.search.report.log_axes import LogAxes
from ksopt.search.results import SearchResult, TrialRecord


def energy_plot(result: SearchResult, width: int, height: int) -> str:
    """The plot as an ``<svg>`` element; nothing if no trial has an energy.

    The stepped line is the least energy that the latency allows, of what was measured. The dense
    layer's energy, of after the final, is a line where it is known.
    """
    found = [trial for trial in result.trials if trial.energy_mj is not None and trial.ratio]
    if not found:
        return ""
    dense_mj = next((one.dense_energy_mj for one in result.finalists), None)
    xs = [1.0, *(trial.ratio or 1.0 for trial in found)]
    ys = [trial.energy_mj or 1.0 for trial in found] + ([] if dense_mj is None else [dense_mj])
    axes = LogAxes(width, height, min(xs) / 1.1, max(xs) * 1.1, min(ys) / 1.2, max(ys) * 1.2)
    parts = axes.drawn("latency over dense", "energy of a call, mJ")
    # What is left of this line is faster than the dense layer.
    x = axes.x(1.0)
    parts.append(f'<path class="dense" d="M{x:.1f} {axes.top:.1f}V{axes.bottom:.1f}"/>')
    if dense_mj is not None:
        y = axes.y(dense_mj)
        # Under the line where there is no room above it.
        at = y - 6 if y - axes.top > svg.FONT + 4 else y + svg.FONT + 4
        parts.append(f'<path class="dense" d="M{axes.left:.1f} {y:.1f}H{axes.right:.1f}"/>')
        text = f"dense {phrases.millijoules(dense_mj)}"
        # On the side where the upright line is not.
        side, anchor = (axes.right, "end")
        if x > (axes.left + axes.right) / 2:
            side, anchor = (axes.left + 6, "start")
        parts.append(svg.text(side, at, text, anchor, "dense-text"))
    steps = ""
    allowed = asked_for(found, result.request)
    for trial in pareto_front(allowed, ("latency_us", "energy_mj")):
        place = _place(trial, axes)
        steps += f"H{place[0]:.1f}V{place[1]:.1f}" if steps else f"M{place[0]:.1f} {place[1]:.1f}"
    if steps:
        parts.append(f'<path class="front" d="{steps}H{axes.right:.1f}"/>')
    parts += [_point(trial, axes) for trial in found]
    chosen = {answer.chosen.trial for answer in result.recommendations if answer.chosen}
    for trial in found:
        if trial.number in chosen:
            at_x, at_y = _place(trial, axes)
            parts.append(f'<circle class="chosen" cx="{at_x:.1f}" cy="{at_y:.1f}" r="9"/>')
    label = f"Energy of a call against latency over dense of {len(found)} chains"
    return svg.svg(parts, width, height, label)


def _place(trial: TrialRecord, axes: LogAxes) -> tuple[float, float]:
    assert trial.ratio is not None
    assert trial.energy_mj is not None
    return axes.x(trial.ratio), axes.y(trial.energy_mj)


def _point(trial: TrialRecord, axes: LogAxes) -> str:
    assert trial.energy_mj is not None
    x, y = _place(trial, axes)
    tip = (
        f"{trial.facts.chain}: {phrases.millijoules(trial.energy_mj)} a call; "
        f"{phrases.times(trial.ratio or 1.0)} dense; {phrases.weights(trial.facts)}"
    )
    return (
        f'<circle class="point" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{escape(tip)}</title>'
        "</circle>"
    )
