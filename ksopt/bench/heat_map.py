"""Heat maps: one colour for faster, one for slower, and words in each cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

from ksopt.report import svg
from ksopt.report.document import Figure

_SIZES = ((800, 380), (360, 420))
_TOP, _BOTTOM, _LEFT, _RIGHT = 28.0, 46.0, 58.0, 8.0
_STRONGEST = 3.0  # the ratio, or its inverse, at which a colour reaches full strength
_FAINT, _FULL = 0.06, 0.75


@dataclass(frozen=True)
class Tile:
    """A cell of a heat map.

    Attributes:
        ratio: above 1 faster, below 1 slower; None for unknown.
        words: the lines of its text.
        is_certain: whether it has an outline.
    """

    ratio: float | None
    words: tuple[str, ...]
    is_certain: bool


def figure(
    tiles: Sequence[Sequence[Tile]], down: Sequence[str], across: Sequence[str],
    titles: tuple[str, str, str], name: str,
) -> Figure:  # fmt: skip
    """A heat map in two sizes.

    Args:
        tiles: line by line, from the top left.
        down, across: names of the lines and of the columns.
        titles: of the vertical axis, of the horizontal axis, and of the whole for screen readers.
        name: of the file.
    """
    wide, narrow = (_drawn(tiles, down, across, titles, *size) for size in _SIZES)
    return Figure(wide, narrow, name)


def _drawn(
    tiles: Sequence[Sequence[Tile]], down: Sequence[str], across: Sequence[str],
    titles: tuple[str, str, str], width: int, height: int,
) -> str:  # fmt: skip
    if not tiles or not across:
        return ""
    step_x = (width - _LEFT - _RIGHT) / len(across)
    step_y = (height - _TOP - _BOTTOM) / len(down)
    parts = [svg.text(4, 14, titles[0], "start")]
    for line, (name, row) in enumerate(zip(down, tiles, strict=True)):
        top = _TOP + line * step_y
        parts.append(svg.text(_LEFT - 6, top + step_y / 2 + 4, name, "end"))
        for column, tile in enumerate(row):
            left = _LEFT + column * step_x
            parts += _tile(tile, left, top, step_x, step_y)
    bottom = height - _BOTTOM
    for column, name in enumerate(across):
        x = _LEFT + (column + 0.5) * step_x
        parts.append(svg.text(x, bottom + 16, name, "middle"))
    parts.append(svg.text((_LEFT + width - _RIGHT) / 2, height - 8, titles[1], "middle"))
    return svg.svg(parts, width, height, titles[2])


def _tile(tile: Tile, left: float, top: float, wide: float, high: float) -> list[str]:
    box = f'x="{left + 1:.1f}" y="{top + 1:.1f}" width="{wide - 2:.1f}" height="{high - 2:.1f}"'
    parts = []
    if tile.ratio is not None:
        kind = "cell" if tile.ratio > 1 else "first"
        parts.append(f'<rect class="{kind}" fill-opacity="{strength(tile.ratio):.2f}" {box}/>')
    if tile.is_certain:
        parts.append(f'<rect class="outline" {box}/>')
    middle = top + high / 2 + 4 - 7 * (len(tile.words) - 1)
    for place, word in enumerate(tile.words):
        if svg.width_of(word) <= wide + 4:
            parts.append(
                svg.text(left + wide / 2, middle + 14 * place, word, "middle", "chosen-text")
            )
    return parts


def strength(ratio: float) -> float:
    """The opacity of a ratio's colour, lowest at a ratio of 1.

    Example:
        >>> strength(3.0) == strength(1 / 3) == 0.75
        True
    """
    share = min(abs(log(ratio)) / log(_STRONGEST), 1.0)
    return _FAINT + (_FULL - _FAINT) * share
