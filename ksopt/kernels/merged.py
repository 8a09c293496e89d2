"""A chain merged to one matrix: its factors are multiplied once, the layer is one product.

It is for layers whose chain is slower than one product: a few rows, or factors that the kernels are
slow on. The product of the factors takes memory beside them, so it is computed only where it can be
cached (weight_cache.py). Elsewhere, and where the weights change from call to call, the layer is
computed by one launch per factor.

Which chains are merged, and to what, is in mergeable.py.

The product is rounded, and the factors' results are not. In bfloat16 that is as exact as PyTorch's
chain on ordinary operands, and less where the first factors cancel most of x: then the race, which
allows twice PyTorch's error on the call's operands, does not choose it.

A product that is not finite is not used: an infinite weight turns its terms into NaN there, where
the layer's results may be infinite, and large weights overflow that small inputs keep in range.
Products below the dtype's range become 0, and are used: large inputs would keep them in range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ksopt import precision
from ksopt.batched import within_32_bits
from ksopt.epilogue import After, add_epilogue_, in_float32
from ksopt.jit import host
from ksopt.kernels import chain_repair, weight_cache, weight_groups
from ksopt.kernels.chain_repair import ChainRepair
from ksopt.kernels.launcher import MERGED_MATRIX, Entry, RepairedEntry
from ksopt.kernels.mergeable import (
    factor_of,
    holds_zeros,
    is_full,
    merged_pattern,
    product_bytes,
)
from ksopt.kernels.problem import Problem
from ksopt.patterns.chain import Pattern
from ksopt.reference import chain_reference

_COLUMNS = 4096  # of a block of the product, computed at a time
_MOST_VALUES = 2**26  # of a factor's inputs or results for such a block


def _product_bytes(problem: Problem) -> int:
    """Bytes cached beside the factors: the merged matrix, or the factor and its packed form."""
    return product_bytes(problem) * (1 if factor_of(problem) is None else 2)


def may_keep(problem: Problem, weights: Sequence[Tensor]) -> bool:
    """Whether the product of these weights would be cached and used again.

    They must be parameters, or what a graph calls a view of one. Other weights may have been
    computed for this call alone, and to merge them takes as long as a product of as many rows as
    the layer has inputs.
    """
    owners = [weight_cache.owner_of(weight) for weight in weights]
    if not all(map(weight_cache.is_stored, owners)):
        return False
    if not all(map(weight_cache.is_cacheable, weights, owners)):
        return False
    if is_cached(problem, weights):
        return True
    return weight_cache.has_room(_product_bytes(problem), weights[0].device)


def is_cached(problem: Problem, weights: Sequence[Tensor]) -> bool:
    """Whether the product of these weights is cached; if not, `Merged` uses the factors."""
    return weight_groups.is_cached(weights, _form(problem))


def _form(problem: Problem) -> str:
    return f"merged {problem.siblings}"


def _is_finite(product: Tensor) -> bool:
    return bool(product.isfinite().all())


def merge(weights: Sequence[Tensor], siblings: int = 1) -> Tensor:
    """The product of a layer's factors, of their dtype.

    It is read off the layer's results for rows that are 1 at feature (i, l, j) of each block (i, j)
    of the product, and 0 elsewhere: blocks share no features, so a row gives their columns l. The
    first factor that they meet contributes its elements unrounded, so that of two factors each
    element of the product is rounded once; more are multiplied in float32.

    Args:
        weights: (a, b, c, d) of the chain's factors, left to right, sibling after sibling.
        siblings: how many chains they are of.

    Returns:
        A dense matrix, (siblings * out_features, in_features); or, of one chain whose support is
        not full, the weight of a factor, (a, b, c, d).

    Example:
        >>> merge([2 * torch.ones(1, 2, 2, 1), torch.ones(1, 2, 2, 1)])
        tensor([[4., 4.],
                [4., 4.]])
        >>> merge([torch.ones(2, 1, 3, 2), torch.ones(2, 3, 4, 2)]).shape
        torch.Size([2, 1, 4, 2])
    """
    length, dtype = len(weights) // siblings, weights[0].dtype
    patterns = tuple(Pattern(*weight.shape) for weight in weights[:length])
    product = merged_pattern(patterns)
    widest = max(size for one in patterns for size in (one.in_features, one.out_features))
    step = min(_COLUMNS, max(1, _MOST_VALUES // widest))
    wide = dtype if length == 2 else torch.float32
    a, b, c, d = product.weight_shape
    parts = []
    # The cached product serves later calls, which may require more than TF32.
    with precision.fp32_products("ieee"):
        for start in range(0, c, step):
            columns = torch.arange(start, min(start + step, c), device=weights[0].device)
            rows = torch.zeros(len(columns), a, c, d, dtype=wide, device=weights[0].device)
            rows[columns - start, :, columns] = 1.0
            flat = rows.view(len(columns), -1)
            for first in range(0, len(weights), length):
                factors = [weight.to(wide) for weight in weights[first : first + length]]
                parts.append(chain_reference(flat, factors).to(dtype).view(-1, a, b, d))
    of_siblings = [
        torch.cat(parts[which::siblings]).permute(1, 2, 0, 3) for which in range(siblings)
    ]
    if is_full(product):
        return torch.cat(of_siblings, 1).reshape(siblings * b, c)
    # A copy, even where its elements are in order: the cache stores no views.
    return of_siblings[0].clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Merged:
    """(x, weights, bias, residual, out) -> y: see `candidate.ChainCall`.

    Attributes:
        problem: what is computed.
        repair: the kernel behind a product by a matrix with zeros; None where it holds none.
    """

    problem: Problem
    repair: ChainRepair | None = None

    @classmethod
    def on_device(cls, problem: Problem, device_index: int) -> Merged:
        """With the kernel that it needs, compiled and loaded.

        Raises:
            UnavailableError, CompilationError: see :mod:`ksopt.jit`.
        """
        if not holds_zeros(problem.chain.patterns):
            return cls(problem)
        return cls(problem, ChainRepair(problem, device_index))

    def __call__(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        /,
    ) -> Tensor:
        p = self.problem
        try:
            product = weight_groups.cached_together(
                weights, _form(p), self._merge, _product_bytes(p), _is_finite
            )
        except torch.OutOfMemoryError:
            product = None
        if product is None:
            from ksopt.kernels.by_factors import ByFactors  # here: it imports what chooses

            return ByFactors(p)(x, weights, bias, residual, out)
        if out is not None and (p.epilogue.is_gated or not out.is_contiguous()):
            return out.copy_(self(x, weights, bias, residual))
        if product.ndim == 4:  # a factor, with its own choice
            from ksopt.kernels import dispatch

            casts = p.epilogue.in_float32
            after, whole = After(bias, p.epilogue.activation, residual, casts), None
            if not after.is_empty:
                whole = dispatch.run_within(x, product, p.batch_last, after, out)
            if whole is not None:
                return whole
            y = dispatch.multiply(x, product, p.batch_last, out)
            return self._behind(y, bias, residual)
        y = times_matrix(x, product, bias, p.batch_last, out)
        if self.repair is not None:
            added = None if bias is None else bias.contiguous()
            self.repair(x.contiguous(), weights, added, y)
        return self._behind(y, None, residual)

    def _behind(self, y: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        """What PyTorch's operations make of the product."""
        after = self.problem.epilogue
        y = add_epilogue_(y, bias, after.activation, residual, self.problem.batch_last)
        return in_float32(y) if after.in_float32 else y

    def _merge(self, weights: Sequence[Tensor]) -> Tensor:
        return merge(weights, self.problem.siblings)

    def entry(self) -> Entry | None:
        """The entry that lets the host library do the same; None where there is none."""
        if not host.is_loaded():
            return None
        p = self.problem
        shapes = [one.weight_shape for _ in range(p.siblings) for one in p.chain]
        form = weight_groups.number_of(_form(p), shapes, p.dtype)
        if self.repair is None:
            return Entry(MERGED_MATRIX, form)
        return RepairedEntry(MERGED_MATRIX, form, repair=self.repair.launch())


