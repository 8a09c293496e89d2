"""Kronecker-sparse linear maps as functions of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ksopt import ops
from ksopt.errors import InvalidInputError
from ksopt.reference import is_batch_last


def ks_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None = None,
    layout: str = "batch_first",
) -> Tensor:
    """y = x (K_1 K_2 ... K_L)ᵀ + bias, factor by factor.

    Args:
        x: [*batch, in_features] when batch_first, [in_features, *batch] when batch_last; float32,
            float16, bfloat16 or float64.
        weights: [a, b, c, d] of K_1, ..., K_L, left to right as in the chain: the last one meets x
            first. Of x's dtype and device.
        bias: [out_features] or None.
        layout: "batch_first" or "batch_last", of x and of the result.

    Returns:
        y: [*batch, out_features] or [out_features, *batch], contiguous.

    Under torch.autocast it computes in the autocast dtype, like torch.nn.functional.linear.

    Raises:
        InvalidInputError: no weights; or shapes, dtypes or devices that do not fit together.

    Source: the paper, section 1 (a linear layer whose matrix is a product of such factors).

    Example:
        >>> x = torch.arange(4.0).reshape(1, 4)
        >>> ks_linear(x, [torch.ones(1, 2, 2, 2), torch.ones(2, 2, 2, 1)])
        tensor([[6., 6., 6., 6.]])
    """
    batch_last = is_batch_last(layout)
    if not weights:
        raise InvalidInputError("ks_linear: weights is empty, but a chain has at least one factor")
    for index in range(len(weights) - 1, -1, -1):
        x = ops.multiply(x, weights[index], batch_last)
    if bias is None:
        return x
    features = x.shape[0 if batch_last else -1]
    if bias.dim() != 1 or bias.shape[0] != features:
        raise InvalidInputError(
            f"ks_linear: bias has shape {list(bias.shape)}, but the chain has {features} outputs: "
            f"it must be [{features}]"
        )
    if bias.dtype != x.dtype:
        if not torch.is_autocast_enabled(x.device.type):
            raise InvalidInputError(
                f"ks_linear: bias is {str(bias.dtype).removeprefix('torch.')} and the product "
                f"{str(x.dtype).removeprefix('torch.')}, but they must have one dtype"
            )
        bias = bias.to(x.dtype)
    if batch_last:
        bias = bias.view(-1, *(1,) * (x.dim() - 1))
    return ops.add(x, bias)
