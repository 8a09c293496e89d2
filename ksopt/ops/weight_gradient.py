"""The gradients of a product by one factor: of its weight, and of a bias added to it.

:mod:`ksopt.ops.schemas` registers these functions.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from ksopt.kernels import weight_gradients
from ksopt.kernels.operands import size_hint
from ksopt.kernels.validation import check_weight_grad
from ksopt.patterns.chain import Pattern


def weight_grad(grad: Tensor, x: Tensor, a: int, d: int, batch_last: bool) -> Tensor:
    """The gradient of a `product` with respect to its weight."""
    # As for `product`; and autocast would cast for the operators that this calls.
    with torch._C._AutoDispatchBelowADInplaceOrView(), torch._C._DisableAutocast():
        check_weight_grad(grad, x, a, d, batch_last)
        if not batch_last:
            by_pytorch = partial(_by_pytorch, a, d, False)
            gradients = weight_gradients.run(grad, x, a, d, False, by_pytorch)
            if gradients is not None:
                return gradients[0]
        return weight_grad_decomposed(grad, x, a, d, batch_last)


def weight_bias_grad(grad: Tensor, x: Tensor, a: int, d: int) -> tuple[Tensor, Tensor]:
    """The `weight_grad`, batch first, and the gradient of a bias added to the product."""
    with torch._C._AutoDispatchBelowADInplaceOrView(), torch._C._DisableAutocast():
        check_weight_grad(grad, x, a, d, False)
        by_pytorch = partial(_by_pytorch, a, d, True)
        gradients = weight_gradients.run(grad, x, a, d, True, by_pytorch)
        if gradients is not None and gradients[1] is not None:
            return gradients[0], gradients[1]
        return weight_grad_decomposed(grad, x, a, d, False), bias_grad(grad)


def _by_pytorch(
    a: int, d: int, with_bias: bool, grad: Tensor, x: Tensor
) -> tuple[Tensor, Tensor | None]:
    bias = bias_grad(grad) if with_bias else None
    return weight_grad_decomposed(grad, x, a, d, False), bias


def weight_grad_fake(grad: Tensor, x: Tensor, a: int, d: int, batch_last: bool) -> Tensor:
    """The shape of a `weight_grad`."""
    check_weight_grad(grad, x, a, d, batch_last)
    at = 0 if batch_last else -1
    return x.new_empty((a, grad.shape[at] // (a * d), x.shape[at] // (a * d), d))


def weight_bias_grad_fake(grad: Tensor, x: Tensor, a: int, d: int) -> tuple[Tensor, Tensor]:
    """The shapes of a `weight_bias_grad`."""
    return weight_grad_fake(grad, x, a, d, False), grad.new_empty(grad.shape[-1])


def bias_grad(grad: Tensor) -> Tensor:
    """The sum over all but the last dim."""
    return grad.reshape(-1, grad.shape[-1]).sum(0)


def is_weight_grad_by_kernel(grad: Tensor, x: Tensor, a: int, d: int, batch_last: bool) -> bool:
    """Whether a kernel of ksopt's computes a `weight_grad` faster, of fakes too.

    Where the number of rows is dynamic, that of this call decides.
    """
    if batch_last or x.device.type != "cuda":
        return False
    sizes = [size_hint(size) for size in (a, d, grad.shape[-1], *x.shape)]
    if None in sizes or 0 in sizes:
        return False
    a, d, outs, *rows, ins = (int(size) for size in sizes if size is not None)
    pattern = Pattern(a, outs // (a * d), ins // (a * d), d)
    return weight_gradients.is_by_kernel(pattern, x.dtype, math.prod(rows), x.device)


def weight_grad_decomposed(grad: Tensor, x: Tensor, a: int, d: int, batch_last: bool) -> Tensor:
    """The `weight_grad` in torch's own operators, which transforms and compilers know."""
    check_weight_grad(grad, x, a, d, batch_last)
    at = 0 if batch_last else -1
    b, c = grad.shape[at] // (a * d), x.shape[at] // (a * d)
    products = torch.bmm(_groups(grad, a, d, batch_last), _groups(x, a, d, batch_last).mT)
    if d == 1:
        return products.unsqueeze(3)
    return products.view(a, d, b, c).permute(0, 2, 3, 1).contiguous()


def _groups(x: Tensor, a: int, d: int, batch_last: bool) -> Tensor:
    """The matrices of a batched product, one for each i, j: [a*d, c, B], with the fewest copies.

    For d = 1 it is a view, which a GEMM reads as it is.
    """
    if batch_last:
        if d == 1:
            return x.reshape(a, x.shape[0] // a, -1)
        c = x.shape[0] // (a * d)
        return x.reshape(a, c, d, -1).transpose(1, 2).reshape(a * d, c, -1)
    if d == 1:
        return x.reshape(-1, a, x.shape[-1] // a).permute(1, 2, 0)
    # c and d change places inside each row, which keeps both sides of the copy near each other.
    # Contiguous, because for a = 1 the reshape alone would be a view that a GEMM cannot read.
    # x: [*batch, a*c*d] -> [B, a, d, c] -> [a*d, c, B]
    c = x.shape[-1] // (a * d)
    rows = x.reshape(-1, a, c, d).transpose(2, 3).reshape(-1, a * d, c).contiguous()
    return rows.permute(1, 2, 0)
