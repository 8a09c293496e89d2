"""Bar chart of a plan's effect on each group of a model's layers, as inline SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ksopt.report import svg
from ksopt.search.plan import Effect
from ksopt.search.report import phrases

_BAR = 11.0
# Of a letter, with some room.
_LETTER = 7.2


@dataclass(frozen=True)
class _Row:
    name: str
    dense_us: float
    latency_us: float


def bars(effect: Effect, width: int) -> str:
    """Bars of each group's latency, dense above and by the plan below, then of all groups.

    Args:
        effect: Of the plan.
        width: Of the drawing; a narrow one has the names above the bars.

    Returns:
        An ``<svg>`` element; nothing if no group was measured.
    """
    rows = _rows(effect)
    if not rows:
        return ""
    is_narrow = width < 500
    left = 8.0 if is_narrow else 8.0 + _LETTER * max(len(row.name) for row in rows)
    head = 18.0 if is_narrow else 0.0
    pitch = head + 2 * _BAR + 14
    longest = max(max(row.dense_us, row.latency_us) for row in rows)
    # The space on the right is for a bar's own time.
    scale = (width - left - 10 - _LETTER * len(phrases.microseconds(longest))) / longest
    parts = []
    for place, row in enumerate(rows):
        top = 8 + place * pitch
        if is_narrow:
            parts.append(svg.text(left, top + 12, row.name, "start"))
        else:
            parts.append(svg.text(left - 8, top + _BAR + 5, row.name, "end"))
        pairs = ((row.dense_us, "s1", "dense"), (row.latency_us, "s0", "by the plan"))
        for turn, (us, kind, called) in enumerate(pairs):
            y = top + head + turn * (_BAR + 2)
            tip = svg.escaped(f"{row.name}, {called}: {phrases.microseconds(us)}")
            parts.append(
                f'<rect class="box {kind}" x="{left:.1f}" y="{y:.1f}" height="{_BAR:.1f}" '
                f'width="{max(us * scale, 1.0):.1f}"><title>{tip}</title></rect>'
            )
            time = phrases.microseconds(us)
            parts.append(svg.text(left + us * scale + 6, y + _BAR - 1, time, "start"))
    label = (
        f"Latencies of the linear layers: {phrases.microseconds(effect.dense_us)} dense, "
        f"{phrases.microseconds(effect.latency_us)} by the plan"
    )
    return svg.svg(parts, width, int(8 + len(rows) * pitch), label)


def _rows(effect: Effect) -> Sequence[_Row]:
    rows = [
        _Row(
            f"{one.group.count} x {one.group.role} {one.group.dims}",
            one.group.count * one.dense_us,
            one.group.count * one.latency_us,
        )
        for one in effect.groups
        if one.dense_us is not None and one.latency_us is not None
    ]
    return [*rows, _Row("all", effect.dense_us, effect.latency_us)] if rows else []
