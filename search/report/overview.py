"""Plot of speedup over dense against the share of dense weights, of several sizes or searches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ksopt.report import svg
from ksopt.report.svg import Tip
from ksopt.search.report import phrases
from ksopt.search.report.axes import Axes, Scale
from ksopt.search.results import Finalist, LayerResult, Recommendation

_ROW = 16  # a line of the legend
_COLOURS = ("s0", "s2", "s3", "s4", "s5")  # s1 is the colour of the line of the dense layer


@dataclass(frozen=True)
class Series:
    """The finalists of one size of one search.

    Args:
        name: In the legend.
        finalists: Chains of the final.
        chosen: The finalist that is used; None if the layer stays dense.
    """

    name: str
    finalists: tuple[Finalist, ...]
    chosen: Finalist | None

    @classmethod
    def of(cls, name: str, layer: LayerResult, answer: Recommendation | None) -> Series:
        """The series of a layer and its answer."""
        return cls(name, layer.finalists, None if answer is None else answer.chosen)


def overview_plot(series: Sequence[Series], width: int, height: int) -> str:
    """The plot as an ``<svg>`` element; empty if no series has a finalist.

    A point is a chain of a final, a ring the one that is used; the line is the dense layer. The
    last colour is shared by all further series.
    """
    drawn = [one for one in series if one.finalists]
    if not drawn:
        return ""
    legend = _legend([one.name for one in drawn], width)
    below = height + _ROW * legend.rows
    speedups = [1 / finalist.ratio for one in drawn for finalist in one.finalists]
    shares = [100 * finalist.facts.share for one in drawn for finalist in one.finalists]
    axes = Axes(
        width,
        height,
        Scale("weights, % of the dense layer's", 0.0, 1.06 * max(shares)),
        Scale.around("speedup over dense", [1.0, *speedups], is_log=True),
    )
    parts, tips = [*axes.drawn(), *axes.dense_line(1.0, "dense")], []
    for place, one in enumerate(drawn):
        colour = _COLOURS[min(place, len(_COLOURS) - 1)]
        for finalist in one.finalists:
            x, y = axes.x(100 * finalist.facts.share), axes.y(1 / finalist.ratio)
            parts.append(f'<circle class="dot {colour}" cx="{x:.1f}" cy="{y:.1f}" r="5"/>')
            if finalist is one.chosen:
                parts.append(f'<circle class="chosen" cx="{x:.1f}" cy="{y:.1f}" r="9"/>')
            tips.append(Tip(x, y, _facts(one, finalist)))
    parts += [part for entry in legend.entries for part in entry.drawn(height + 4)]
    label = f"Speedup over dense against weights, of {', '.join(one.name for one in drawn)}"
    return svg.svg([*parts, *svg.hover(tips, width, below)], width, below, label)


def _facts(series: Series, finalist: Finalist) -> tuple[str, ...]:
    return (
        str(finalist.facts.chain),
        series.name,
        f"{phrases.microseconds(finalist.latency.median_us)}, "
        f"{phrases.times(finalist.ratio)} dense",
        phrases.weights(finalist.facts),
    )


@dataclass(frozen=True)
class _Entry:
    name: str
    colour: str
    left: float
    row: int

    def drawn(self, top: float) -> list[str]:
        y = top + _ROW * self.row
        return [
            f'<circle class="dot {self.colour}" cx="{self.left + 5:.1f}" cy="{y:.1f}" r="5"/>',
            svg.text(self.left + 14, y + 4, self.name, "start"),
        ]


@dataclass(frozen=True)
class _Legend:
    entries: tuple[_Entry, ...]
    rows: int


def _legend(names: Sequence[str], width: int) -> _Legend:
    """Layout of names in as many lines as they need."""
    shown = list(names[: len(_COLOURS)])
    if len(names) > len(_COLOURS):
        shown[-1] = f"{len(names) - len(_COLOURS) + 1} others"
    entries: list[_Entry] = []
    left, row = 8.0, 0
    for place, name in enumerate(shown):
        wide = 30 + svg.width_of(name)
        if entries and left + wide > width:
            left, row = 8.0, row + 1
        entries.append(_Entry(name, _COLOURS[place], left, row))
        left += wide
    return _Legend(tuple(entries), row + 1)
