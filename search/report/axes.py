"""The two axes of an inline SVG drawing: mapping of data to pixels, and ticks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log10

from ksopt.report import svg

_LEFT, _RIGHT, _TOP, _BOTTOM = 62.0, 12.0, 36.0, 44.0
# Between the labels of two ticks of the x axis.
_LABEL = 40.0


@dataclass(frozen=True)
class Scale:
    """Scale of an axis.

    Args:
        name: Quantity and unit.
        low, high: Its ends, in the data's units.
        is_log: Whether it is logarithmic.
    """

    name: str
    low: float
    high: float
    is_log: bool = False

    @property
    def title(self) -> str:
        """Label of the axis."""
        return f"{self.name} (log scale)" if self.is_log else self.name

    @classmethod
    def around(
        cls, name: str, values: Sequence[float], is_log: bool, most: float | None = None
    ) -> Scale:
        """A scale that contains some values, and 0 if it is linear; linear if one is not positive.

        Args:
            name: Label of the axis.
            values: The values; those above ``most`` are at its upper end.
            is_log: Whether it is logarithmic.
            most: The largest value that counts, so that a few do not squash the others.

        Example:
            >>> Scale.around("us", [10.0, 100.0], is_log=True)
            Scale(name='us', low=8.333333333333334, high=120.0, is_log=True)
            >>> Scale.around("us", [10.0, 9000.0], is_log=True, most=100.0).high
            120.0
            >>> Scale.around("score", [-1.0, 3.0], is_log=True).is_log
            False
        """
        least, most = min(values), min(max(values), max(values) if most is None else most)
        if is_log and least > 0:
            return cls(name, least / 1.2, most * 1.2, is_log=True)
        return cls(name, min(0.0, 1.05 * least), max(1.05 * most, 1e-6))

    def share(self, value: float) -> float:
        """Position of a value between the ends, 0 to 1, clipped to them."""
        if self.is_log:
            share = log10(value / self.low) / log10(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, share))

    def ticks(self, count: int) -> list[float]:
        """Round values, about ``count`` if the scale is linear."""
        if self.is_log:
            return svg.log_ticks(self.low, self.high)
        # Ticks are whole numbers, of millionths if the range is small.
        unit = 1.0 if self.high - self.low > 10 else 1e-6
        return [unit * tick for tick in svg.linear_ticks(self.low / unit, self.high / unit, count)]


@dataclass(frozen=True)
class Axes:
    """Two scales on a drawing.

    Args:
        width, height: Of the drawing.
        x_scale, y_scale: The scales.
    """

    width: int
    height: int
    x_scale: Scale
    y_scale: Scale
    left = _LEFT
    top = _TOP

    @property
    def right(self) -> float:
        """Right end of the x axis, pixels."""
        return self.width - _RIGHT

    @property
    def bottom(self) -> float:
        """Height of the x axis, pixels."""
        return self.height - _BOTTOM

    def x(self, value: float) -> float:
        """Pixel of a value on the x axis."""
        return self.left + (self.right - self.left) * self.x_scale.share(value)

    def y(self, value: float) -> float:
        """Pixel of a value on the y axis."""
        return self.bottom + (self.top - self.bottom) * self.y_scale.share(value)

    def drawn(self) -> list[str]:
        """The axes, a grid of the y axis's ticks, and labels."""
        left, right, top, bottom = self.left, self.right, self.top, self.bottom
        parts = []
        for tick in self.y_scale.ticks(5):
            y = self.y(tick)
            parts.append(f'<path class="grid" d="M{left:.1f} {y:.1f}H{right:.1f}"/>')
            parts.append(svg.text(left - 6, y + 4, _label(tick), "end"))
        last = left - _LABEL
        for tick in self.x_scale.ticks(6 if self.width > 500 else 4):
            x = self.x(tick)
            parts.append(f'<path class="axis" d="M{x:.1f} {bottom:.1f}v5"/>')
            if x - last >= _LABEL:  # a label beside another, not on it
                parts.append(svg.text(x, bottom + 18, _label(tick), "middle"))
                last = x
        frame = f"M{left:.1f} {top:.1f}V{bottom:.1f}H{right:.1f}"
        parts.append(f'<path class="axis" d="{frame}"/>')
        parts.append(svg.text((left + right) / 2, self.height - 8, self.x_scale.title, "middle"))
        parts.append(svg.text(4, 14, self.y_scale.title, "start"))
        return parts

    def steps(self, points: Iterable[tuple[float, float]]) -> list[str]:
        """The stepped line of a front: between two points the left one is the best."""
        line = ""
        for x_value, y_value in points:
            x, y = self.x(x_value), self.y(y_value)
            line += f"H{x:.1f}V{y:.1f}" if line else f"M{x:.1f} {y:.1f}"
        return [f'<path class="front" d="{line}H{self.right:.1f}"/>'] if line else []

    def step_boxes(self, points: Sequence[tuple[float, float]]) -> list[Box]:
        """Boxes of the horizontal parts of that line, which texts must not cross."""
        ends = [self.x(x) for x, _ in points[1:]] + [self.right]
        levels = [(self.x(x), self.y(y)) for x, y in points]
        return [
            Box(left, right, y - 1, y + 1)
            for (left, y), right in zip(levels, ends, strict=True)
            if right > left
        ]

    def dense_line(self, value: float, words: str) -> list[str]:
        """A line at the dense layer's value on the y axis, labelled at its right end."""
        y = self.y(value)
        return [
            f'<path class="dense" d="M{self.left:.1f} {y:.1f}H{self.right:.1f}"/>',
            svg.text(self.right, self._beside_line(y), words, "end", "dense-text"),
        ]

    def dense_box(self, value: float, words: str) -> Box:
        """The box of that label."""
        return Box.of(self.right, self._beside_line(self.y(value)), words, "end")

    def _beside_line(self, y: float) -> float:
        """Position of a label above the line, or below if there is no room above."""
        return y - 6 if y - self.top > svg.FONT + 4 else y + svg.FONT + 4


