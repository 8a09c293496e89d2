"""Tables 3, 5 and 8: who is faster, and by how much in such cases."""

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
"""The rows of Tables 3 and 8: (these are faster, than those)."""


def contests(
    item: str, products: Sequence[Product], dtype: str, population: int, is_papers: bool
) -> list[Cell]:
    """Table 3 or 8: each way in its better layout.

    Args:
        item: "Table 3" or "Table 8".
        products: of one dtype.
        dtype: their own.
        population: how many patterns there are.
        is_papers: whether the dtype is the paper's.
    """
    found = []
    for row, (these, those) in CONTESTS.items():
        found += _won(item, row, products, (these, those, None), dtype, population, is_papers)
    return found


def by_layout(
    item: str, products: Sequence[Product], dtype: str, population: int, is_papers: bool
) -> list[Cell]:
    """Table 5: kernel against all others, all in one layout."""
    found = []
    for layout in (FIRST, LAST):
        contest = ((KERNEL,), RIVALS, layout)
        found += _won(item, layout, products, contest, dtype, population, is_papers)
    return found


def _won(
    item: str,
    row: str,
    products: Sequence[Product],
    contest: tuple[Sequence[str], Sequence[str], str | None],
    dtype: str,
    population: int,
    is_papers: bool,
) -> list[Cell]:
    """How often some are faster than others, and the median factor where they are."""
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
            # Of those that win there are as many as the share says.
            statistics.median(won, round(population * len(won) / max(len(ratios), 1))),
            unit="x", is_papers=is_papers,
            absent="nothing was measured for it" if not ratios else "no pattern is faster",
        ),
    ]  # fmt: skip
