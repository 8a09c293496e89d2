"""PyTorch's own implementations of y = x Kᵀ, the baselines that kernels are compared with.

Each baseline prepares a weight once (permute, expand, convert) and then multiplies, so that a
benchmark can time the multiplication only. All are forward only, take any leading batch dims in
both layouts, and return a contiguous result that shares no memory with the input: in new memory, or
in a tensor that the caller passes, which costs no copy that a new one would not.

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

from ksopt.batched import (
    Matrices,
    bmm,
    bmm_loop,
    bmm_paper,
    bmm_prepare,
    bmm_weight_first,
    conv,
    einsum,
    einsum_weight_first,
    merged,
    within_32_bits,
)
from ksopt.patterns.chain import Pattern
from ksopt.reference import is_batch_last


@dataclass(frozen=True)
class Product:
    """The facts about a product that decide whether a baseline applies."""

    pattern: Pattern
    dtype: torch.dtype
    device_type: str
    batch_last: bool


@dataclass(frozen=True)
class Support:
    """Whether a baseline applies; if not, the reason in one sentence."""

    ok: bool
    reason: str = ""


@dataclass(frozen=True)
class Baseline:
    """One implementation of the product with PyTorch's own operations.

    Attributes:
        name: its key in ``BASELINES``.
        summary: a description of one line.
        supports: returns whether it applies to a product, and if not, why.
        prepare: (weight, batch_last) -> the weight in the form that ``core`` reads.
        core: (x as a matrix, prepared weight, pattern, batch_last, out) -> y as a matrix, in out
            unless that is None.
    """

    name: str
    summary: str
    supports: Callable[[Product], Support]
    prepare: Callable[[Tensor, bool], Tensor]
    core: Callable[[Tensor, Tensor, Pattern, bool, Tensor | None], Tensor]

    def multiply(
        self,
        x: Tensor,
        prepared: Tensor,
        pattern: Pattern,
        batch_last: bool,
        out: Tensor | None = None,
    ) -> Tensor:
        """y = x Kᵀ for any leading batch dims (none and empty ones too).

        Args:
            x: [*batch, N] when batch_first, [N, *batch] when batch_last; any strides.
            prepared: what ``prepare`` returned for the weight.
            pattern: the weight's pattern.
            batch_last: the layout of x and of the result.
            out: where y is written, if not into new memory: of y's shape and x's dtype, contiguous
                and sharing no memory with x and prepared.

        Returns:
            y: [*batch, M] or [M, *batch], contiguous, never sharing memory with x; in ``out``, if
            that is passed.
        """
        if batch_last:
            y_shape = (pattern.out_features, *x.shape[1:])
            matrix = x if x.dim() == 2 else x.reshape(x.shape[0], -1)
        else:
            y_shape = (*x.shape[:-1], pattern.out_features)
            matrix = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        # A sparse product refuses an empty batch, and a reshape to -1 cannot tell its size.
        if x.numel() == 0:
            return x.new_empty(y_shape) if out is None else out
        y = out
        if out is not None and x.dim() != 2:
            rows = (pattern.out_features, -1) if batch_last else (-1, pattern.out_features)
            y = out.view(rows)
        y = self.core(within_32_bits(matrix), prepared, pattern, batch_last, y)
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


def _bmm_loop_supports(product: Product) -> Support:
    if not product.batch_last:
        return Support(False, "bmm_loop saves copies in the layout batch_last only.")
    if product.pattern.a == 1 or product.pattern.d == 1:
        return Support(False, "With a = 1 or d = 1 one call is enough: bmm is the same.")
    return Support(True)


def _bmm_weight_first_supports(product: Product) -> Support:
    if product.batch_last:
        return Support(False, "In the layout batch_last bmm has the weight on the left, too.")
    if product.pattern.d == 1:
        return Support(False, "With d = 1 einsum_weight_first is the same product.")
    return Support(True)


def _conv_supports(product: Product) -> Support:
    if product.pattern.d > 1:
        return Support(False, "A group of a convolution has neighbouring features: d must be 1.")
    return Support(True)


def _einsum_prepare(weight: Tensor, batch_last: bool) -> Tensor:
    return weight


# expand: for small d, the zeros of each of the a blocks are multiplied too, and nothing is copied.


def _expand_prepare(weight: Tensor, batch_last: bool) -> Tensor:
    return Matrices.of_blocks(Pattern(*weight.shape)).prepare(weight)


def _expand(
    x: Tensor, weight: Tensor, pattern: Pattern, batch_last: bool, out: Tensor | None
) -> Tensor:
    if pattern.a == 1:
        return _dense(x, weight[0], pattern, batch_last, out)
    return bmm(x, weight, Matrices.of_blocks(pattern).pattern, batch_last, out)


# bsr: the block-diagonal matrix of Algorithm 1, [a*b*d, a*c*d], in block compressed sparse rows.


def _bsr_prepare(weight: Tensor, batch_last: bool) -> Tensor:
    a, b, c, d = weight.shape
    groups = a * d
    # Blocks are b x c, but on CPU torch requires squares: the largest squares that tile them.
    rows, cols = (b, c) if weight.device.type != "cpu" else (math.gcd(b, c),) * 2
    down, across = b // rows, c // cols
    values = bmm_prepare(weight, batch_last).view(groups, down, rows, across, cols)
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


def _bsr(
    x: Tensor, weight: Tensor, pattern: Pattern, batch_last: bool, out: Tensor | None
) -> Tensor:
    a, b, c, d = pattern.weight_shape
    if batch_last:
        batch = x.shape[1]
        x_perm = x.view(a, c, d, batch).transpose(1, 2).reshape(a * c * d, batch)
        y_perm = torch.matmul(weight, x_perm).view(a, d, b, batch)
        return merged(y_perm.transpose(1, 2), out, a * b * d, batch)
    batch = x.shape[0]
    x_perm = x.view(batch, a, c, d).transpose(-1, -2).reshape(batch, a * c * d)
    y_perm = linear(x_perm, weight).view(batch, a, d, b)
    # The sparse product may hand its result over transposed.
    return merged(y_perm.transpose(-1, -2), out, batch, a * b * d).contiguous()


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
    return Matrices.of_all(Pattern(*weight.shape)).prepare(weight)[0]


def _dense(
    x: Tensor, weight: Tensor, pattern: Pattern, batch_last: bool, out: Tensor | None
) -> Tensor:
    if out is None:
        return torch.matmul(weight, x) if batch_last else linear(x, weight)
    return torch.mm(weight, x, out=out) if batch_last else torch.mm(x, weight.t(), out=out)


def _sparse(
    x: Tensor, weight: Tensor, pattern: Pattern, batch_last: bool, out: Tensor | None
) -> Tensor:
    y = _dense(x, weight, pattern, batch_last, None)
    return merged(y, out, *y.shape).contiguous()


def _sparse_supports(name: str, product: Product) -> Support:
    p = product.pattern
    return _try_sparse(name, p.b, p.c, product.dtype, product.device_type, product.batch_last)


@functools.lru_cache(maxsize=4096)
def _try_sparse(
    name: str, b: int, c: int, dtype: torch.dtype, device_type: str, batch_last: bool
) -> Support:
    """Try one small product: only torch knows which sparse formats and dtypes work."""
    baseline = BASELINES[name]
    weight = torch.ones(2, b, c, 1, dtype=dtype, device=device_type)
    x = torch.ones((2 * c, 8) if batch_last else (8, 2 * c), dtype=dtype, device=device_type)
    try:
        baseline.multiply(x, baseline.prepare(weight, batch_last), Pattern(2, b, c, 1), batch_last)
    except (RuntimeError, NotImplementedError) as error:
        message = str(error).strip().splitlines()[0]
        return Support(False, f"torch {torch.__version__} on {device_type} refuses it: {message}")
    return Support(True)


BASELINES: Mapping[str, Baseline] = MappingProxyType(
    {
        baseline.name: baseline
        for baseline in (
            Baseline("bmm", "one batched GEMM, fewest copies", _always, bmm_prepare, bmm),
            Baseline(
                "bmm_loop",
                "min(a, d) batched GEMMs, no copies (batch_last)",
                _bmm_loop_supports,
                bmm_prepare,
                bmm_loop,
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
                bmm_prepare,
                bmm_paper,
            ),
            Baseline("einsum", "torch.einsum on 4-D views", _always, _einsum_prepare, einsum),
            Baseline(
                "einsum_weight_first",
                "torch.einsum on 4-D views, the weight before x",
                _always,
                _einsum_prepare,
                einsum_weight_first,
            ),
            Baseline(
                "bmm_weight_first",
                "one batched GEMM with the weight on the left (batch_first)",
                _bmm_weight_first_supports,
                bmm_prepare,
                bmm_weight_first,
            ),
            Baseline(
                "conv",
                "a grouped convolution with kernels of size 1 (d = 1)",
                _conv_supports,
                _einsum_prepare,
                conv,
            ),
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