@dataclass(frozen=True)
class Box:
    """Bounding box of a text on a drawing."""

    left: float
    right: float
    top: float
    bottom: float

    @classmethod
    def of(cls, x: float, y: float, words: str, anchor: str) -> Box:
        """The box of a text as `svg.text` draws it."""
        wide = svg.width_of(words) * 1.1  # bold
        left = x - {"start": 0.0, "middle": wide / 2, "end": wide}[anchor]
        return cls(left, left + wide, y - svg.FONT, y + 4)

    def meets(self, other: Box) -> bool:
        """Whether two boxes overlap."""
        apart = self.right <= other.left or other.right <= self.left
        return not (apart or self.bottom <= other.top or other.bottom <= self.top)

    def is_in(self, axes: Axes) -> bool:
        """Whether the box is inside the axes."""
        across = axes.left <= self.left and self.right <= axes.right
        return across and axes.top <= self.top and self.bottom <= axes.bottom


def beside(axes: Axes, x: float, y: float, words: str, taken: Sequence[Box]) -> list[str]:
    """A text beside a mark, in a place that is free if there is one."""
    places = [
        (x + aside, y + up, anchor)
        for up in (4.0, -18.0, 26.0, -36.0, 44.0, -54.0, 62.0, -72.0, 80.0, -90.0, 98.0)
        for anchor, aside in (("start", 13.0), ("end", -13.0), ("middle", 0.0))
        if anchor != "middle" or abs(up) >= 10  # not on the mark itself
    ]
    boxes = {place: Box.of(*place[:2], words, place[2]) for place in places}
    inside = [place for place in places if boxes[place].is_in(axes)]
    free = [place for place in inside if not any(map(boxes[place].meets, taken))]
    at_x, at_y, anchor = (free or inside or places)[0]
    return [svg.text(at_x, at_y, words, anchor, "chosen-text")]


def _label(value: float) -> str:
    return svg.short(value) if abs(value) >= 1e4 else f"{value:,.6g}"
