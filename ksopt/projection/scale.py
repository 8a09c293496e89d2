"""Powers of two: they bring a matrix near 1 and its weights back, and change no digit of either."""

from __future__ import annotations

import math

from torch import Tensor


def exponent_of(matrix: Tensor) -> int:
    """The e for which the largest entry is at least 2**(e - 1) and below 2**e; 0 for zeros.

    Example:
        >>> import torch
        >>> exponent_of(torch.tensor([[1e300, -3.0]], dtype=torch.float64))
        997
    """
    return math.frexp(matrix.abs().max().item())[1]


def scaled(tensor: Tensor, exponent: float) -> Tensor:
    """A float64 tensor times 2**exponent, in two steps: 2**1074 is no number of float64's.

    Where the exponent is whole, all digits stay as they are, unless they fall out of the range.

    Example:
        >>> import torch
        >>> scaled(torch.tensor([2.0**-1074], dtype=torch.float64), 1074)
        tensor([1.], dtype=torch.float64)
    """
    half = math.floor(exponent / 2)
    return tensor * 2.0**half * 2.0 ** (exponent - half)


def shares(exponent: int, count: int) -> list[int]:
    """Whole numbers, as equal as they can be, whose sum is ``exponent``.

    Example:
        >>> shares(-7, 3)
        [-2, -2, -3]
    """
    return [(exponent + place) // count for place in reversed(range(count))]
