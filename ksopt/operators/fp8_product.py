"""The product of a matrix and an input in FP8, with straight-through gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from ksopt.kernels import weight_cache
from ksopt.operators.batches import Product, of_any_batch
from ksopt.reference import is_batch_last

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max
_ROWS = 16  # in batch_last the rows of x are columns of the result, padded to a multiple of it


def quantized(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in FP8, and the scale of each row.

    Args:
        rows: [n, k], of any floating-point dtype; values that float32 holds round alike in all.

    Returns:
        [n, k] in e4m3, contiguous; [n, 1] in float32, above 0.
    """
    exact = rows.detach().contiguous()
    if exact.dtype == torch.float64:
        exact = exact.float()
    # The norm reads 16-bit rows as they are, and the quotient's only pass writes float32. The
    # largest quotient may exceed e4m3's largest number by a rounding of float32, and rounds to it.
    largest = torch.linalg.vector_norm(exact, torch.inf, 1, keepdim=True, dtype=torch.float32)
    scale = largest / _LARGEST
    scale = torch.where(scale > 0, scale, 1.0)
    return (exact / scale).to(FP8), scale


def rounded(rows: Tensor) -> Tensor:
    """Rows [n, k] rounded to FP8, in their own dtype, with the gradient of the rows."""
    values, scale = quantized(rows)
    near = values.to(rows.dtype) * scale.to(rows.dtype)
    return near.detach() + (rows - rows.detach())  # the second term adds only the gradient


def bind(weight: Tensor, layout: str) -> Product:
    """The product by a weight [out_features, in_features] in bfloat16.

    The weight is rounded once per version, in training at every call.
    """
    last = is_batch_last(layout)
    return of_any_batch(lambda x: _product(x, weight, last), layout)


def _product(x: Tensor, weight: Tensor, last: bool) -> Tensor:
    # The cache cannot be traced; without tracing, torch._dynamo need not be imported.
    return (_untraced if torch.compiler.is_compiling() else _computed)(x, weight, last)


def _computed(x: Tensor, weight: Tensor, last: bool) -> Tensor:
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _Product.apply(x, weight, last)
    values = weight_cache.prepared(weight, "fp8 values", lambda whole: quantized(whole)[0])
    scale = weight_cache.prepared(weight, "fp8 scales", lambda whole: quantized(whole)[1])
    return multiply(quantized(x.T if last else x), (values, scale), last, x.dtype)


_untraced = _disable_dynamo(_computed)


def multiply(
    x: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor], last: bool, dtype: torch.dtype
) -> Tensor:
    """The product y = x Wᵀ [rows, out], or its transpose in batch_last, of FP8 rows and scales.

    Args:
        x: [rows, in] and [rows, 1].
        weight: [out, in] and [out, 1].
        last: Whether the result is [out, rows].
        dtype: Of the result.
    """
    (values, scale), (of_weight, weight_scale) = x, weight
    if not last:
        return _scaled_mm(values, of_weight.T, scale, weight_scale.T, dtype)
    rows = values.shape[0]
    more = -rows % _ROWS
    if more:
        values = torch.cat([values, values.new_zeros(more, values.shape[1])])
        scale = torch.cat([scale, scale.new_ones(more, 1)])
    y = _scaled_mm(of_weight, values.T, weight_scale, scale.T, dtype)
    return y[:, :rows].contiguous() if more else y


def _scaled_mm(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """The scaled product of left [m, k], a scale per row, and right [k, n], a scale per column."""
    scales = {"scale_a": left_scale, "scale_b": right_scale.contiguous()}
    # Accumulation in the tensor cores' own precision, as usual in FP8 inference.
    return torch._scaled_mm(left, right, **scales, out_dtype=dtype, use_fast_accum=True)


class _Product(torch.autograd.Function):
    """The FP8 product of x [rows, in] ([in, rows] in batch_last), gradients in the operands'."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, last: bool) -> Tensor:
        weight_cache.forget(weight)  # an optimizer may change it without a new version
        of_x, of_weight = quantized(x.T if last else x), quantized(weight)
        ctx.save_for_backward(*of_x, *of_weight)
        ctx.last, ctx.dtype = last, x.dtype
        return multiply(of_x, of_weight, last, x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, x_scale, weight, weight_scale = ctx.saved_tensors
        (of_y,) = gradients
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            near = weight.to(ctx.dtype) * weight_scale.to(ctx.dtype)
            of_x = near.T @ of_y if ctx.last else of_y @ near
        if ctx.needs_input_grad[1]:
            near = x.to(ctx.dtype) * x_scale.to(ctx.dtype)
            of_weight = of_y @ near if ctx.last else of_y.T @ near
        return of_x, of_weight, None
