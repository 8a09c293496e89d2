"""A chain as one dense matrix: its factors are multiplied once, and PyTorch multiplies by that.

It is for layers whose chain is slower than the dense layer that it replaces: a few rows, or factors
that the kernels are slow on. The matrix takes a dense layer's memory beside the factors' own, so it
is made only where it can be kept (weight_cache.py): elsewhere, and where the weights change from
call to call, a launch a factor computes the layer.

The product's support must be full, so that every output depends on every input. Otherwise the
matrix would hold zeros, and zero times what is not finite would reach outputs that never met it.
Not in float16: a product of weights may lie outside its range where the layer's result does not.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ksopt.epilogue import add_epilogue_
from ksopt.jit import host
from ksopt.kernels import weight_cache, weight_groups
from ksopt.kernels.families import pytorch_cost
from ksopt.kernels.launcher import MERGED_MATRIX, Entry
from ksopt.kernels.problem import FEW_ROWS, Problem
from ksopt.patterns.chain import Chain, Pattern
from ksopt.reference import chain_reference

_FORM = "merged"
_DTYPES = ("bfloat16", "float32")
_COLUMNS = 4096  # of the matrix, made at a time
_NEXT_US = 3.5  # what a launch that follows others takes: cuBLAS's, of a few rows, on an H100


def can_merge(problem: Problem) -> bool:
    """Whether a layer may be computed by one dense matrix.

    Example:
        >>> from ksopt.patterns.chain import Chain
        >>> [can_merge(Problem(Chain.monarch(64, 64, p), "float32", False)) for p in (4, 16)]
        [True, False]
    """
    if problem.second is not None or problem.dtype not in _DTYPES or len(problem.chain) == 1:
        return False
    return _is_dense(problem.chain.patterns)


@functools.lru_cache(maxsize=1024)
def _is_dense(patterns: tuple[Pattern, ...]) -> bool:
    return Chain(patterns).is_dense_support


def matrix_bytes(problem: Problem) -> int:
    """Memory of the matrix, which is kept beside the factors."""
    size = getattr(torch, problem.dtype).itemsize
    return int(size) * problem.product_features * problem.chain.in_features


def matrix_size(problem: Problem) -> str:
    """The same for a person.

    Example:
        >>> from ksopt.patterns.chain import Chain
        >>> matrix_size(Problem(Chain.monarch(1024, 1024, 8), "bfloat16", False))
        '2.0 MiB'
    """
    return f"{matrix_bytes(problem) / 2**20:.1f} MiB"


def predicted_us(problem: Problem, batch: int, multiprocessors: int) -> float:
    """Predicted time of the product by the matrix, and of what follows it.

    Args:
        problem: what is computed.
        batch: rows of x.
        multiprocessors: of the device.
    """
    kind = problem.dtype if problem.exact else "tf32"
    n_out, n_in, after = problem.product_features, problem.chain.in_features, problem.epilogue
    us = pytorch_cost.product_us(1, batch, n_out, n_in, kind, multiprocessors)
    size = getattr(torch, problem.dtype).itemsize * batch * n_out
    passes = [2.0] * (after.activation != "none") + [3.0] * after.residual
    if after.is_gated:  # of half of the products each: what is activated, multiplied, added to
        passes = [1, 1.5] + [1.5] * after.residual
    passes += [2] * (after.bias and problem.batch_last)
    steps = [pytorch_cost.elementwise_us(n * size, multiprocessors) for n in passes]
    launch_us = _NEXT_US if batch <= FEW_ROWS else pytorch_cost.LAUNCH_US
    return us + launch_us + sum(steps)


def may_keep(problem: Problem, weights: Sequence[Tensor]) -> bool:
    """Whether the matrix of these weights would be kept, and used again.

    They must be parameters, or what a graph calls a view of one. Other weights may have been
    computed for this call alone, and to merge them takes as long as a product of as many rows as
    the layer has inputs.
    """
    owners = [weight_cache.owner_of(weight) for weight in weights]
    return (
        all(map(weight_cache.is_stored, owners))
        and all(map(weight_cache.is_keepable, weights, owners))
        and weight_cache.has_room(matrix_bytes(problem), weights[0].device)
    )


def merge(weights: Sequence[Tensor], siblings: int = 1) -> Tensor:
    """The matrix of a layer: (siblings * out_features, in_features), of the weights' dtype.

    It is the layer's result for the rows of the identity. The first factor that they meet gives its
    own elements, unrounded, so that of two factors each element of the matrix is rounded once; more
    are multiplied in float32.

    Args:
        weights: (a, b, c, d) of the chain's factors, left to right, sibling after sibling.
        siblings: how many chains they are of.

    Example:
        >>> merge([2 * torch.ones(1, 2, 2, 1), torch.ones(1, 2, 2, 1)])
        tensor([[4., 4.],
                [4., 4.]])
    """
    length, dtype = len(weights) // siblings, weights[0].dtype
    wide = dtype if length == 2 else torch.float32
    chains = [
        [weight.to(wide) for weight in weights[first : first + length]]
        for first in range(0, len(weights), length)
    ]
    a, _, c, d = weights[-1].shape
    inputs = a * c * d
    columns = []
    for start in range(0, inputs, _COLUMNS):
        count = min(_COLUMNS, inputs - start)
        rows = torch.zeros(count, inputs, dtype=wide, device=weights[0].device)
        rows[:, start : start + count].fill_diagonal_(1.0)
        parts = [chain_reference(rows, factors).to(dtype) for factors in chains]
        columns.append(torch.cat(parts, 1).T)
    return torch.cat(columns, 1).contiguous()


@dataclass(frozen=True)
class Merged:
    """(x, weights, bias, residual, out) -> y: see `registry.ChainCall`.

    Attributes:
        problem: what is computed.
    """

    problem: Problem

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
            matrix = weight_groups.kept_together(weights, _FORM, self._merge, matrix_bytes(p))
        except torch.OutOfMemoryError:
            matrix = None
        if matrix is None:
            from ksopt.kernels.by_factors import ByFactors  # here, for it knows all that chooses

            return ByFactors(p)(x, weights, bias, residual, out)
        if out is not None and (p.epilogue.is_gated or not out.is_contiguous()):
            return out.copy_(self(x, weights, bias, residual))
        y = times_matrix(x, matrix, bias, p.batch_last, out)
        return add_epilogue_(y, None, p.epilogue.activation, residual, p.batch_last)

    def _merge(self, weights: Sequence[Tensor]) -> Tensor:
        return merge(weights, self.problem.siblings)

    def entry(self) -> Entry | None:
        """What the host library needs to do the same; None where there is none."""
        if not host.is_loaded():
            return None
        p = self.problem
        shapes = [one.weight_shape for _ in range(p.siblings) for one in p.chain]
        return Entry(MERGED_MATRIX, weight_groups.number_of(_FORM, shapes, p.dtype))


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
        torch.mm(matrix, x.reshape(inputs, -1), out=y.view(outputs, -1))
        return add_epilogue_(y, bias, batch_last=True)
    rows, result = x.reshape(-1, inputs), y.view(-1, outputs)
    if bias is None:
        torch.mm(rows, matrix.T, out=result)
    else:
        torch.addmm(bias, rows, matrix.T, out=result)
    return y
