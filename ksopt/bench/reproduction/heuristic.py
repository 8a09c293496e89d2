"""The heuristic (b+c)/(bc) put to the test, and sparsity against speed-up.

Source: the paper, equation 2 and section 1: the ratio tells whether a pattern is efficient, and
which of those with as many nonzeros is. Of one size M x N as well there is no choice: b is nnz / N
and c is nnz / M, so that all such patterns have one ratio.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

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


@dataclass(frozen=True)
class Rule:
    """Kernel where (b+c)/(bc) is at least a number, else the best other way.

    Attributes:
        least: the number; 0 takes kernel always, infinity never.
    """

    least: float

    @property
    def name(self) -> str:
        """For a table."""
        if self.least == 0:
            return "always kernel"
        if self.least == inf:
            return "always the best other way"
        return f"kernel from (b+c)/(bc) = {self.least:.3g} on"

    def regret(self, product: Product) -> float | None:
        """Time of what it takes over the faster one's, less 1; None if there is no contest."""
        kernel, other = product.least_us((KERNEL,)), product.least_us(RIVALS)
        if kernel is None or other is None:
            return None
        taken = kernel if product.pattern.rho >= self.least else other
        return taken / min(kernel, other) - 1

    def regrets(self, products: Sequence[Product]) -> list[float]:
        """Of each pattern with a contest, ascending."""
        return sorted(r for one in products if (r := self.regret(one)) is not None)


def best_rule(products: Sequence[Product]) -> Rule:
    """The number with the least mean regret on these patterns."""
    numbers = sorted({one.pattern.rho for one in products})
    return min(map(Rule, (0.0, *numbers, inf)), key=lambda rule: sum(rule.regrets(products)))


def decisions(products: Mapping[str, Sequence[Product]]) -> Table:
    """The cost of trusting it to choose between kernel and the best other way."""
    heads = ("dtype", "rule", ">patterns", ">right", ">mean regret", ">largest regret")
    rows = []
    for dtype, found in products.items():
        for rule in dict.fromkeys((best_rule(found), Rule(0.0), Rule(inf))):
            regrets = rule.regrets(found)
            if regrets:
                right = sum(regret == 0 for regret in regrets) / len(regrets)
                mean = sum(regrets) / len(regrets)
                told = (f"{right:.0%}", f"{mean:.1%}", f"{regrets[-1]:.1%}")
                rows.append((dtype, rule.name, str(len(regrets)), *told))
    return tables.of(heads, rows)


def pairs(products: Mapping[str, Sequence[Product]]) -> Table:
    """Of two patterns with as many nonzeros: has the one of the larger number more to gain?"""
    heads = ("dtype", ">pairs", ">the larger (b+c)/(bc) has the larger speed-up over dense")
    rows = []
    for dtype, found in products.items():
        right = [
            (one.pattern.rho > other.pattern.rho) == (ours > theirs)
            for one, other in itertools.combinations(found, 2)
            if one.pattern.nnz == other.pattern.nnz and one.pattern.rho != other.pattern.rho
            if (ours := one.speed_up((KERNEL,), ("dense",))) is not None
            and (theirs := other.speed_up((KERNEL,), ("dense",))) is not None
        ]
        told = f"{sum(right) / len(right):.0%}" if right else "no such pair"
        rows.append((dtype, str(len(right)), told))
    return tables.of(heads, rows)


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
