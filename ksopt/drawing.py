"""Pictures of chains: the supports of the factors, in a terminal and as SVG.

A cell of a picture is an entry of the matrix, or a block of entries of a large matrix.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from ksopt.errors import InvalidInputError
from ksopt.patterns.chain import Chain
from ksopt.patterns.pattern import Pattern
from ksopt.report import svg
from ksopt.report.document import Figure
from ksopt.system.plurals import counted

MOST_FEATURES = 2**16
"""The most rows or columns of a layer that is drawn: they are counted one by one."""

_SHADES = (0.25, 0.5, 0.75, 1.0)  # of a cell, by its share of nonzeros
_GAP, _LABEL = 26.0, 36.0  # between two factors, and under them


@dataclass(frozen=True)
class Grid:
    """The matrix of a factor in cells.

    Args:
        pattern: Of the factor.
        cells: Rows of cells, each the share of its entries that may be nonzero.
        first: Whether each cell belongs entirely to the first of the dense b x c sub-matrices.
    """

    pattern: Pattern
    cells: tuple[tuple[float, ...], ...]
    first: tuple[tuple[bool, ...], ...]

    @classmethod
    def of(cls, pattern: Pattern, most: int) -> Grid:
        """The grid of a pattern, with at most ``most`` rows and columns of cells.

        Example:
            >>> [list(row) for row in Grid.of(Pattern(2, 1, 1, 1), 8).cells]
            [[1.0, 0.0], [0.0, 1.0]]
            >>> Grid.of(Pattern(1, 4, 4, 2), 4).cells[0]
            (0.5, 0.5, 0.5, 0.5)
        """
        rows = _sub_matrices(pattern.out_features, pattern.b, pattern.d, most)
        columns = _sub_matrices(pattern.in_features, pattern.c, pattern.d, most)
        cells = tuple(tuple(_share(row, column) for column in columns) for row in rows)
        first = tuple(tuple(set(row) == set(column) == {0} for column in columns) for row in rows)
        return cls(pattern, cells, first)

    @property
    def is_exact(self) -> bool:
        """Whether each cell is one entry."""
        return (len(self.cells), len(self.cells[0])) == self.pattern.shape


def _sub_matrices(features: int, width: int, d: int, most: int) -> list[Counter[int]]:
    """The number of features by sub-matrix (a*d of them), for each cell along one side."""
    count = min(features, most)
    along: list[Counter[int]] = [Counter() for _ in range(count)]
    for feature in range(features):
        block, stride = feature // (width * d), feature % d
        along[feature * count // features][block * d + stride] += 1
    return along


def _share(row: Counter[int], column: Counter[int]) -> float:
    few, many = sorted((row, column), key=len)
    return sum(n * many[key] for key, n in few.items() if key in many) / (
        row.total() * column.total()
    )


def can_draw(chain: Chain) -> bool:
    """Whether every factor is small enough to draw."""
    return max(max(pattern.shape) for pattern in chain) <= MOST_FEATURES


def figure_of(chain: Chain, name: str = "") -> Figure:
    """The figure of a chain in a report; ``name`` is that of its file."""
    return Figure(to_svg(chain, 800, most=32), to_svg(chain, 360, most=32), name)


def grids(chain: Chain, most: int) -> list[Grid]:
    """The grids of a chain's factors.

    Raises:
        InvalidInputError: A factor has too many rows or columns.
    """
    for pattern in chain:
        if max(pattern.shape) > MOST_FEATURES:
            raise InvalidInputError(
                f"{pattern} has {pattern.out_features:,} rows and {pattern.in_features:,} columns: "
                f"at most {MOST_FEATURES:,} are drawn"
            )
    return [Grid.of(pattern, most) for pattern in chain]


def to_svg(chain: Chain, width: int = 800, most: int = 48) -> str:
    """A chain as an ``<svg>`` element: its factors side by side, to one scale.

    The first of the dense sub-matrices of each factor has another colour.

    Args:
        chain: The chain.
        width: Of the drawing.
        most: Cells along a side of a factor.

    Example:
        >>> drawn = to_svg(Chain.parse("(2,3,2,3)*(6,2,2,1)"))
        >>> drawn.count("<rect"), 'aria-label="(2,3,2,3)*(6,2,2,1)' in drawn
        (2, True)
    """
    shown = grids(chain, most)
    room = width - 16 - _GAP * (len(shown) - 1)
    scale = min(
        room / sum(pattern.in_features for pattern in chain),
        320 / max(pattern.out_features for pattern in chain),
    )
    tall = scale * max(pattern.out_features for pattern in chain)
    total = scale * sum(pattern.in_features for pattern in chain) + _GAP * (len(shown) - 1)
    parts, left = [], (width - total) / 2
    for place, grid in enumerate(shown):
        wide, high = scale * grid.pattern.in_features, scale * grid.pattern.out_features
        top = 8 + (tall - high) / 2
        if place:
            parts.append(svg.text(left - _GAP / 2, 8 + tall / 2 + 4, "×", "middle"))
        parts += _factor(grid, left, top, wide, high)
        label_at = min(max(left + wide / 2, 8.0), width - 8.0)
        for line, words in enumerate(_labels(grid, wide)):
            parts.append(svg.text(label_at, 24 + tall + 14 * line, words, "middle"))
        left += wide + _GAP
    height = int(tall + 16 + _LABEL)
    label = f"{chain}: where its factors may be nonzero"
    return svg.svg(parts, width, height, label)


def _labels(grid: Grid, wide: float) -> list[str]:
    """The labels under a factor that fit its width."""
    shape = f"{grid.pattern.out_features} x {grid.pattern.in_features}"
    room = wide + _GAP
    return [words for words in (str(grid.pattern), shape) if svg.width_of(words) <= room]


def _factor(grid: Grid, left: float, top: float, wide: float, high: float) -> list[str]:
    across, down = wide / len(grid.cells[0]), high / len(grid.cells)
    paths: dict[tuple[str, float], list[str]] = {}
    for y, row in enumerate(grid.cells):
        looks = [
            ("cell first" if is_first else "cell", _shade(share))
            for share, is_first in zip(row, grid.first[y], strict=True)
        ]
        x = 0
        for look, alike in itertools.groupby(looks):
            count = len(list(alike))
            if look[1]:
                at = f"M{left + x * across:.1f} {top + y * down:.1f}"
                run = f"{at}h{count * across:.2f}v{down:.2f}h{-count * across:.2f}z"
                paths.setdefault(look, []).append(run)
            x += count
    parts = [
        f'<path class="{kind}" fill-opacity="{shade:g}" d="{"".join(cells)}"/>'
        for (kind, shade), cells in paths.items()
    ]
    outline = f'x="{left:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{high:.1f}"'
    return [*parts, f'<rect class="outline" {outline}/>']


def _shade(share: float) -> float:
    """The opacity of a cell, in a few steps; 0 if it is empty."""
    return next(one for one in _SHADES if share <= one + 1e-9) if share else 0.0


def write(chain: Chain, stream: TextIO, most: int = 32) -> None:
    """Draw a chain with characters: in colours on a terminal, in plain text elsewhere."""
    shown = grids(chain, most)
    if not stream.isatty():
        for grid in shown:
            print(f"{_title(grid)}\n" + "\n".join(_plain(grid)) + "\n", file=stream)
        return
    import rich.columns
    import rich.console
    import rich.text

    pictures = []
    for grid in shown:
        picture = rich.text.Text(f"{_title(grid)}\n")
        for y, row in enumerate(grid.cells):
            for x, share in enumerate(row):
                picture.append(*_coloured(share, grid.first[y][x]))
            picture.append("\n")
        pictures.append(picture)
    console = rich.console.Console(file=stream)
    console.print(rich.columns.Columns(pictures, padding=(0, 4)))


def _title(grid: Grid) -> str:
    pattern = grid.pattern
    title = f"{pattern}: {pattern.out_features} x {pattern.in_features}, "
    title += counted(pattern.nnz, "weight")
    if grid.is_exact:
        return title
    down = pattern.out_features / len(grid.cells)
    across = pattern.in_features / len(grid.cells[0])
    return f"{title}; a cell is {down:.3g} x {across:.3g} entries"


def _plain(grid: Grid) -> Sequence[str]:
    """A line of characters for each row of cells: # full, + partly full, . empty."""
    return [
        " ".join("#" if share == 1 else "+" if share else "." for share in row)
        for row in grid.cells
    ]


def _coloured(share: float, is_first: bool) -> tuple[str, str]:
    """A cell's two characters and their style."""
    if not share:
        return "· ", "dim"
    block = "░▒▓█"[_SHADES.index(_shade(share))]
    return block * 2, "bold red" if is_first else "blue"
