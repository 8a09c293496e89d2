"""The figures of a benchmark's page: cumulative shares, and boxes by class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log10

from ksopt.measure.measurement import quantile
from ksopt.report import svg
from ksopt.report.document import Figure
from ksopt.system.plurals import counted

_SIZES = ((800, 380), (360, 340))
_SERIES = 6  # colours that the style sheet has
_TOP, _BOTTOM, _LEFT, _RIGHT = 28.0, 46.0, 46.0, 12.0


@dataclass(frozen=True)
class Group:
    """The boxes at one place of the horizontal axis.

    Attributes:
        name: under the axis.
        values: of each series, ascending.
    """

    name: str
    values: tuple[Sequence[float], ...]


def figure_of_shares(series: Sequence[tuple[str, Sequence[float]]], what: str) -> Figure:
    """The cumulative share of products by value (an ECDF), for each series.

    Args:
        series: names and ascending values.
        what: name of the values, under the horizontal axis.
    """
    wide, narrow = (_shares(series, what, *size) for size in _SIZES)
    return Figure(wide, narrow)


def figure_of_boxes(
    groups: Sequence[Group],
    series: Sequence[str],
    what: str,
    *,
    log: bool,
    line: float,
    across: str = "",
) -> Figure:
    """Boxes from quartile to quartile, whiskers from the 5th to the 95th percentile, by group.

    Args:
        groups: from left to right.
        series: names of the series; each has a box in each group.
        what: name of the values, above the vertical axis.
        log: whether the vertical axis is logarithmic.
        line: value of the horizontal line.
        across: name of the classes, under the horizontal axis.
    """
    wide, narrow = (_boxes(groups, series, what, log, line, across, *size) for size in _SIZES)
    return Figure(wide, narrow)


def _shares(
    series: Sequence[tuple[str, Sequence[float]]], what: str, width: int, height: int
) -> str:
    drawn = [(name, values) for name, values in series[:_SERIES] if values]
    if not drawn:
        return ""
    most = max(1.0, *(values[-1] for _, values in drawn))
    right, bottom = width - _RIGHT, height - _BOTTOM

    def x(value: float) -> float:
        return _LEFT + (right - _LEFT) * value / most

    def y(share: float) -> float:
        return bottom + (_TOP - bottom) * share

    parts = []
    for tick in range(0, 101, 20):
        level = y(tick / 100)
        parts.append(f'<path class="grid" d="M{_LEFT:.1f} {level:.1f}H{right:.1f}"/>')
        parts.append(svg.text(_LEFT - 6, level + 4, f"{tick} %", "end"))
    # In tenths, of which the axis has 10 or a few more.
    for tenth in svg.linear_ticks(0, 10 * most, 10 if width > 500 else 5):
        parts.append(f'<path class="axis" d="M{x(tenth / 10):.1f} {bottom:.1f}v5"/>')
        parts.append(svg.text(x(tenth / 10), bottom + 18, f"{tenth / 10:g}", "middle"))
    parts.append(f'<path class="axis" d="M{_LEFT:.1f} {_TOP:.1f}V{bottom:.1f}H{right:.1f}"/>')
    parts.append(svg.text((_LEFT + right) / 2, height - 8, what, "middle"))
    parts.append(svg.text(4, 14, "share of products", "start"))
    for number, (name, values) in enumerate(drawn):
        path = f"M{x(values[0]):.1f} {y(0):.1f}"
        for index, value in enumerate(values, 1):
            path += f"H{x(value):.1f}V{y(index / len(values)):.1f}"
        parts.append(f'<path class="line s{number}" d="{path}"/>')
        # At the bottom right, where no curve runs.
        above = 16 * (len(drawn) - 1 - number)
        parts.append(_legend(name, number, right - 6, bottom - 10 - above, "end"))
    label = f"Share of products by {what}: " + "; ".join(
        f"{name}: median {quantile(list(values), 0.5):.2f}" for name, values in drawn
    )
    return svg.svg(parts, width, height, label)


def _boxes(
    groups: Sequence[Group],
    series: Sequence[str],
    what: str,
    log: bool,
    line: float,
    across: str,
    width: int,
    height: int,
) -> str:
    shown = [group for group in groups if any(group.values[:_SERIES])]
    if not shown:
        return ""
    names = series[:_SERIES]
    legend = 16 * len(names) if len(names) > 1 else 0
    flat = [value for group in shown for values in group.values for value in values] + [line]
    low, high = (min(flat) / 1.1, max(flat) * 1.1) if log else (0.0, max(1.0, *flat) * 1.02)
    top, right, bottom = _TOP + legend, width - _RIGHT, height - _BOTTOM

    def y(value: float) -> float:
        if log:
            return bottom + (top - bottom) * log10(value / low) / log10(high / low)
        return bottom + (top - bottom) * (value - low) / (high - low)

    parts = []
    for tick in _ticks(low, high, log):
        parts.append(f'<path class="grid" d="M{_LEFT:.1f} {y(tick):.1f}H{right:.1f}"/>')
        parts.append(svg.text(_LEFT - 6, y(tick) + 4, f"{tick:g}", "end"))
    parts.append(f'<path class="axis" d="M{_LEFT:.1f} {top:.1f}V{bottom:.1f}H{right:.1f}"/>')
    parts.append(f'<path class="budget" d="M{_LEFT:.1f} {y(line):.1f}H{right:.1f}"/>')
    parts.append(svg.text(4, 14, what, "start"))
    if across and width >= 500:  # on a narrow screen the group names need this space
        parts.append(svg.text((_LEFT + right) / 2, height - 4, across, "middle"))
    room = (right - _LEFT) / len(shown)
    for place, group in enumerate(shown):
        left = _LEFT + room * place
        # Names do not fit side by side on a narrow screen: they alternate over three lines.
        lower = 12 * (place % 3) if width < 500 else 0
        parts.append(svg.text(left + room / 2, bottom + 15 + lower, group.name, "middle"))
        each = 0.8 * room / len(names)
        for number, values in enumerate(group.values[:_SERIES]):
            if values:
                middle = left + 0.1 * room + each * (number + 0.5)
                parts += _box(middle, min(0.7 * each, 40.0), values, number, y)
    if len(names) > 1:
        parts += [_legend(n, i, _LEFT + 12, _TOP + 8 + 16 * i) for i, n in enumerate(names)]
    return svg.svg(parts, width, height, f"{what} in {len(shown)} classes")


def _box(
    middle: float, width: float, values: Sequence[float], number: int, y: Callable[[float], float]
) -> list[str]:

    p5, p25, p50, p75, p95 = (
        y(quantile(list(values), share)) for share in (0.05, 0.25, 0.5, 0.75, 0.95)
    )
    left, right = middle - width / 2, middle + width / 2
    ends = f"M{middle:.1f} {p5:.1f}V{p25:.1f}M{middle:.1f} {p75:.1f}V{p95:.1f}"
    median = quantile(list(values), 0.5)
    tip = f"<title>{counted(len(values), 'product')}, median {median:.2f}</title>"
    return [
        f'<path class="whisker s{number}" d="{ends}"/>',
        f'<path class="box s{number}" d="M{left:.1f} {p25:.1f}H{right:.1f}V{p75:.1f}H{left:.1f}z">'
        f"{tip}</path>",
        f'<path class="middle" d="M{left:.1f} {p50:.1f}H{right:.1f}"/>',
    ]


def _legend(name: str, number: int, x: float, y: float, anchor: str = "start") -> str:
    return svg.text(x, y, name, anchor, f"label s{number}")


def _ticks(low: float, high: float, log: bool) -> list[float]:
    if log:
        return svg.log_ticks(low, high)
    return [tenth / 10 for tenth in svg.linear_ticks(0, 10 * high, 5)]