def sources(problem: Problem) -> list[str]:
    """The generated file of the kernel behind the product, if it has one."""
    return [chain_repair.source(problem)] if holds_zeros(problem.chain.patterns) else []


def times_matrix(
    x: Tensor, matrix: Tensor, bias: Tensor | None, batch_last: bool, out: Tensor | None = None
) -> Tensor:
    """x matrixᵀ + bias, in one product where PyTorch has that.

    Args:
        x: (*batch, N), or (N, *batch) when batch_last.
        matrix: (M, N).
        bias: (M,), or None.
        batch_last: the layout.
        out: contiguous memory for the result, or None.
    """
    outputs, inputs = matrix.shape
    shape = (outputs, *x.shape[1:]) if batch_last else (*x.shape[:-1], outputs)
    y = torch.empty(shape, dtype=x.dtype, device=x.device) if out is None else out
    if batch_last:
        columns = within_32_bits(x.reshape(inputs, -1))
        torch.mm(matrix, columns, out=y.view(outputs, -1))
        return add_epilogue_(y, bias, batch_last=True)
    rows, result = within_32_bits(x.reshape(-1, inputs)), y.view(-1, outputs)
    if bias is None:
        torch.mm(rows, matrix.T, out=result)
    else:
        torch.addmm(bias, rows, matrix.T, out=result)
    return y
