"""Shares, medians and rank correlations of a sample, with intervals for the population."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from ksopt.measure.measurement import quantile

_Z = 1.96  # standard deviations of a 95 % interval
_RESAMPLES, _SEED = 1000, 0
_FEWEST = 3  # pairs that a rank correlation needs


@dataclass(frozen=True)
class Estimate:
    """A number of a sample, and the 95 % interval of the population's number.

    Attributes:
        value: of the sample.
        low, high: the ends of the interval; both are the value if the sample is the population.
        count: size of the sample.
    """

    value: float
    low: float
    high: float
    count: int


def share(hits: int, count: int, population: int) -> Estimate | None:
    """The share of hits with Wilson's interval; None of an empty sample.

    Args:
        hits: number of hits in the sample.
        count: size of the sample.
        population: size of the population, sampled without replacement: the interval shrinks by
            sqrt((population - count) / (population - 1)).

    Source: Wilson, "Probable inference, the law of succession, and statistical inference", 1927;
    the finite population correction, Cochran, "Sampling techniques", 1977, section 2.6.

    Example:
        >>> share(5, 10, 10)
        Estimate(value=0.5, low=0.5, high=0.5, count=10)
        >>> estimate = share(5, 10, 627)
        >>> round(estimate.low, 2), round(estimate.high, 2)
        (0.24, 0.76)
    """
    if count == 0:
        return None
    value, spread = hits / count, _Z**2 / count
    middle = (value + spread / 2) / (1 + spread)
    half = _Z / (1 + spread) * math.sqrt(value * (1 - value) / count + spread / (4 * count))
    shrunk = _finite(count, population)
    low, high = (value + shrunk * (middle + sign * half - value) for sign in (-1, 1))
    return Estimate(value, max(low, 0.0), min(high, 1.0), count)


def median(values: Sequence[float], population: int) -> Estimate | None:
    """The median with a bootstrap interval; None of an empty sample.

    Args:
        values: in any order.
        population: size of the population.

    Source: Efron, "Bootstrap methods: another look at the jackknife", 1979: percentiles.

    Example:
        >>> median([3.0, 1.0, 2.0], 3)
        Estimate(value=2.0, low=2.0, high=2.0, count=3)
    """
    if not values:
        return None
    value, count = quantile(sorted(values), 0.5), len(values)
    generator = random.Random(_SEED)
    medians = sorted(
        quantile(sorted(generator.choices(values, k=count)), 0.5) for _ in range(_RESAMPLES)
    )
    shrunk = _finite(count, population)
    low, high = (value + shrunk * (quantile(medians, end) - value) for end in (0.025, 0.975))
    return Estimate(value, low, high, count)


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Spearman's coefficient; None for too few pairs, or if all values of one side are equal.

    Example:
        >>> rank_correlation([(1, 10), (2, 30), (3, 20)])
        0.5
    """
    if len(pairs) < _FEWEST:
        return None
    frame = pd.DataFrame(pairs, columns=["one", "other"]).rank()
    coefficient = float(frame["one"].corr(frame["other"]))
    return coefficient if math.isfinite(coefficient) else None


def _finite(count: int, population: int) -> float:
    if population <= 1:
        return 0.0
    return math.sqrt(max(population - count, 0) / (population - 1))
