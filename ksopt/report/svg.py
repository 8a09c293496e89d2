"""Pieces of inline SVG drawings; their colours are in the style sheet of report/document.py."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import ceil, log10

FONT = 12
"""Size of the letters, in the drawing's pixels."""

_LEAST_APART = 0.05  # of a logarithmic axis's length, between two ticks


def svg(parts: Sequence[str], width: int, height: int, label: str) -> str:
    """The element that holds the parts; ``label`` is what a screen reader says."""
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}" '
        f'font-size="{FONT}">\n' + "\n".join(parts) + "\n</svg>"
    )


def text(x: float, y: float, words: str, anchor: str, kind: str = "") -> str:
    """A text; ``anchor`` is start, middle or end, ``kind`` a class of the style sheet."""
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 times powers of ten from low to high; finer where that gives fewer than three.

    Of two that are so near that their labels would touch, the larger one stays.

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
    kept: list[float] = []
    for tick in reversed(ticks):
        if not kept or tick * apart <= kept[-1]:
            kept.append(tick)
    return kept[::-1]


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
