"""The product y = x Kᵀ by PyTorch's batched matrix products.

The cores of most baselines of baselines.py: x and y are matrices, the weight is prepared as
`Matrices`. The host library, which multiplies in the same ways without Python
(csrc/host/torch_products.cpp), reads its arguments from here.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ksopt import precision
from ksopt.patterns.chain import Pattern


def within_32_bits(matrix: Tensor) -> Tensor:
    """A matrix whose strides cuBLAS can count: itself, or a copy where rows lie too far apart.

    Example:
        >>> far = torch.empty_strided((3, 4), (2**31, 1), device="meta")
        >>> within_32_bits(far).stride()
        (4, 1)
    """
    return matrix if max(matrix.stride(), default=0) < 2**31 else matrix.contiguous()


@dataclass(frozen=True)
class Matrices:
    """The positions of the elements of a weight [a, b, c, d] in the matrices of a batched product.

    Attributes:
        pattern: of the product, by a*d matrices [b, c]: the weight's own or, where the matrices
            hold zeros, too, that of larger blocks.
        strides: of the weight's dims in the memory of the matrices, which follow one another.

    Example:
        >>> Matrices.of_blocks(Pattern(2, 1, 1, 2)).prepare(torch.ones(2, 1, 1, 2))
        tensor([[[1., 0.],
                 [0., 1.]],
        <BLANKLINE>
                [[1., 0.],
                 [0., 1.]]])
    """

    pattern: Pattern
    strides: tuple[int, int, int, int]

    @classmethod
    @functools.lru_cache(maxsize=1024)
    def of(cls, p: Pattern) -> Matrices:
        """One matrix for each i, j: [a*d, b, c], without zeros."""
        return cls(p, (p.d * p.b * p.c, p.c, 1, p.b * p.c))

    @classmethod
    @functools.lru_cache(maxsize=1024)
    def of_blocks(cls, p: Pattern) -> Matrices:
        """One matrix for each i, zeros included: [a, b*d, c*d]."""
        rows, columns = p.b * p.d, p.c * p.d
        strides = (rows * columns, p.d * columns, p.d, columns + 1)
        return cls(Pattern(p.a, rows, columns, 1), strides)

    @classmethod
    @functools.lru_cache(maxsize=1024)
    def of_all(cls, p: Pattern) -> Matrices:
        """The full matrix, zeros included: [1, a*b*d, a*c*d]."""
        rows, columns = p.out_features, p.in_features
        strides = (p.b * p.d * columns + p.c * p.d, p.d * columns, p.d, columns + 1)
        return cls(Pattern(1, rows, columns, 1), strides)

    def prepare(self, weight: Tensor) -> Tensor:
        """The matrices [a*d, b, c]: a view of the weight where they lie in its memory already."""
        a, b, c, d = self.pattern.weight_shape
        shape = (a * d, b, c)
        holds_zeros = math.prod(shape) > weight.numel()
        if not holds_zeros and self._are_in_place(weight):
            return weight.as_strided(shape, (b * c, c, 1))
        copy = weight.new_zeros(shape) if holds_zeros else weight.new_empty(shape)
        copy.as_strided(weight.shape, self.strides).copy_(weight)
        return copy

    def _are_in_place(self, weight: Tensor) -> bool:
        steps = zip(weight.shape, weight.stride(), self.strides, strict=True)
        return all(size == 1 or step == own for size, step, own in steps)


# Where a result goes. A product is written straight into out; where it has to be permuted, the
# permuting copy is.


def _result(x: Tensor, out: Tensor | None, *shape: int) -> Tensor:
    return x.new_empty(shape) if out is None else out.view(shape)


def _before_copy(x: Tensor, out: Tensor | None, p: Pattern, *shape: int) -> Tensor:
    """The tensor for y before b and d are exchanged: the result itself, where nothing moves."""
    return _result(x, out if p.b == 1 or p.d == 1 else None, *shape)


def merged(y: Tensor, out: Tensor | None, *shape: int) -> Tensor:
    """y with dims merged, written into ``out`` if it is passed."""
    if out is None:
        return y.reshape(shape)
    if y.data_ptr() != out.data_ptr():
        out.view(y.shape).copy_(y)
    return out


# bmm: one batched GEMM, whose groups are the a*d pairs (i, j). cuBLAS and MKL take a matrix whose
# rows or columns are contiguous and any stride between matrices, so what has to be copied is what
# cannot be seen that way, and no more.


def bmm_prepare(weight: Tensor, batch_last: bool) -> Tensor:
    if weight.shape[3] == 1:
        return weight.squeeze(3)  # whatever its strides: torch copies what a GEMM cannot read
    return Matrices.of(Pattern(*weight.shape)).prepare(weight)


def bmm(
    x: Tensor, weight: Tensor, pattern: Pattern, batch_last: bool, out: Tensor | None
) -> Tensor:
    if batch_last:
        return _bmm_batch_last(x, weight, pattern, out)
    a, b, c, d = pattern.weight_shape
    batch = x.shape[0]
    if a == 1 and d == 1:
        return torch.mm(x, weight[0].t(), out=out)
    if c == 1:
        # Nothing to sum: one multiplication for each output, and no copy.
        y = _result(x, out, batch, a, b, d)
        torch.mul(x.view(batch, a, 1, d), weight.view(a, d, b).transpose(1, 2), out=y)
        return y.view(batch, a * b * d)
    if batch == 1:
        # A single row is a single column, and columns need fewer copies.
        column = None if out is None else out.view(-1, 1)
        return _bmm_batch_last(x.view(-1, 1), weight, pattern, column).view(1, -1)
    if d == 1:
        y = _result(x, out, batch, a * b)
        groups = x.view(batch, a, c).transpose(0, 1)
        torch.bmm(groups, weight.mT, out=y.view(batch, a, b).transpose(0, 1))
        return y
    if x.is_cpu and a > 1:
        # MKL multiplies all groups in one call only where the result is contiguous.
        groups = x.view(batch, a, c, d).permute(1, 3, 0, 2).reshape(a * d, batch, c)
        y = torch.bmm(groups, weight.mT).view(a, d, batch, b)
        # For b = 1 the reshape alone would be a transposed view.
        return merged(y.permute(2, 0, 3, 1), out, batch, a * b * d).contiguous()
    # c and d change places inside each row, which keeps both sides of the copy near each other.
    # x: [B, a, c, d] -> [B, a*d, c] -> groups [a*d, B, c]
    groups = x.view(batch, a, c, d).transpose(2, 3).reshape(batch, a * d, c).transpose(0, 1)
    y = _before_copy(x, out, pattern, batch, a, d, b)
    torch.bmm(groups, weight.mT, out=y.view(batch, a * d, b).transpose(0, 1))
    return merged(y.transpose(2, 3), out, batch, a * b * d)


def _bmm_batch_last(x: Tensor, weight: Tensor, pattern: Pattern, out: Tensor | None) -> Tensor:
    a, b, c, d = pattern.weight_shape
    batch = x.shape[1]
    if a == 1 and d == 1:
        return torch.mm(weight[0], x, out=out)
    if c == 1:
        y = _result(x, out, a, b, d, batch)
        torch.mul(x.view(a, 1, d, batch), weight.view(a, d, b, 1).transpose(1, 2), out=y)
        return y.view(a * b * d, batch)
    if a == 1 or d == 1:
        # The groups are a slices of [c, B], or d of them interleaved row by row: no copy.
        y = _result(x, out, a * b * d, batch)
        torch.bmm(weight, _groups(x, a, c, d), out=_groups(y, a, b, d))
        return y
    # x: [a, c, d, B] -> groups [a*d, c, B], in runs of B elements
    groups = x.view(a, c, d, batch).transpose(1, 2).reshape(a * d, c, batch)
    y = _before_copy(x, out, pattern, a, d, b, batch)
    torch.bmm(weight, groups, out=y.view(a * d, b, batch))
    return merged(y.transpose(1, 2), out, a * b * d, batch)


def _groups(rows: Tensor, a: int, size: int, d: int) -> Tensor:
    """[a*size*d, B] seen as [a*d, size, B], where a = 1 or d = 1."""
    batch = rows.shape[1]
    if d == 1:
        return rows.view(a, size, batch)
    return rows.view(size, d, batch).transpose(0, 1)


# bmm_loop: in batch_last every group can be seen without a copy, but not all of them by one
# stride. One call for each i (or each j, if fewer) then copies nothing at all.


def bmm_loop(
    x: Tensor, weight: Tensor, pattern: Pattern, batch_last: bool, out: Tensor | None
) -> Tensor:
    a, b, c, d = pattern.weight_shape
    batch = x.shape[1]
    y = _result(x, out, a * b * d, batch)
    # [a, d, b, c], [a, d, c, B] and [a, d, b, B]
    matrices = weight.view(a, d, b, c)
    inputs = x.view(a, c, d, batch).transpose(1, 2)
    outputs = y.view(a, b, d, batch).transpose(1, 2)
    axis = 0 if a <= d else 1
    for matrix, group, place in zip(
        matrices.unbind(axis), inputs.unbind(axis), outputs.unbind(axis), strict=True
    ):
        torch.bmm(matrix, group, out=place)
    return y


# bmm_paper: appendix D.1 as printed, completed where the page leaves something out (Y_perm is
# allocated and not passed on, the value is not returned); batch_last by the page's own rule.


def bmm_paper(
    x: Tensor, weight: Tensor, pattern: Pattern, batch_last: bool, out: Tensor | None
) -> Tensor:
    a, b, c, d = pattern.weight_shape
    if batch_last:
        batch = x.shape[1]
        x_perm = x.view(a, c, d, batch).transpose(1, 2).reshape(a * d, c, batch).contiguous()
        y_perm = _before_copy(x, out, pattern, a * d, b, batch)
        torch.bmm(weight, x_perm, out=y_perm)
        y = y_perm.reshape(a, d, b, batch).transpose(1, 2)
        return merged(y, out, a * b * d, batch)
    batch = x.shape[0]
    x_perm = x.view(batch, a, c, d).transpose(-1, -2).reshape(batch, a * d, c).contiguous()
    y_perm = _before_copy(x, out, pattern, batch, a * d, b).transpose(0, 1)
    torch.bmm(x_perm.transpose(0, 1), weight.transpose(-1, -2), out=y_perm)
    y = y_perm.transpose(0, 1).reshape(batch, a, d, b).transpose(-1, -2)
    return merged(y, out, batch, a * b * d)


def einsum(
    x: Tensor, weight: Tensor, pattern: Pattern, batch_last: bool, out: Tensor | None
) -> Tensor:
    a, b, c, d = pattern.weight_shape
    if out is not None and (c == 1 or d == 1):
        # torch makes one product of it, whose y is in order: a copy into out would be one more.
        return bmm(x, bmm_prepare(weight, batch_last), pattern, batch_last, out)
    if batch_last:
        y = torch.einsum("icjn,ibcj->ibjn", x.view(a, c, d, -1), weight)
        return merged(y, out, a * b * d, x.shape[1]).contiguous()
    y = torch.einsum("nicj,ibcj->nibj", x.view(-1, a, c, d), weight)
    return merged(y, out, x.shape[0], a * b * d).contiguous()


def einsum_weight_first(
    x: Tensor, weight: Tensor, pattern: Pattern, batch_last: bool, out: Tensor | None
) -> Tensor:
    """The einsum with the weight first: torch multiplies and permutes in the operands' order."""
    a, b, c, d = pattern.weight_shape
    if batch_last:
        y = torch.einsum("ibcj,icjn->ibjn", weight, x.view(a, c, d, -1))
        return merged(y, out, a * b * d, x.shape[1]).contiguous()
    y = torch.einsum("ibcj,nicj->nibj", weight, x.view(-1, a, c, d))
    return merged(y, out, x.shape[0], a * b * d).contiguous()


