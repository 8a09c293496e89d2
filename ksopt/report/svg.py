"""Elements of inline SVG drawings; their style is in report/drawing_style.py."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, log10

FONT = 12
"""The font size, in the drawing's pixels."""

_NOT_XML = re.compile(r"[^\t\n\r -\uD7FF\uE000-\uFFFD\U00010000-\U0010FFFF]")
_LEAST_APART = 0.05  # of a logarithmic axis's length, between two ticks


def escaped(words: str) -> str:
    """A text escaped for XML; characters that XML cannot hold become question marks.

    Example:
        >>> escaped("a < b" + chr(1))
        'a &lt; b?'
    """
    return escape(_NOT_XML.sub("?", words))


def svg(parts: Sequence[str], width: int, height: int, label: str) -> str:
    """The element that holds the parts; ``label`` is for screen readers."""
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escaped(label)}" '
        f'font-size="{FONT}">\n' + "\n".join(parts) + "\n</svg>"
    )


def text(x: float, y: float, words: str, anchor: str, kind: str = "") -> str:
    """A text element; ``anchor`` is start, middle or end, ``kind`` a class of the style sheet."""
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escaped(words)}</text>'


def width_of(words: str) -> float:
    """The approximate width of a text, in the drawing's pixels."""
    return 0.62 * FONT * len(words)


@dataclass(frozen=True)
class Tip:
    """A tooltip at a place of a drawing.

    Args:
        x, y: The place.
        lines: The lines of text; a chain in the first may be cut between its factors.
    """

    x: float
    y: float
    lines: tuple[str, ...]


def hover(tips: Sequence[Tip], width: int, height: int) -> list[str]:
    """The elements of a drawing's tips; they come last, so that no mark covers them."""
    if not tips:
        return []
    parts = ['<g class="hover">']
    for tip in tips:
        parts.append(f'<circle class="hit" cx="{tip.x:.1f}" cy="{tip.y:.1f}" r="9"/>')
        parts.append(_tip_box(tip, width, height))
    return [*parts, "</g>"]


def _tip_box(tip: Tip, width: int, height: int) -> str:
    lines = [line for text in tip.lines for line in _cut(text, width - 30)]
    wide, high = 16 + max(map(width_of, lines)), 10 + 16 * len(lines)
    left = min(max(tip.x + 12, 2.0), width - wide - 2)
    top = tip.y - high - 12 if tip.y - high - 12 > 0 else min(tip.y + 12, height - high - 2)
    texts = "".join(
        text(left + 8, top + 17 + 16 * i, line, "start", "tip-text") for i, line in enumerate(lines)
    )
    return (
        f'<g class="tip"><rect class="tip-box" x="{left:.1f}" y="{top:.1f}" rx="4" '
        f'width="{wide:.1f}" height="{high:.1f}"/>{texts}</g>'
    )


def _cut(words: str, width: float) -> list[str]:
    """A text in lines of at most a width, cut between the factors of a chain."""
    lines = [""]
    for piece in words.replace(")*(", ")*\n(").split("\n"):
        if lines[-1] and width_of(lines[-1] + piece) > width:
            lines.append("")
        lines[-1] += piece
    return lines


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 times powers of ten from low to high; finer where that gives fewer than three.

    Of two ticks whose labels would touch, the larger one remains.

    Example:
        >>> log_ticks(0.9, 12)
        [1, 2, 5, 10]
        >>> log_ticks(0.97, 1.9)
        [1.0, 1.25, 1.5, 1.75]
    """
    for digits in ((1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8), tuple(n / 4 for n in range(4, 40))):
        powers = range(int(log10(low)) - 2, int(log10(high)) + 2)
        ticks = [d * 10**p for p in powers for d in digits if low <= d * 10**p <= high]
        if len(ticks) >= 3:
            break
    apart = (high / low) ** _LEAST_APART
    spaced: list[float] = []
    for tick in reversed(ticks):
        if not spaced or tick * apart <= spaced[-1]:
            spaced.append(tick)
    return spaced[::-1]


def linear_ticks(least: float, most: float, count: int) -> list[float]:
    """About ``count`` round numbers from least to most, at least 1 apart.

    Example:
        >>> linear_ticks(0, 10, 5)
        [0, 2, 4, 6, 8, 10]
    """
    rough = max((most - least) / count, 1.0)
    unit = 10 ** int(log10(rough))
    step = next(n * unit for n in (1, 2, 5, 10) if n * unit >= rough)
    return [i * step for i in range(ceil(least / step), int(most / step) + 1)]


def short(count: float) -> str:
    """A count in thousands or millions where that is shorter.

    Example:
        >>> short(2_500_000), short(700)
        ('2.5M', '700')
    """
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:g}{unit}"
    return f"{count:g}"
