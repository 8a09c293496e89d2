"""Tests of the heuristic (b+c)/(bc), beside ksopt's cost models, and sparsity against speed-up.

Source: the paper, equation 2 and section 1: the ratio predicts whether a pattern is efficient, and
which of several patterns with equal nonzeros is. For one size M x N the ratio decides nothing: b is
nnz / N and c is nnz / M, so all patterns with equal nonzeros have one ratio.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from ksopt.bench.reproduction import box_plots, statistics
from ksopt.bench.reproduction.box_plots import BoxPlot
from ksopt.bench.reproduction.product_tables import RIVALS
from ksopt.bench.reproduction.products import KERNEL, Product
from ksopt.measure.measurement import quantile
from ksopt.report import tables
from ksopt.report.tables import Table

_SPECIALISED_RIVALS = ("bmm", "einsum", "bsr")


@dataclass(frozen=True)
class Predictor:
    """A number of a pattern that may predict the speed-up of kernel, known before measuring.

    Attributes:
        name: as a table shows it.
        of: (product) -> the number; None where it is not known.
    """

    name: str
    of: Callable[[Product], float | None]


RHO = Predictor("(b+c)/(bc)", lambda one: one.pattern.rho)
ZEROS = Predictor("share of zeros", lambda one: one.sparsity)
MODELS = Predictor("speed-up by the cost models", lambda one: one.predicted_speed_up)


def correlations(products: Mapping[str, Sequence[Product]]) -> Table:
    """Rank correlations of the predictors with the speed-up, by dtype."""
    heads = ("dtype", "of", "with the speed-up over", ">Spearman", ">patterns")
    rows = []
    for dtype, own in products.items():
        for predictor in (RHO, ZEROS, MODELS):
            for rival_names, rivals in (
                ("bmm, einsum, bsr", _SPECIALISED_RIVALS),
                ("dense", ("dense",)),
                ("all others", RIVALS),
            ):
                pairs = _pairs(predictor, own, rivals)
                if pairs or predictor is not MODELS:  # on a CPU there are no cost models
                    shown = spearman(predictor, own, rivals)
                    rows.append((dtype, predictor.name, rival_names, shown, str(len(pairs))))
    return tables.of(heads, rows)


def by_width(products: Mapping[str, Sequence[Product]]) -> Table:
    """What the heuristic predicts within classes of width, the larger side of the matrix."""
    heads = ("dtype", "width", ">patterns", ">kernel is fastest", ">median speed-up",
             ">Spearman of (b+c)/(bc)", ">Spearman of the cost models")  # fmt: skip
    rows = []
    for dtype, own in products.items():
        for group in box_plots.WIDTH.names:
            inside = [one for one in own if box_plots.WIDTH.of(one) == group]
            ratios = sorted(
                ratio for one in inside if (ratio := one.speed_up((KERNEL,), RIVALS)) is not None
            )
            if ratios:
                won = sum(ratio > 1 for ratio in ratios) / len(ratios)
                middle = quantile(ratios, 0.5)
                ranks = [spearman(one, inside, RIVALS) for one in (RHO, MODELS)]
                cells = (str(len(ratios)), f"{won:.0%}", f"x{middle:.2f}", *ranks)
                rows.append((dtype, group, *cells))
    return tables.of(heads, rows)


def _pairs(
    predictor: Predictor, products: Sequence[Product], rivals: Sequence[str]
) -> list[tuple[float, float]]:
    """The predictor and the speed-up of kernel over some ways, where both are known."""
    return [
        (value, ratio)
        for one in products
        if (value := predictor.of(one)) is not None
        and (ratio := one.speed_up((KERNEL,), rivals)) is not None
    ]


def spearman(predictor: Predictor, products: Sequence[Product], rivals: Sequence[str]) -> str:
    """The rank correlation of a predictor with the speed-up of kernel over some ways, as text."""
    number = statistics.rank_correlation(_pairs(predictor, products, rivals))
    return "too few" if number is None else f"{number:.2f}"


def winners(products: Mapping[str, Sequence[Product]]) -> Table:
    """The share of patterns on which kernel is the fastest, by class of (b+c)/(bc)."""
    heads = ("dtype", "(b+c)/(bc)", ">patterns", ">kernel is fastest", ">median speed-up")
    rows = []
    for dtype, own in products.items():
        for group in box_plots.RHO.names:
            ratios = sorted(
                ratio
                for one in own
                if box_plots.RHO.of(one) == group
                and (ratio := one.speed_up((KERNEL,), RIVALS)) is not None
            )
            if ratios:
                won = sum(ratio > 1 for ratio in ratios) / len(ratios)
                middle = quantile(ratios, 0.5)
                rows.append((dtype, group, str(len(ratios)), f"{won:.0%}", f"x{middle:.2f}"))
    return tables.of(heads, rows)


@dataclass(frozen=True)
class Rule:
    """A decision rule: kernel where a predictor reaches a threshold, else the best other way.

    Attributes:
        least: the threshold; 0 always selects kernel, infinity never.
        predictor: known of every pattern that is judged.
    """

    least: float
    predictor: Predictor = RHO

    @property
    def name(self) -> str:
        """The rule as a table shows it."""
        if self.least == 0:
            return "always kernel"
        if self.least == inf:
            return "always the best other way"
        return f"kernel from {self.predictor.name} = {self.least:.3g} on"

    def regret(self, product: Product) -> float | None:
        """The selected time over the faster time, minus 1; None if one of them is missing."""
        kernel, other = product.least_us((KERNEL,)), product.least_us(RIVALS)
        value = self.predictor.of(product)
        if kernel is None or other is None or value is None:
            return None
        taken = kernel if value >= self.least else other
        return taken / min(kernel, other) - 1

    def regrets(self, products: Sequence[Product]) -> list[float]:
        """The regrets of the patterns that have both times, ascending."""
        return sorted(r for one in products if (r := self.regret(one)) is not None)


def best_rule(products: Sequence[Product], predictor: Predictor = RHO) -> Rule:
    """The rule with the least mean regret on these patterns."""
    numbers = sorted({value for one in products if (value := predictor.of(one)) is not None})
    rules = [Rule(number, predictor) for number in (0.0, *numbers, inf)]
    return min(rules, key=lambda rule: sum(rule.regrets(products)))


def decisions(products: Mapping[str, Sequence[Product]]) -> Table:
    """The cost of letting a predictor choose between kernel and the best other way."""
    heads = ("dtype", "rule", ">patterns", ">right", ">mean regret", ">largest regret")
    rows = []
    for dtype, own in products.items():
        best = [best_rule(own)]
        if any(MODELS.of(one) is not None for one in own):
            best.append(best_rule(own, MODELS))
        # Of rules that choose the same for all patterns one is shown.
        named = {rule.name: rule for rule in (*best, Rule(0.0), Rule(inf))}
        for rule in named.values():
            regrets = rule.regrets(own)
            if regrets:
                right = sum(regret == 0 for regret in regrets) / len(regrets)
                mean = sum(regrets) / len(regrets)
                cells = (f"{right:.0%}", f"{mean:.1%}", f"{regrets[-1]:.1%}")
                rows.append((dtype, rule.name, str(len(regrets)), *cells))
    return tables.of(heads, rows)


def model_errors(products: Mapping[str, Sequence[Product]]) -> Table:
    """Predicted over measured times of the ways that the cost models know, both layouts."""
    heads = ("dtype", "way", ">products", ">5 %", ">median", ">95 %")
    rows = []
    for dtype, own in products.items():
        for way in (KERNEL, "bmm", "einsum"):
            ratios = sorted(
                one.predicted_us[key] / us
                for one in own
                for key, us in one.times_us.items()
                if key[0] == way and key in one.predicted_us
            )
            if ratios:
                shown = (f"{quantile(ratios, share):.2f}" for share in (0.05, 0.5, 0.95))
                rows.append((dtype, way, str(len(ratios)), *shown))
    return tables.of(heads, rows)


def pairs(products: Mapping[str, Sequence[Product]]) -> Table:
    """Pairs of equal nonzeros: how often the larger (b+c)/(bc) has the larger speed-up."""
    heads = ("dtype", ">pairs", ">the larger (b+c)/(bc) has the larger speed-up over dense")
    rows = []
    for dtype, own in products.items():
        right = [
            (one.pattern.rho > other.pattern.rho) == (ours > theirs)
            for one, other in itertools.combinations(own, 2)
            if one.pattern.nnz == other.pattern.nnz and one.pattern.rho != other.pattern.rho
            if (ours := one.speed_up((KERNEL,), ("dense",))) is not None
            and (theirs := other.speed_up((KERNEL,), ("dense",))) is not None
        ]
        share = f"{sum(right) / len(right):.0%}" if right else "no such pair"
        rows.append((dtype, str(len(right)), share))
    return tables.of(heads, rows)


def by_sparsity(products: Mapping[str, Sequence[Product]]) -> BoxPlot:
    """Speed-up of kernel over dense against the share of zeros; a series per dtype."""
    values = {
        (group, dtype): sorted(
            ratio
            for one in own
            if box_plots.SPARSITY.of(one) == group
            and (ratio := one.speed_up((KERNEL,), ("dense",))) is not None
        )
        for group in box_plots.SPARSITY.names
        for dtype, own in products.items()
    }
    what = "time of dense / time of kernel"
    return BoxPlot("sparsity", what, box_plots.SPARSITY, values, tuple(products), True, 1.0)
