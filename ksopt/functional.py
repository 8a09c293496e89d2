"""Kronecker-sparse linear maps as functions of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ksopt import ops
from ksopt.epilogue import GATES
from ksopt.errors import InvalidInputError
from ksopt.kernels.validation import check_tensors
from ksopt.reference import is_batch_last


def ks_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None = None,
    layout: str = "batch_first",
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """y = act(x (K_1 K_2 ... K_L)ᵀ + bias) + residual.

    It is one operator, ``torch.ops.ksopt.ks_chain``: a launch computes all of it where a kernel
    takes the chain and is the fastest. Otherwise there is one launch per factor, whose results are
    rounded to x's dtype, and PyTorch's own operations follow the last.

    Args:
        x: [*batch, in_features] when batch_first, [in_features, *batch] when batch_last; float32,
            float16, bfloat16 or float64.
        weights: [a, b, c, d] of K_1, ..., K_L, left to right as in the chain: the last one meets x
            first. Of x's dtype and device. With a gate those of two chains of the same patterns,
            one chain's after the other's.
        bias: [out_features] or None; with a gate that of both chains, [2 * out_features].
        layout: "batch_first" or "batch_last", of x and of the result.
        activation: "relu", "gelu" (by erf), "gelu_tanh", "silu", or None. Or a gate, "relu_gate",
            "gelu_gate", "gelu_tanh_gate" or "silu_gate": then y = act(a) * b + residual, of the
            products a and b of two chains, bias included (silu_gate is that of SwiGLU).
        residual: added at the end, of the result's shape and dtype, or None.
        out_dtype: torch.float32 for y in float32 where x is float16 or bfloat16, not rounded to
            x's dtype at the end, and without a residual; None or x's dtype for y in x's dtype.

    Returns:
        y: [*batch, out_features] or [out_features, *batch], contiguous.

    Under torch.autocast it computes in the autocast dtype, like torch.nn.functional.linear; bias
    and residual are cast to it.

    Raises:
        InvalidInputError: no weights; what is no tensor; an unknown activation; another out_dtype;
            or shapes, dtypes or devices that do not fit together.

    Source: the paper, section 1 (a linear layer whose matrix is a product of such factors).

    Example:
        >>> import torch
        >>> x = torch.arange(4.0).reshape(1, 4)
        >>> ks_linear(x, [torch.ones(1, 2, 2, 2), torch.ones(2, 2, 2, 1)])
        tensor([[6., 6., 6., 6.]])
        >>> ks_linear(x, [-torch.ones(1, 4, 4, 1)], activation="relu", residual=x)
        tensor([[0., 1., 2., 3.]])
        >>> ks_linear(x, [torch.ones(1, 1, 4, 1), torch.ones(1, 1, 4, 1)], activation="relu_gate")
        tensor([[36.]])
    """
    check_tensors("ks_linear", x, weights, bias, residual)
    batch_last, act = is_batch_last(layout), "none" if activation is None else activation
    siblings = 2 if act in GATES else 1
    if out_dtype not in (None, torch.float32, x.dtype):
        raise InvalidInputError(
            f"ks_linear: out_dtype is {out_dtype}, but it must be None, torch.float32 or x's, "
            f"{x.dtype}"
        )
    casts = out_dtype == torch.float32
    return ops.chain(x, weights, bias, residual, act, batch_last, siblings, casts, op="ks_linear")
