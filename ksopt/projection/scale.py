"""Exact scaling of a matrix near 1 and of its weights back, by powers of two."""

from __future__ import annotations

import math

from torch import Tensor


def exponent_of(matrix: Tensor) -> int:
    """The exponent e for which the largest entry is in [2**(e - 1), 2**e); 0 for zeros.

    Example:
        >>> import torch
        >>> exponent_of(torch.tensor([[1e300, -3.0]], dtype=torch.float64))
        997
    """
    return math.frexp(matrix.abs().max().item())[1]


def scaled(tensor: Tensor, exponent: float) -> Tensor:
    """A float64 tensor times 2**exponent, in two steps, because float64 cannot represent 2**1074.

    For a whole exponent all digits are preserved, unless they leave the range.

    Example:
        >>> import torch
        >>> scaled(torch.tensor([2.0**-1074], dtype=torch.float64), 1074)
        tensor([1.], dtype=torch.float64)
    """
    half = math.floor(exponent / 2)
    return tensor * 2.0**half * 2.0 ** (exponent - half)


def shares(exponent: int, count: int) -> list[int]:
    """Whole numbers, as equal as possible, whose sum is ``exponent``.

    Example:
        >>> shares(-7, 3)
        [-2, -2, -3]
    """
    return [(exponent + place) // count for place in reversed(range(count))]
