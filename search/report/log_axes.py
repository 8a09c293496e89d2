"""Two logarithmic axes of an inline SVG drawing, with their ticks and names."""

from __future__ import annotations

from dataclasses import dataclass
from math import log10

from ksopt.report import svg


@dataclass(frozen=True)
class LogAxes:
    """Where data lands on a drawing, in its own pixels.

    Args:
        width, height: Of the drawing.
        low_x, high_x, low_y, high_y: The ends of the axes, in the data's units.
    """

    width: int
    height: int
    low_x: float
    high_x: float
    low_y: float
    high_y: float
    left = 62.0
    top = 26.0

    @property
    def right(self) -> float:
        """Where the x axis ends."""
        return self.width - 12.0

    @property
    def bottom(self) -> float:
        """Where the x axis lies."""
        return self.height - 44.0

    def x(self, value: float) -> float:
        """Of a value on the x axis."""
        share = log10(value / self.low_x) / log10(self.high_x / self.low_x)
        return self.left + (self.right - self.left) * share

    def y(self, value: float) -> float:
        """Of a value on the y axis."""
        share = log10(value / self.low_y) / log10(self.high_y / self.low_y)
        return self.bottom + (self.top - self.bottom) * share

    def drawn(self, name_x: str, name_y: str) -> list[str]:
        """The axes, a grid of the y axis's ticks, and what is along them."""
        left, right, top, bottom = self.left, self.right, self.top, self.bottom
        parts = []
        for tick in svg.log_ticks(self.low_y, self.high_y):
            y = self.y(tick)
            parts.append(f'<path class="grid" d="M{left:.1f} {y:.1f}H{right:.1f}"/>')
            parts.append(svg.text(left - 6, y + 4, f"{tick:g}", "end"))
        last = left - 40
        for tick in svg.log_ticks(self.low_x, self.high_x):
            x = self.x(tick)
            parts.append(f'<path class="axis" d="M{x:.1f} {bottom:.1f}v5"/>')
            if x - last >= 40:  # a label beside another, not on it
                parts.append(svg.text(x, bottom + 18, f"{tick:g}", "middle"))
                last = x
        frame = f"M{left:.1f} {top:.1f}V{bottom:.1f}H{right:.1f}"
        parts.append(f'<path class="axis" d="{frame}"/>')
        parts.append(svg.text((left + right) / 2, self.height - 8, name_x, "middle"))
        parts.append(svg.text(4, 14, name_y, "start"))
        return parts
