"""What PyTorch alone offers for the product y = x Kᵀ: what the kernels are compared with.

Each baseline prepares a weight once (permute, expand, convert) and then multiplies, so that a
benchmark can time the multiplication only. All are forward only, take any leading batch dims in
both layouts, and give a contiguous result that shares no memory with the input.

Shapes: weight [a, b, c, d]; x [B, a*c*d] when batch_first, [a*c*d, B] when batch_last.
Source: the paper, section 2.1 and appendix D.1.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn.functional import linear

from ksopt.pattern import Pattern
from ksopt.reference import is_batch_last, to_dense


@dataclass(frozen=True)
class Product:
    """What a baseline needs to know to say whether it applies."""

    pattern: Pattern
    dtype: torch.dtype
    device_type: str
    batch_last: bool


@dataclass(frozen=True)
class Support:
    """Whether a baseline applies, and if not, why not (one sentence)."""

    ok: bool
    reason: str = ""


@dataclass(frozen=True)
class Baseline:
    """One way to compute the product with PyTorch's own operations.

    Attributes:
        name: its key in ``BASELINES``.
        summary: what it does, in a line.
        supports: says whether it applies to a product, and why not.
        prepare: (weight, batch_last) -> the weight in the form that ``core`` wants.
        core: (x as a matrix, prepared weight, pattern, batch_last) -> y as a matrix.
    """

    name: str
    summary: str
    supports: Callable[[Product], Support]
    prepare: Callable[[Tensor, bool], Tensor]
    core: Callable[[Tensor, Tensor, Pattern, bool], Tensor]

    def multiply(self, x: Tensor, prepared: Tensor, pattern: Pattern, batch_last: bool) -> Tensor:
        """y = x Kᵀ for any leading batch dims (none and empty ones too).

        Args:
            x: [*batch, N] when batch_first, [N, *batch] when batch_last; any strides.
            prepared: what ``prepare`` returned for the weight.
            pattern: the weight's pattern.
            batch_last: the layout of x and of the result.

        Returns:
            y: [*batch, M] or [M, *batch], contiguous, never sharing memory with x.
        """
        if batch_last:
            y_shape = (pattern.out_features, *x.shape[1:])
            matrix = x if x.dim() == 2 else x.reshape(x.shape[0], -1)
        else:
            y_shape = (*x.shape[:-1], pattern.out_features)
            matrix = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        # A sparse product refuses an empty batch, and a reshape to -1 cannot tell its size.
        if x.numel() == 0:
            return x.new_empty(y_shape)
        y = self.core(matrix, prepared, pattern, batch_last)
        return y if x.dim() == 2 else y.view(y_shape)

    def bind(self, weight: Tensor, layout: str = "batch_first") -> Callable[[Tensor], Tensor]:
        """Prepare the weight now and return the function of x that a benchmark times.

        Example:
            >>> product = BASELINES["bmm"].bind(torch.ones(1, 1, 2, 2))
            >>> product(torch.tensor([1.0, 2.0, 3.0, 4.0]))
            tensor([4., 6.])
        """
        batch_last = is_batch_last(layout)
        pattern = Pattern(*weight.shape)
        prepared = self.prepare(weight.detach(), batch_last)
        return lambda x: self.multiply(x.detach(), prepared, pattern, batch_last)


def _always(product: Product) -> Support:
    return Support(True)


# bmm: one batched GEMM, whose groups are the a*d pairs (i, j). cuBLAS and MKL take a matrix whose
# rows or columns are contiguous and any stride between matrices, so what has to be copied is what
# cannot be seen that way, and no more.


def _bmm_prepare(weight: Tensor, batch_last: bool) -> Tensor:
    a, b, c, d = weight.shape
    if d == 1:
        return weight.squeeze(3)
    # Contiguous, because for a = 1 the reshape alone would be a view that the GEMM cannot read.
    return weight.permute(0, 3, 1, 2).reshape(a * d, b, c).contiguous()


def _bmm(x: Tensor, weight: Tensor, pattern: Pattern, batch_last: bool) -> Tensor:
    if batch_last:
        return _bmm_batch_last(x, weight, pattern)
    a, b, c, d = pattern.weight_shape
    batch = x.shape[0]
    if a == 1 and d == 1:
        return torch.mm(x, weight[0].t())
    if c == 1:
        # Nothing to sum: one multiplication for each output, and no copy.
        y = x.new_empty(batch, a, b, d)
        torch.mul(x.view(batch, a, 1, d), weight.view(a, d, b).transpose(1, 2), out=y)
        return y.view(batch, a * b * d)
    if batch == 1:
        # A single row is a single column, and columns need fewer copies.
        return _bmm_batch_last(x.view(-1, 1), weight, pattern).view(1, -1)
    if d == 1:
        y = x.new_empty(batch, a * b)
        groups = x.view(batch, a, c).transpose(0, 1)
        torch.bmm(groups, weight.mT, out=y.view(batch, a, b).transpose(0, 1))
        return y
    if x.is_cpu and a > 1:
        # MKL multiplies all groups in one call only where the result is contiguous.
        groups = x.view(batch, a, c, d).permute(1, 3, 0, 2).reshape(a * d, batch, c)
        y = torch.bmm(groups, weight.mT).view(a, d, batch, b)
        # For b = 1 the reshape alone would be a transposed view.
        return y.permute(2, 0, 3, 1).reshape(batch, a * b * d).contiguous()
    # c and d change places inside each row, which keeps both sides of the copy near each other.
    # x: [B, a, c, d] -> [B, a*d, c] -> groups [a*d, B, c]
    groups = x.view(batch, a, c, d).transpose(2, 3).reshape(batch, a * d, c).transpose(0, 1)
    y = x.new_empty(batch, a, d, b)
    torch.bmm(groups, weight.mT, out=y.view(batch, a * d, b).transpose(0, 1))
    return y.transpose(2, 3).reshape(batch, a * b * d)


def _bmm_batch_last(x: Tensor, weight: Tensor, pattern: Pattern) -> Tensor:
    a, b, c, d = pattern.weight_shape
    batch = x.shape[1]
    if a == 1 and d == 1:
        return torch.mm(weight[0], x)
    if c == 1:
        y = x.new_empty(a, b, d, batch)
        torch.mul(x.view(a, 1, d, batch), weight.view(a, d, b, 1).transpose(1, 2), out=y)
        return y.view(a * b * d, batch)
    if a == 1 or d == 1:
        # The groups are a slices of [c, B], or d of them interleaved row by row: no copy.
        y = x.new_empty(a * b * d, batch)
        torch.bmm(weight, _groups(x, a, c, d), out=_groups(y, a, b, d))
        return y
    # x: [a, c, d, B] -> groups [a*d, c, B], in runs of B elements
    groups = x.view(a, c, d, batch).transpose(1, 2).reshape(a * d, c, batch)
    y = x.new_empty(a, d, b, batch)
    torch.bmm(weight, groups, out=y.view(a * d, b, batch))
    return y.transpose(1, 2).reshape(a * b * d, batch)


def _groups(rows: Tensor, a: int, size: int, d: int) -> Tensor:
    """[a*size*d, B] seen as [a*d, size, B], where a = 1 or d = 1."""
    batch = rows.shape[1]
    if d == 1:
        return rows.view(a, size, batch)
    return rows.view(size, d, batch).transpose(0, 1)


# bmm_loop: in batch_last every group can be seen without a copy, but not all of them by one
# stride. One call for each i (or each j, if fewer) then copies nothing at all.


def _bmm_loop_supports(product: Product) -> Support:
    if not product.batch_last:
        return Support(False, "bmm_loop saves copies in the layout batch_last only.")
    if product.pattern.a == 1 or product.pattern.d == 1:
        return Support(False, "With a = 1 or d = 1 one call is enough: bmm is the same.")
    return Support(True)


def _bmm_loop(x: Tensor, weight: Tensor, pattern: Pattern, batch_last: bool) -> Tensor:
    a, b, c, d = pattern.weight_shape
    batch = x.shape[1]
    y = x.new_empty(a * b * d, batch)
    # [a, d, b, c], [a, d, c, B] and [a, d, b, B]
    matrices = weight.view(a, d, b, c)
    inputs = x.view(a, c, d, batch).transpose(1, 2)
    outputs = y.view(a, b, d, batch).transpose(1, 2)
    axis = 0 if a <= d else 1
    for matrix, group, out in zip(
        matrices.unbind(axis), inputs.unbind(axis), outputs.unbind(axis), strict=True
    ):
        torch.bmm(matrix, group, out=out)
    return y


# expand: for small d, the zeros of each of the a blocks are multiplied too, and nothing is copied.


def _expand_prepare(weight: Tensor, batch_last: bool) -> Tensor:
    a, b, c, d = weight.shape
    if d == 1:
        return weight.reshape(a, b, c)
    blocks = weight.new_zeros(a, b, d, c, d)
    blocks.diagonal(dim1=2, dim2=4).copy_(weight)
    return blocks.view(a, b * d, c * d)


def _expand(x: Tensor, weight: Tensor, pattern: Pattern, batch_last: bool) -> Tensor:
    if pattern.a == 1:
        return _dense(x, weight[0], pattern, batch_last)
    return _bmm(x, weight, _expanded(pattern), batch_last)


@functools.lru_cache(maxsize=1024)
def _expanded(pattern: Pattern) -> Pattern:
    return Pattern(pattern.a, pattern.b * pattern.d, pattern.c * pattern.d, 1)


# bmm_paper: appendix D.1 as printed, completed where the page leaves something out (Y_perm is
# allocated and not passed on, the value is not returned); batch_last by the page's own rule.


def _bmm_paper(x: Tensor, weight: Tensor, pattern: Pattern, batch_last: bool) -> Tensor:
    a, b, c, d = pattern.weight_shape
    if batch_last:
        batch = x.shape[1]
        x_perm = x.view(a, c, d, batch).transpose(1, 2).reshape(a * d, c, batch).contiguous()
        y_perm = x.new_empty(a * d, b, batch)
        torch.bmm(weight, x_perm, out=y_perm)
        y = y_perm.reshape(a, d, b, batch).transpose(1, 2)
        return y.reshape(a * b * d, batch)
    batch = x.shape[0]
    x_perm = x.view(batch, a, c, d).transpose(-1, -2).reshape(batch, a * d, c).contiguous()
    y_perm = x.new_empty(batch, a * d, b).transpose(0, 1)
    torch.bmm(x_perm.transpose(0, 1), weight.transpose(-1, -2), out=y_perm)
    y = y_perm.transpose(0, 1).reshape(batch, a, d, b).transpose(-1, -2)
    return y.reshape(batch, a * b * d)


def _einsum_prepare(weight: Tensor, batch_last: bool) -> Tensor:
    return weight


def _einsum(x: Tensor, weight: Tensor, pattern: Pattern, batch_last: bool) -> Tensor:
    a, b, c, d = pattern.weight_shape
    if batch_last:
        y = torch.einsum("icjn,ibcj->ibjn", x.view(a, c, d, -1), weight)
        return y.reshape(a * b * d, -1).contiguous()
    y = torch.einsum("nicj,ibcj->nibj", x.view(-1, a, c, d), weight)
    return y.reshape(-1, a * b * d).contiguous()


# bsr: the block-diagonal matrix of Algorithm 1, [a*b*d, a*c*d], in block compressed sparse rows.


def _bsr_prepare(weight: Tensor, batch_last: bool) -> Tensor:
    a, b, c, d = weight.shape
    groups = a * d
    # Blocks are b x c, but on CPU torch asks for square ones: the largest squares that tile them.
    rows, cols = (b, c) if weight.device.type != "cpu" else (math.gcd(b, c),) * 2
    down, across = b // rows, c // cols
    values = _bmm_prepare(weight, batch_last).view(groups, down, rows, across, cols)
    device = weight.device
    crow = torch.arange(groups * down + 1, device=device) * across
    col = torch.arange(groups * across, device=device).view(groups, 1, across)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse BSR tensor support is in beta")
        return torch.sparse_bsr_tensor(
            crow,
            col.expand(groups, down, across).reshape(-1).contiguous(),  # one block: stride 0
            values.transpose(2, 3).reshape(-1, rows, cols),
            size=(groups * b, groups * c),
            check_invariants=True,
        )


def _bsr(x: Tensor, weight: Tensor, pattern: Pattern, batch_last: bool) -> Tensor:
    a, b, c, d = pattern.weight_shape
    if batch_last:
        batch = x.shape[1]
        x_perm = x.view(a, c, d, batch).transpose(1, 2).reshape(a * c * d, batch)
        y_perm = torch.matmul(weight, x_perm).view(a, d, b, batch)
        return y_perm.transpose(1, 2).reshape(a * b * d, batch)
    batch = x.shape[0]
    x_perm = x.view(batch, a, c, d).transpose(-1, -2).reshape(batch, a * c * d)
    y_perm = linear(x_perm, weight).view(batch, a, d, b)
    # The sparse product may hand its result over transposed.
    return y_perm.transpose(-1, -2).reshape(batch, a * b * d).contiguous()


def _sparse_prepare(weight: Tensor, batch_last: bool) -> Tensor:
    a, b, c, d = weight.shape
    device = weight.device
    # Row (i, k, j) holds the columns (i, l, j) for every l, already in order.
    i = torch.arange(a, device=device).view(a, 1, 1, 1) * (c * d)
    j = torch.arange(d, device=device).view(1, 1, d, 1)
    along = torch.arange(c, device=device).view(1, 1, 1, c) * d
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(
            torch.arange(a * b * d + 1, device=device) * c,
            (i + j + along).expand(a, b, d, c).reshape(-1).contiguous(),
            weight.transpose(2, 3).reshape(-1),
            size=(a * b * d, a * c * d),
            check_invariants=True,
        )


def _dense_prepare(weight: Tensor, batch_last: bool) -> Tensor:
    return to_dense(weight)


def _dense(x: Tensor, weight: Tensor, pattern: Pattern, batch_last: bool) -> Tensor:
    if batch_last:
        return torch.matmul(weight, x)
    return linear(x, weight)


def _sparse(x: Tensor, weight: Tensor, pattern: Pattern, batch_last: bool) -> Tensor:
    return _dense(x, weight, pattern, batch_last).contiguous()


def _sparse_supports(name: str, product: Product) -> Support:
    p = product.pattern
    return _try_sparse(name, p.b, p.c, product.dtype, product.device_type, product.batch_last)


@functools.lru_cache(maxsize=4096)
def _try_sparse(
    name: str, b: int, c: int, dtype: torch.dtype, device_type: str, batch_last: bool
) -> Support:
    """Try one small product: which sparse formats and dtypes work is known to torch alone."""
    baseline = BASELINES[name]
    weight = torch.ones(2, b, c, 1, dtype=dtype, device=device_type)
    x = torch.ones((2 * c, 8) if batch_last else (8, 2 * c), dtype=dtype, device=device_type)
    try:
        baseline.multiply(x, baseline.prepare(weight, batch_last), Pattern(2, b, c, 1), batch_last)
    except (RuntimeError, NotImplementedError) as error:
        said = str(error).strip().splitlines()[0]
        return Support(False, f"torch {torch.__version__} on {device_type} refuses it: {said}")
    return Support(True)


BASELINES: Mapping[str, Baseline] = MappingProxyType(
    {
        baseline.name: baseline
        for baseline in (
            Baseline("bmm", "one batched GEMM, fewest copies", _always, _bmm_prepare, _bmm),
            Baseline(
                "bmm_loop",
                "min(a, d) batched GEMMs, no copies (batch_last)",
                _bmm_loop_supports,
                _bmm_prepare,
                _bmm_loop,
            ),
            Baseline(
                "expand",
                "a dense blocks of b*d x c*d, zeros included, no copies",
                _always,
                _expand_prepare,
                _expand,
            ),
            Baseline(
                "bmm_paper",
                "bmm as printed in the paper, appendix D.1",
                _always,
                _bmm_prepare,
                _bmm_paper,
            ),
            Baseline("einsum", "torch.einsum on 4-D views", _always, _einsum_prepare, _einsum),
            Baseline(
                "bsr",
                "block compressed sparse rows between two permutations",
                functools.partial(_sparse_supports, "bsr"),
                _bsr_prepare,
                _bsr,
            ),
            Baseline(
                "sparse",
                "compressed sparse rows, structure ignored",
                functools.partial(_sparse_supports, "sparse"),
                _sparse_prepare,
                _sparse,
            ),
            Baseline("dense", "the full matrix, zeros included", _always, _dense_prepare, _dense),
        )
    }
)


def bmm_weight_grad(grad: Tensor, x: Tensor, a: int, d: int, batch_last: bool) -> Tensor:
    """The gradient with respect to the weight, by one batched GEMM with the fewest copies.

    Args:
        grad: [*batch, a*b*d] when batch_first, [a*b*d, *batch] when batch_last.
        x: [*batch, a*c*d] or [a*c*d, *batch].
        a, d: the outer sizes of the pattern; b and c follow from the features.
        batch_last: the layout of both.

    Returns:
        [a, b, c, d], contiguous: the sum over the batch of grad[..., i, k, j] * x[..., i, l, j].
    """
    at = 0 if batch_last else -1
    b, c = grad.shape[at] // (a * d), x.shape[at] // (a * d)
    weight = x.new_empty(a, d, b, c) if d > 1 else x.new_empty(a, b, c, 1)
    out = weight.view(a * d, b, c)
    if x.numel() == 0:
        return weight.zero_() if d == 1 else x.new_zeros(a, b, c, d)
    if batch_last:
        rows_of_grad = grad.reshape(a, b, d, -1).transpose(1, 2).reshape(a * d, b, -1)
        rows_of_x = x.reshape(a, c, d, -1).transpose(1, 2).reshape(a * d, c, -1)
        torch.bmm(rows_of_grad, rows_of_x.mT, out=out)
    else:
        rows_of_grad = grad.reshape(-1, a, b, d).transpose(2, 3).reshape(-1, a * d, b)
        rows_of_x = x.reshape(-1, a, c, d).transpose(2, 3).reshape(-1, a * d, c)
        torch.bmm(rows_of_grad.permute(1, 2, 0), rows_of_x.transpose(0, 1), out=out)
    return weight if d == 1 else weight.permute(0, 2, 3, 1).contiguous()
