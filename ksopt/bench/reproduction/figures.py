"""Figures 4, 6, 7 and 9 to 17 as box plots, and their cells beside the paper's numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ksopt.bench.reproduction import box_plots, statistics
from ksopt.bench.reproduction.box_plots import PROXY, RHO, SIZE, BoxPlot
from ksopt.bench.reproduction.paper_comparison import Cell, cell
from ksopt.bench.reproduction.products import FIRST, GENERIC, KERNEL, LAST, SPECIALISED, Product
from ksopt.bench.reproduction.statistics import Estimate
from ksopt.bench.reproduction.tables_and_figures import Item
from ksopt.measure.measurement import quantile

_HALF = {13: 6, 14: 9, 15: 10, 16: 11, 17: 12}
"""The figures in half precision, and the float32 figures that they repeat."""


def box_plot_of(item: Item, products: Sequence[Product], dtype: str) -> BoxPlot:
    """The data of a figure.

    Args:
        item: the figure.
        products: of one dtype; those with energies for Figure 7.
        dtype: of the products.
    """
    name = f"figure-{item.number}-{dtype}"
    kind = _HALF.get(item.number, item.number)
    if kind == 12:
        what = "time of batch-size-first / time of batch-size-last"
        return box_plots.by_way(name, what, products, layout_ratio)
    axis = {4: RHO, 6: RHO, 7: PROXY, 9: RHO}.get(kind, SIZE)
    is_share = kind in (4, 9)
    shown = [one for one in products if is_special(one)] if kind == 6 else products
    line = 0.0 if is_share else 1.0
    series = _series(kind, dtype)
    return BoxPlot.of(name, _WHAT[kind], axis, shown, series, is_log=not is_share, line=line)


_WHAT = {
    4: "share of time that is memory rewriting",
    6: "time of min(bmm, einsum, bsr) / time of kernel",
    7: "energy of kernel / least energy of bmm, einsum, bsr",
    9: "share of time that is memory rewriting",
    10: "time of min(dense, sparse) / time of min(kernel, bmm, bsr, einsum)",
    11: "time of min(einsum, bsr) / time of bmm",
}


def _series(kind: int, dtype: str) -> dict[str, Callable[[Product], float | None]]:
    """The values that a figure draws of each product, by series."""
    if kind in (4, 9):
        layouts = (FIRST,) if kind == 4 else (FIRST, LAST)
        return {layout: partial(Product.rewriting, layout=layout) for layout in layouts}
    if kind == 7:
        return {
            "whole board": partial(Product.energy_ratio, over_idle=False),
            "idle power subtracted": partial(Product.energy_ratio, over_idle=True),
        }
    these, those = {
        6: ((KERNEL,), ("bmm", "einsum", "bsr")),
        10: (SPECIALISED, GENERIC),
        11: (("bmm",), ("einsum", "bsr")),
    }[kind]
    return {dtype: partial(Product.speed_up, names=these, others=those)}


def is_special(product: Product) -> bool:
    """Whether a specialised way is faster than the generic ones, as in Figures 6 and 13."""
    ratio = product.speed_up(SPECIALISED, GENERIC)
    return ratio is not None and ratio > 1


def layout_ratio(product: Product, way: str) -> float | None:
    """A way's time in batch-size-first over its time in batch-size-last."""
    first, last = (product.least_us((way,), layout) for layout in (FIRST, LAST))
    return None if first is None or last is None else first / last


def cells_of(
    item: Item, products: Sequence[Product], dtype: str, population: int, is_papers: bool
) -> list[Cell]:
    """The numbers that the paper's text states for a figure, and ours.

    Args:
        item, products, dtype: as for `box_plot_of`.
        population: number of patterns in all.
        is_papers: whether the dtype is the paper's.
    """
    name, kind = item.name, _HALF.get(item.number, item.number)
    if kind in (4, 9):
        return [
            cell(
                name, layout, "largest share", dtype, _largest(item, products, dtype, layout),
                unit="%", is_papers=is_papers,
            )
            for layout in ((FIRST,) if kind == 4 else (FIRST, LAST))
        ]  # fmt: skip
    if kind == 7:
        return _energy(item, products, dtype, population, is_papers)
    if kind == 12:
        return [
            cell(
                name, way, "median ratio", dtype,
                _median([layout_ratio(one, way) for one in products], population),
                unit="", is_papers=is_papers,
                absent="it has no time in both layouts; products-DTYPE.csv says why",
            )
            for way in box_plots.IMPLEMENTATIONS
        ]  # fmt: skip
    drawn = box_plot_of(item, products, dtype)
    ratios = [value for values in drawn.values.values() for value in values]
    return [
        cell(
            name, "all", "median speed-up", dtype, statistics.median(ratios, population),
            unit="x", is_papers=is_papers,
        )
    ]  # fmt: skip


def _energy(
    item: Item, products: Sequence[Product], dtype: str, population: int, is_papers: bool
) -> list[Cell]:
    cells = []
    absent = "no energy was measured: it is read from an NVIDIA GPU's counter"
    if not products:
        absent = "nothing was measured for it"
    if any(one.energy_mj for one in products):
        absent = "the device drew no more than its idle power: the calls are too short"
    common: dict[str, Any] = {"is_papers": is_papers, "absent": absent}
    for over_idle, row in ((False, "all"), (True, "idle power subtracted")):
        ratios = [r for one in products if (r := one.energy_ratio(over_idle)) is not None]
        less = statistics.share(sum(r < 1 for r in ratios), len(ratios), population)
        middle = statistics.median(ratios, population)
        cells += [
            cell(item.name, row, "median ratio", dtype, middle, unit="", **common),
            cell(item.name, row, "share with less", dtype, less, unit="%", **common),
        ]
        for column, proxy in (("d(b+c)/(bc)", "energy_proxy"), ("(b+c)/(bc)", "rho")):
            pairs = [
                (one.energy_proxy if proxy == "energy_proxy" else one.pattern.rho, 1 / ratio)
                for one in products
                if (ratio := one.energy_ratio(over_idle)) is not None
            ]
            value = statistics.rank_correlation(pairs)
            ours = None if value is None else Estimate(value, value, value, len(pairs))
            cells.append(
                cell(
                    item.name,
                    row,
                    f"rank correlation of {column} with the saving",
                    dtype,
                    ours,
                    unit="",
                    is_papers=is_papers,
                    absent="too few patterns were measured",
                )
            )
    return cells


def _largest(item: Item, products: Sequence[Product], dtype: str, layout: str) -> Estimate | None:
    """The largest 95th percentile of any class, where its whisker ends."""
    drawn = box_plot_of(item, products, dtype)
    ends = [
        (quantile(values, 0.95), len(values))
        for (_, label), values in drawn.values.items()
        if label == layout and values
    ]
    if not ends:
        return None
    value, count = max(ends)
    return Estimate(value, value, value, count)


def _median(values: Sequence[float | None], population: int) -> Estimate | None:
    return statistics.median([value for value in values if value is not None], population)
