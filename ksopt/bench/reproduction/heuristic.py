"""The heuristic (b+c)/(bc) put to the test, and sparsity against speed-up.

Source: the paper, equation 2 and "Implication for neural network design": of patterns with as many
nonzeros, the one with the larger (b+c)/(bc) is to be taken.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from ksopt.bench.reproduction import boxes, statistics
from ksopt.bench.reproduction.boxes import Boxes
from ksopt.bench.reproduction.product_tables import RIVALS
from ksopt.bench.reproduction.products import KERNEL, Product
from ksopt.measure.measurement import quantile
from ksopt.report import tables
from ksopt.report.tables import Table

_SPECIALISED_RIVALS = ("bmm", "einsum", "bsr")


def correlations(products: Mapping[str, Sequence[Product]]) -> Table:
    """Rank correlations by dtype: does a larger number mean a larger speed-up?"""
    heads = ("dtype", "of", "with the speed-up over", ">Spearman", ">patterns")
    predictors = {
        "(b+c)/(bc)": lambda one: one.pattern.rho,
        "share of zeros": lambda one: one.sparsity,
    }
    rows = []
    for dtype, found in products.items():
        for name, value in predictors.items():
            for told, rivals in (
                ("bmm, einsum, bsr", _SPECIALISED_RIVALS),
                ("dense", ("dense",)),
                ("all others", RIVALS),
            ):
                pairs = [
                    (value(one), ratio)
                    for one in found
                    if (ratio := one.speed_up((KERNEL,), rivals)) is not None
                ]
                number = statistics.rank_correlation(pairs)
                shown = "too few" if number is None else f"{number:.2f}"
                rows.append((dtype, name, told, shown, str(len(pairs))))
    return tables.of(heads, rows)


def winners(products: Mapping[str, Sequence[Product]]) -> Table:
    """By class of (b+c)/(bc): how often kernel is the fastest of all."""
    heads = ("dtype", "(b+c)/(bc)", ">patterns", ">kernel is fastest", ">median speed-up")
    rows = []
    for dtype, found in products.items():
        for group in boxes.RHO.names:
            ratios = sorted(
                ratio
                for one in found
                if boxes.RHO.of(one) == group
                and (ratio := one.speed_up((KERNEL,), RIVALS)) is not None
            )
            if ratios:
                won = sum(ratio > 1 for ratio in ratios) / len(ratios)
                middle = quantile(ratios, 0.5)
                rows.append((dtype, group, str(len(ratios)), f"{won:.0%}", f"x{middle:.2f}"))
    return tables.of(heads, rows)


def regrets(products: Mapping[str, Sequence[Product]]) -> Table:
    """The cost of trusting it among patterns of one size and as many nonzeros."""
    heads = (
        "dtype", ">groups", ">right", ">median regret", ">largest regret",
        ">median regret of a random choice",
    )  # fmt: skip
    rows = []
    for dtype, found in products.items():
        groups = alternatives(found)
        trusted = sorted(regret_of_trusting(group) for group in groups)
        chance = sorted(regret_of_chance(group) for group in groups)
        if groups:
            right = sum(regret == 0 for regret in trusted) / len(groups)
            shown = (f"{quantile(trusted, 0.5):.1%}", f"{trusted[-1]:.1%}")
            rows.append(
                (dtype, str(len(groups)), f"{right:.0%}", *shown, f"{quantile(chance, 0.5):.1%}")
            )
        else:
            rows.append((dtype, "0", "no two patterns of one size and weight count", "", "", ""))
    return tables.of(heads, rows)


def alternatives(products: Sequence[Product]) -> list[list[Product]]:
    """Groups of patterns of one M, N and number of nonzeros whose (b+c)/(bc) differ."""
    groups: dict[tuple[int, int, int], list[Product]] = defaultdict(list)
    for one in products:
        if one.least_us((KERNEL,)) is not None:
            groups[*one.pattern.shape, one.pattern.nnz].append(one)
    return [group for group in groups.values() if len({one.pattern.rho for one in group}) > 1]


def regret_of_trusting(group: Sequence[Product]) -> float:
    """Time of kernel on the pattern of the largest (b+c)/(bc), over the fastest one's, less 1."""
    largest = max(one.pattern.rho for one in group)
    times = [_kernel_us(one) for one in group]
    trusted = [_kernel_us(one) for one in group if one.pattern.rho == largest]
    return sum(trusted) / len(trusted) / min(times) - 1


def regret_of_chance(group: Sequence[Product]) -> float:
    """The same of a pattern that is drawn, in the mean."""
    times = [_kernel_us(one) for one in group]
    return sum(times) / len(times) / min(times) - 1


def by_sparsity(products: Mapping[str, Sequence[Product]]) -> Boxes:
    """Speed-up of kernel over dense against the share of zeros; a series a dtype."""
    values = {
        (group, dtype): sorted(
            ratio
            for one in found
            if boxes.SPARSITY.of(one) == group
            and (ratio := one.speed_up((KERNEL,), ("dense",))) is not None
        )
        for group in boxes.SPARSITY.names
        for dtype, found in products.items()
    }
    what = "time of dense / time of kernel"
    return Boxes("sparsity", what, boxes.SPARSITY, values, tuple(products), True, 1.0)


def _kernel_us(product: Product) -> float:
    found = product.least_us((KERNEL,))
    assert found is not None
    return found
