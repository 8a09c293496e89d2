"""How many outputs a tile may have: all that it computes are a factor's, or nearly all.

A factor with b = 8 * 29 has no wide tiles whose outputs are all its own. Tiles of 96 outputs cover
it with 24 % more, and read x three times instead of 29.
"""

from __future__ import annotations

import functools

# Computed outputs over b: where b is rounded up to a multiple of 8, and in other tiles.
_MOST_ROUNDING, _MOST_PADDING = 1.6, 1.26


@functools.lru_cache(maxsize=4096)  # called for every tile that is considered
def may_cover(b: int, outputs: int) -> bool:
    """Whether tiles of so many outputs may cover the b outputs of a block.

    Where b has divisors for all sizes of tiles, only those whose outputs are all its own.

    Example:
        >>> [outputs for outputs in range(8, 257, 8) if may_cover(232, outputs)]
        [8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 120, 128, 136, 144, 232, 240, 248, 256]
        >>> [outputs for outputs in range(8, 97, 8) if may_cover(96, outputs)]
        [8, 16, 24, 32, 48, 96]
        >>> [[outputs for outputs in range(8, 97, 8) if may_cover(b, outputs)] for b in (4, 5)]
        [[], [8]]
    """
    if -(-b // 8) * 8 % outputs == 0:
        return padding(b, outputs) <= _MOST_ROUNDING
    return not _has_all_sizes(b) and padding(b, outputs) <= _MOST_PADDING


def unsupported_outputs(b: int) -> str | None:
    """Why no tile covers the b outputs of a block; None if some do.

    Example:
        >>> unsupported_outputs(9), unsupported_outputs(10)
        ('tiles of 8 outputs would compute 1.78 times b = 9', None)
    """
    if may_cover(b, 8):
        return None
    return f"tiles of 8 outputs would compute {padding(b, 8):.2f} times b = {b}"


def padding(b: int, outputs: int) -> float:
    """Outputs that such tiles compute, over b.

    Example:
        >>> padding(96, 48), padding(5, 8)
        (1.0, 1.6)
    """
    return -(-b // outputs) * outputs / b


def _has_all_sizes(b: int) -> bool:
    """Whether b is a multiple of 8 without prime factors above 3."""
    if b % 8:
        return False
    for prime in (2, 3):
        while b % prime == 0:
            b //= prime
    return b == 1
