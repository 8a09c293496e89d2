"""Chains whose product is no factor, as one matrix with holes, by csrc/cuda/gather_mma.cuh.

The factors are multiplied once (kernels/merged.py). Where the product's support is that of no
factor, its matrix holds zeros, which must not meet what is not finite: PyTorch's product by it
would need another launch that looks at the result. Here -0 stands for these zeros, and a block that
finds a sum of its own not finite adds it again without them.

It is for layers whose chain is slower: a few rows, or factors that are small beside what is between
them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ksopt.epilogue import add_epilogue_
from ksopt.kernels import mergeable, merged, weight_groups
from ksopt.kernels.families import pytorch_cost
from ksopt.kernels.families.base import KernelFamily, register_family
from ksopt.kernels.families.gather_mma import Config
from ksopt.kernels.families.gather_mma_packed import GatherMmaPacked
from ksopt.kernels.launcher import Entry, HostLauncher, product_of_all
from ksopt.kernels.packing_launcher import PackedLauncher
from ksopt.kernels.problem import DeviceSpec, Problem
from ksopt.patterns.chain import Pattern

# Of the matrix, and times the weights' own elements: larger ones take memory, and are no faster.
_MOST_ELEMENTS, _MOST_TIMES = 2**24, 1024


class GatherMmaHoles(GatherMmaPacked):
    """Products by one matrix with holes: the kernels of `GatherMmaMerged`."""

    name = "gather_mma_merged"
    has_holes = True

    def packed_form(self, problem: Problem, config: Config) -> str:
        return f"merged, {super().packed_form(problem, config)}"


_BY_MATRIX = GatherMmaHoles()


@register_family
class GatherMmaMerged(KernelFamily[Config]):
    """A layer's product by the matrix of its factors' product, then PyTorch's operations."""

    name = "gather_mma_merged"
    dtypes: ClassVar[dict[str, str]] = {"float32": "float", "bfloat16": "BFloat16"}
    layout = "batch_first"
    takes_chains = True
    takes_parameters = True

    def unsupported_shape(self, problem: Problem, device: DeviceSpec) -> str | None:
        if problem.siblings > 1:
            return "it computes one chain at a time"
        if not mergeable.has_holes(problem):
            return "the product of its factors is a factor, which has kernels of its own"
        elements = matrix_of(problem).pattern.nnz
        if elements > min(_MOST_ELEMENTS, _MOST_TIMES * problem.chain.nnz):
            return f"the product of its factors would have {elements} elements"
        return _BY_MATRIX.unsupported_shape(matrix_of(problem), device)

    def configs(self, problem: Problem, device: DeviceSpec) -> Iterator[Config]:
        return _BY_MATRIX.configs(matrix_of(problem), device)

    def shared_bytes(self, problem: Problem, config: Config) -> int:
        return _BY_MATRIX.shared_bytes(matrix_of(problem), config)

    def prepares_weight(self, p: Pattern) -> bool:
        return True

    def predicted_us(
        self, problem: Problem, config: Config, batch: int, device: DeviceSpec
    ) -> float:
        us = _BY_MATRIX.predicted_us(matrix_of(problem), config, batch, device)
        return us + pytorch_cost.behind_us(problem, batch, device.multiprocessors)

    def sources(self, problem: Problem, config: Config) -> list[str]:
        return _BY_MATRIX.sources(matrix_of(problem), config)

    def launcher(self, problem: Problem, config: Config, device_index: int) -> MergedLauncher:
        by_matrix = matrix_of(problem)
        packed_bytes = _BY_MATRIX.packed_elements(by_matrix, config) * config.size
        launcher = _BY_MATRIX.launcher(by_matrix, config, device_index)
        return MergedLauncher(problem, launcher, packed_bytes)


@functools.lru_cache(maxsize=1024)
def matrix_of(problem: Problem) -> Problem:
    """The product by one matrix that a layer's is computed by."""
    pattern = mergeable.matrix_pattern(problem.chain.patterns)
    return Problem.of_factor(pattern, problem.dtype, problem.batch_last, problem.exact)


class MergedLauncher:
    """(x, weights, bias, residual, out) -> y: see `candidate.StoredCall`.

    Args:
        problem: what is computed.
        by_matrix: multiplies by the matrix.
        packed_bytes: memory of the packed matrix.
    """

    def __init__(self, problem: Problem, by_matrix: PackedLauncher, packed_bytes: int) -> None:
        self.problem = problem
        self._by_matrix = by_matrix
        self._bytes = packed_bytes

    def __call__(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        /,
    ) -> Tensor:
        try:
            packed = weight_groups.cached_together(
                weights, self._by_matrix.form, self._pack, self._bytes, merged.is_finite
            )
        except torch.OutOfMemoryError:
            packed = None
        if packed is None:
            from ksopt.kernels.by_factors import ByFactors  # here, for it knows all that chooses

            return ByFactors(self.problem)(x, weights, bias, residual, out)
        if out is not None and not out.is_contiguous():
            return out.copy_(self(x, weights, bias, residual))
        y = self._by_matrix.multiply(x, packed, out)
        return add_epilogue_(y, bias, self.problem.epilogue.activation, residual)

    def may_keep(self, weights: Sequence[Tensor]) -> bool:
        """Whether the packed matrix of these weights would be cached and used again."""
        return weight_groups.may_keep(weights, self._by_matrix.form, self._bytes)

    def is_cached(self, weights: Sequence[Tensor]) -> bool:
        """Whether it is cached now."""
        return weight_groups.is_cached(weights, self._by_matrix.form)

    def entry(self) -> Entry | None:
        """The entry that lets the host library do the same; None where there is none."""
        multiply = self._by_matrix.multiply
        if not isinstance(multiply, HostLauncher):
            return None
        shapes = [one.weight_shape for one in self.problem.chain]
        form = weight_groups.number_of(self._by_matrix.form, shapes, self.problem.dtype)
        return Entry(product_of_all(multiply.plan), form)

    def _pack(self, weights: Sequence[Tensor]) -> Tensor:
        matrix = merged.merge_with_holes(weights)
        return self._by_matrix.pack(matrix.view(self._by_matrix.problem.pattern.weight_shape))
