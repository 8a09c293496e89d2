"""Arithmetic that the families' cost models share."""

from __future__ import annotations

from collections.abc import Iterable


def overlapped(times: Iterable[float], power: float) -> float:
    """The time of several tasks that overlap almost perfectly.

    It is the time of the slowest, plus a part of those that take almost as long.

    Args:
        times: of each task alone.
        power: the larger it is, the better they overlap; 1 is one after another.

    Example:
        >>> overlapped((3.0, 4.0), 2.0)
        5.0
    """
    return float(sum(time**power for time in times) ** (1 / power))


def chains_cycles(
    steps: float, chain: int, step_cycles: float, between: float, hidden: float
) -> float:
    """Cycles of a warpgroup's products, which it starts in chains and waits for.

    Args:
        steps: products in all.
        chain: products of a chain.
        step_cycles: of a product.
        between: from a chain to the next, beside the products.
        hidden: 1 and the share of that which chains under way hide.
    """
    return steps / chain * (between / hidden + chain * step_cycles)
