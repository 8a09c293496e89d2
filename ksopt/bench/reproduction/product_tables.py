"""Tables 3, 5 and 8: how often one group of ways is faster than another, and by how much."""

from __future__ import annotations

from collections.abc import Sequence

from ksopt.bench.reproduction import statistics
from ksopt.bench.reproduction.paper_comparison import Cell, cell
from ksopt.bench.reproduction.products import FIRST, GENERIC, KERNEL, LAST, SPECIALISED, Product

RIVALS = ("bmm", "einsum", "bsr", "dense", "sparse")
CONTESTS = {
    "kernel, bmm, einsum, bsr < dense, sparse": (SPECIALISED, GENERIC),
    "bmm < einsum, bsr": (("bmm",), ("einsum", "bsr")),
    "kernel < all others": ((KERNEL,), RIVALS),
}
"""The rows of Tables 3 and 8: (the ways that may be faster, their rivals)."""


def contests(
    item: str, products: Sequence[Product], dtype: str, population: int, is_papers: bool
) -> list[Cell]:
    """Table 3 or 8: each way in its better layout.

    Args:
        item: "Table 3" or "Table 8".
        products: of one dtype.
        dtype: of the products.
        population: number of patterns in all.
        is_papers: whether the dtype is the paper's.
    """
    cells = []
    for row, (these, those) in CONTESTS.items():
        cells += _won(item, row, products, (these, those, None), dtype, population, is_papers)
    return cells


def by_layout(
    item: str, products: Sequence[Product], dtype: str, population: int, is_papers: bool
) -> list[Cell]:
    """Table 5: kernel against all others, all in one layout."""
    cells = []
    for layout in (FIRST, LAST):
        contest = ((KERNEL,), RIVALS, layout)
        cells += _won(item, layout, products, contest, dtype, population, is_papers)
    return cells


def _won(
    item: str,
    row: str,
    products: Sequence[Product],
    contest: tuple[Sequence[str], Sequence[str], str | None],
    dtype: str,
    population: int,
    is_papers: bool,
) -> list[Cell]:
    """The share of patterns on which some ways are faster than others, and the median factor."""
    ratios = [ratio for product in products if (ratio := product.speed_up(*contest)) is not None]
    won = [ratio for ratio in ratios if ratio > 1]
    return [
        cell(
            item, row, "share", dtype,
            statistics.share(len(won), len(ratios), population),
            unit="%", is_papers=is_papers,
        ),
        cell(
            item, row, "factor", dtype,
            # The population of winning patterns follows from the share.
            statistics.median(won, round(population * len(won) / max(len(ratios), 1))),
            unit="x", is_papers=is_papers,
            absent="nothing was measured for it" if not ratios else "no pattern is faster",
        ),
    ]  # fmt: skip
