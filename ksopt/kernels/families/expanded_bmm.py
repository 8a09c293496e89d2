"""PyTorch's batched product by matrices with zeros, and a kernel that repairs rows with NaN.

For a few j the blocks (b d) x (c d) of a factor, or its whole matrix, are multiplied on tensor
cores without any permuting of x and y: d times the operations, or a d times. Their zeros spoil rows
that have an input that is not finite; csrc/cuda/expanded_bmm.cuh finds these by two elements of
y, and computes them once more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ksopt.baselines import BASELINES
from ksopt.batched import Matrices
from ksopt.kernels import codegen, weight_table
from ksopt.kernels.families.base import ANY_TYPE, KernelFamily, register_family
from ksopt.kernels.families.common import pytorch_cost, pytorch_ops
from ksopt.kernels.launcher import Entry, Launcher, prepare, torch_entry
from ksopt.kernels.problem import DeviceSpec, Geometry, Problem
from ksopt.patterns.chain import Pattern

# Of the matrices, and times the weight's own elements: what is larger is predicted to be hopeless,
# and takes memory until it is.
_MOST_ELEMENTS, _MOST_TIMES = 2**24, 1024
_THREADS = 256
_ANY_BLOCKS = 2**31 - 1
_WAYS = {"blocks": "expand", "matrix": "dense"}  # the baseline that multiplies so


@dataclass(frozen=True)
class Config:
    """The kind of matrices.

    Attributes:
        by: the factor's "blocks", one for each i, or its whole "matrix".
    """

    by: Literal["blocks", "matrix"]

    @property
    def blocks(self) -> int:
        """Blocks that must run on a multiprocessor at a time."""
        return 1

    def shared_bytes(self, p: Pattern) -> int:
        """No dynamic shared memory."""
        return 0

    def matrices(self, p: Pattern) -> Matrices:
        """The matrices of a factor's weight."""
        return Matrices.of_blocks(p) if self.by == "blocks" else Matrices.of_all(p)


@register_family
class ExpandedBmm(KernelFamily[Config]):
    """A batched product by matrices with zeros, which follows PyTorch's own switch for TF32."""

    name = "expanded_bmm"
    dtypes = ANY_TYPE
    by_pytorch = True
    is_judged_first = True

    def unsupported_shape(self, problem: Problem, device: DeviceSpec) -> str | None:
        if any(self.configs(problem, device)):
            return None
        return "its matrices would hold no zeros, or too many"

    def configs(self, problem: Problem, device: DeviceSpec) -> Iterator[Config]:
        p = problem.pattern
        if p.d > 1 and _is_small(p, p.d):
            yield Config("blocks")
        if p.a > 1 and _is_small(p, p.a * p.d):
            yield Config("matrix")

    def prepares_weight(self, p: Pattern) -> bool:
        return True

    def predicted_us(
        self, problem: Problem, config: Config, batch: int, device: DeviceSpec
    ) -> float:
        m = config.matrices(problem.pattern).pattern
        kind = problem.dtype if problem.exact else "tf32"
        us = pytorch_cost.product_us(m.a, batch, m.b, m.c, kind, device.multiprocessors)
        return us + pytorch_cost.LAUNCH_US + pytorch_cost.NEXT_LAUNCH_US

    def sources(self, problem: Problem, config: Config) -> list[str]:
        return [source(problem, config)]

    def launcher(self, problem: Problem, config: Config, device_index: int) -> ExpandedProduct:
        repair = prepare(
            problem,
            kernel_name(problem, config),
            source(problem, config),
            geometry(problem.pattern, config),
            device_index,
        )
        return ExpandedProduct(problem, config, repair)


def _is_small(p: Pattern, times: int) -> bool:
    """Whether matrices with this multiple of a weight's elements are worth timing."""
    return times <= _MOST_TIMES and times * p.nnz <= _MOST_ELEMENTS


def kernel_name(problem: Problem, config: Config) -> str:
    """The kernel's name, as profilers show it."""
    arithmetic = f"{config.by}_{problem.dtype}_{problem.layout}"
    return codegen.kernel_name("expanded_repair", arithmetic, problem.pattern)


def source(problem: Problem, config: Config) -> str:
    """The generated file of the kernel after the product."""
    p = problem.pattern
    flags = ", ".join(str(one).lower() for one in (config.by == "matrix", problem.batch_last))
    return (
        '#include "expanded_bmm.cuh"\n'
        f"using Support = Pattern<{p.a}, {p.b}, {p.c}, {p.d}>;\n"
        f'extern "C" __global__ void __launch_bounds__({_THREADS})\n'
        f"{kernel_name(problem, config)}(const Arguments arguments) {{\n"
        f"  expanded_repair_kernel<{ANY_TYPE[problem.dtype]}, Support, {flags}>(arguments);\n"
        "}\n"
    )


def geometry(p: Pattern, config: Config) -> Geometry:
    """The launch geometry of the kernel: one thread per row of a matrix."""
    of_row = p.a if config.by == "blocks" else 1
    return Geometry(
        threads=_THREADS,
        shared_bytes=0,
        rows_per_tile=_THREADS,
        tiles_per_row_tile=of_row,
        max_blocks=_ANY_BLOCKS,
        early=True,
    )


@dataclass(frozen=True)
class ExpandedProduct:
    """(x, weight, out=None) -> y.

    Attributes:
        problem: what is computed.
        config: the kind of matrices.
        repair: (x, weight, y) -> y, with the rows recomputed that the zeros have made NaN.
    """

    problem: Problem
    config: Config
    repair: Launcher

    @torch.no_grad()  # ksopt.ops has the gradients; bmm(out=) refuses operands that want them
    def __call__(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        baseline, p, last = self._baseline, self.problem.pattern, self.problem.batch_last
        matrices = pytorch_ops.prepared(baseline, weight, p, last)
        y = baseline.multiply(x, matrices, p, last, out)
        return self.repair(x, weight, y) if y.numel() > 0 else y

    def entry(self) -> Entry | None:
        """The entry that lets the host library do the same."""
        p, dtype = self.problem.pattern, self.problem.dtype
        form = weight_table.number_of(self._baseline.name, p.weight_shape, dtype)
        matrices = self.config.matrices(p)
        return torch_entry(matrices, self.problem.batch_last, form, repair=self.repair)

    @property
    def _baseline(self) -> pytorch_ops.Baseline:
        return BASELINES[_WAYS[self.config.by]]
