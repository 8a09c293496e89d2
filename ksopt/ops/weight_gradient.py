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
    parts = _parts_of_rows(x, a * d, b, c, math.prod(x.shape[1:] if batch_last else x.shape[:-1]))
    if parts > 1:
        products = _product_in_parts(grad, x, a, d, batch_last, parts)
    else:
        products = torch.bmm(_groups(grad, a, d, batch_last), _groups(x, a, d, batch_last).mT)
    if d == 1:
        return products.unsqueeze(3)
    return products.view(a, d, b, c).permute(0, 2, 3, 1).contiguous()


_BLOCKS = 264  # two for each multiprocessor of an H200
_BLOCK_OUTPUTS, _BLOCK_SUMS = 128, 64  # cuBLAS's tile of a product, about
_LEAST_ROWS = 256  # of a part


def _parts_of_rows(x: Tensor, groups: int, b: int, c: int, rows: int) -> int:
    """Into how many parts the rows are divided, so that the products occupy a GPU.

    A batched product has a block for each tile of its results, and cuBLAS does not divide its sums:
    a factor of few small blocks and many rows would leave most of a GPU idle. In 16 bits one part,
    as partial sums would be rounded; one for dynamic numbers of rows, too.
    """
    if x.device.type != "cuda" or x.dtype.itemsize < 4 or groups == 1 or not isinstance(rows, int):
        return 1
    tiles = groups * math.ceil(b / _BLOCK_OUTPUTS) * math.ceil(c / _BLOCK_SUMS)
    most = min(_BLOCKS // tiles, rows // _LEAST_ROWS)
    if most < 2:
        return 1
    even = max(parts for parts in range(1, most + 1) if rows % parts == 0)
    return even if 2 * even >= most else most


def _product_in_parts(
    grad: Tensor, x: Tensor, a: int, d: int, batch_last: bool, parts: int
) -> Tensor:
    """The sums [a*d, b, c] of equal parts of the rows, added up, and of the rows left over."""
    grad, x = (_as_matrix(one, batch_last) for one in (grad, x))
    at = 1 if batch_last else 0
    rows = x.shape[at] // parts

    def in_parts(matrix: Tensor) -> Tensor:  # [parts*a*d, b or c, rows]
        matrix = matrix.narrow(at, 0, parts * rows)
        if batch_last:
            split = matrix.reshape(a, -1, d, parts, rows).permute(3, 0, 2, 1, 4)
            return split.reshape(parts * a * d, -1, rows)
        n = matrix.shape[1] // (a * d)
        split = matrix.reshape(parts, rows, a, n, d).permute(0, 2, 4, 1, 3)
        return split.reshape(parts * a * d, rows, n).mT

    products = torch.bmm(in_parts(grad), in_parts(x).mT)
    total = products.view(parts, a * d, *products.shape[1:]).sum(0)
    left_over = x.shape[at] - parts * rows
    if left_over == 0:
        return total
    grad, x = (one.narrow(at, parts * rows, left_over) for one in (grad, x))
    return total + torch.bmm(_groups(grad, a, d, batch_last), _groups(x, a, d, batch_last).mT)


def _as_matrix(x: Tensor, batch_last: bool) -> Tensor:
    return x.reshape(x.shape[0], -1) if batch_last else x.reshape(-1, x.shape[-1])


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
