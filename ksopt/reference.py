"""The Kronecker-sparse product written as plainly as possible: the ground truth of every test.

Nothing here is fast, and nothing that is fast may be used here. In float64 it is the truth.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ksopt.errors import InvalidInputError

LAYOUTS = ("batch_first", "batch_last")


def is_batch_last(layout: str) -> bool:
    """Read a layout's name.

    Raises:
        InvalidInputError: the name is neither "batch_first" nor "batch_last".
    """
    if layout not in LAYOUTS:
        raise InvalidInputError(
            f"layout {layout!r} is unknown: it must be 'batch_first' or 'batch_last'"
        )
    return layout == "batch_last"


def to_dense(weight: Tensor) -> Tensor:
    """The matrix K of a weight, zeros included.

    Args:
        weight: [a, b, c, d], any dtype.

    Returns:
        K: [a*b*d, a*c*d], with K[i*b*d + k*d + j, i*c*d + l*d + j] = weight[i, k, l, j].

    Source: the paper, Definition 2.1.

    Example:
        >>> to_dense(torch.ones(2, 1, 2, 1))
        tensor([[1., 1., 0., 0.],
                [0., 0., 1., 1.]])
    """
    a, b, c, d = weight.shape
    # Rows [i, k, j] by columns [i', l, j'], of which i = i' and j = j' are the support.
    dense = weight.new_zeros(a, b, d, a, c, d)
    support = dense.diagonal(dim1=0, dim2=3).diagonal(dim1=1, dim2=3)  # [b, c, a, d]
    support.copy_(weight.permute(1, 2, 0, 3))
    return dense.view(a * b * d, a * c * d)


def ks_reference(x: Tensor, weight: Tensor, layout: str = "batch_first") -> Tensor:
    """y = x Kᵀ: y[..., i, k, j] is the sum over l of x[..., i, l, j] * weight[i, k, l, j].

    Args:
        x: [*batch, a*c*d] when batch_first, [a*c*d, *batch] when batch_last.
        weight: [a, b, c, d], of x's dtype.
        layout: where the batch is, on the way in and on the way out.

    Returns:
        y: [*batch, a*b*d] or [a*b*d, *batch].

    Source: the paper, Algorithm 2.

    Example:
        >>> ks_reference(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.ones(1, 1, 2, 2))
        tensor([4., 6.])
    """
    a, b, c, d = weight.shape
    if is_batch_last(layout):
        y = torch.einsum("ilj...,iklj->ikj...", x.reshape(a, c, d, *x.shape[1:]), weight)
        return y.reshape(a * b * d, *x.shape[1:])
    y = torch.einsum("...ilj,iklj->...ikj", x.reshape(*x.shape[:-1], a, c, d), weight)
    return y.reshape(*x.shape[:-1], a * b * d)


def chain_reference(x: Tensor, weights: Sequence[Tensor], layout: str = "batch_first") -> Tensor:
    """y = x (K_1 K_2 ... K_L)ᵀ for weights left to right: the last one multiplies x first."""
    for weight in reversed(weights):
        x = ks_reference(x, weight, layout)
    return x


def chain_to_dense(weights: Sequence[Tensor]) -> Tensor:
    """The matrix K_1 K_2 ... K_L of weights, left to right."""
    dense = to_dense(weights[0])
    for weight in weights[1:]:
        dense = dense @ to_dense(weight)
    return dense