def bmm_weight_first(
    x: Tensor, weight: Tensor, pattern: Pattern, batch_last: bool, out: Tensor | None
) -> Tensor:
    """One batched GEMM with the weight on the left, of x in batch_first with d > 1."""
    a, b, c, d = pattern.weight_shape
    batch = x.shape[0]
    groups = x.view(batch, a, c, d).permute(1, 3, 2, 0).reshape(a * d, c, batch)
    y = torch.bmm(weight, groups).view(a, d, b, batch)
    return merged(y.permute(3, 0, 2, 1), out, batch, a * b * d).contiguous()


def conv(
    x: Tensor, weight: Tensor, pattern: Pattern, batch_last: bool, out: Tensor | None
) -> Tensor:
    """A grouped convolution with a kernel of size 1, one group for each i; d is 1."""
    a, b, c, _ = pattern.weight_shape
    images = x.unsqueeze(0) if batch_last else x.unsqueeze(2)
    # As torch.conv1d, whose TF32 is a switch of its own, on by default: this one is the products'.
    y = torch._convolution(
        *(images, weight.reshape(a * b, c, 1), None, [1], [0], [1], False, [0], a),
        *(torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, True),
        allow_tf32=not precision.is_exact(),
    )
    shape = (a * b, x.shape[1]) if batch_last else (x.shape[0], a * b)
    return merged(y.squeeze(0 if batch_last else 2), out, *shape).contiguous()
