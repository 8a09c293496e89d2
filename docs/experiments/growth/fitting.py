"""Fits a law to points: cost = base + scale * size ** power."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Student's t, 97.5 %, by degrees of freedom; beyond the table the normal distribution's is near.
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
_T_OF_MANY = 2.0
# Bases up to nearly the least cost, so that a part of it remains to grow.
_BASES = np.linspace(0.0, 0.98, 50)
_FEWEST = 4


@dataclass(frozen=True)
class Law:
    """A cost of ``base + scale * size ** power``.

    Args:
        base: The cost in the limit of small sizes.
        scale: The factor of the power.
        power: 1 is linear, 2 quadratic.
        margin: The power's 95 % interval is power +- margin, with the fitted base.
        error: The root mean square relative error of the points.
    """

    base: float
    scale: float
    power: float
    margin: float
    error: float

    def at(self, size: float) -> float:
        """The cost of a size."""
        return float(self.base + self.scale * size**self.power)


def fit(sizes: Sequence[float], costs: Sequence[float]) -> Law | None:
    """The law with the least squares of the logarithms; None for fewer than four points.

    Example:
        >>> law = fit([1, 2, 4, 8, 16], [3.0, 5.0, 9.0, 17.0, 33.0])
        >>> round(law.power, 1), round(law.at(32))
        (1.0, 65)
    """
    if len(sizes) < _FEWEST or min(costs) <= 0:
        return None
    x, y = np.log(np.asarray(sizes, float)), np.asarray(costs, float)
    laws = [_with_base(x, y, share * y.min()) for share in _BASES]
    return min(laws, key=lambda law: law.error)


def _with_base(x: np.ndarray, y: np.ndarray, base: float) -> Law:
    grown = np.log(y - base)
    spread = ((x - x.mean()) ** 2).sum()
    power = float(((x - x.mean()) * (grown - grown.mean())).sum() / spread)
    scale = float(np.exp(grown.mean() - power * x.mean()))
    free = len(x) - 2
    rest = grown - np.log(scale) - power * x
    t = _T[free - 1] if free <= len(_T) else _T_OF_MANY
    margin = float(t * np.sqrt((rest**2).sum() / free / spread))
    error = float(np.sqrt((np.log((base + scale * np.exp(power * x)) / y) ** 2).mean()))
    return Law(base, scale, power, margin, error)
