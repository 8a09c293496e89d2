"""Divisors of a size."""

from __future__ import annotations

import functools
from math import isqrt


@functools.lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """The divisors in rising order.

    Example:
        >>> divisors(12)
        (1, 2, 3, 4, 6, 12)
    """
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))
