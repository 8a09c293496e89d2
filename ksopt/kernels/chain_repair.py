"""The kernel behind a product by one matrix of a chain, which holds zeros (chain_repair.cuh).

It computes the rows of y again that an input that is not finite spoilt.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

from ksopt.jit import arch, driver, nvrtc
from ksopt.kernels.families.base import ANY_TYPE
from ksopt.kernels.families.common import chain_launcher, weight_packer
from ksopt.kernels.problem import Problem

THREADS, ROWS = 256, 64
"""Threads of a block, and the rows that it looks at together; csrc/host/plan_table.hpp has both."""
_MOST_BLOCKS = 2**31 - 1


class Arguments(ctypes.Structure):
    """``ChainRepairArguments`` of csrc/cuda/common/chain_repair.cuh."""

    _fields_ = [("factors", weight_packer.Arguments), ("operands", chain_launcher.Arguments)]


def kernel_name(problem: Problem) -> str:
    """The kernel's name, as profilers show it."""
    shape = "_".join(str(size) for one in problem.chain for size in one.weight_shape)
    bias = "_bias" if problem.epilogue.bias else ""
    return f"ksopt_chain_repair_{problem.dtype}_{problem.layout}_{shape}{bias}"


def source(problem: Problem) -> str:
    """The generated file of a chain of two factors: one instance of the template."""
    left, right = (", ".join(map(str, one.weight_shape)) for one in problem.chain)
    flags = ", ".join(str(one).lower() for one in (problem.epilogue.bias, problem.batch_last))
    return (
        '#include "common/chain_repair.cuh"\n'
        f"using Left = Pattern<{left}>;\n"
        f"using Right = Pattern<{right}>;\n"
        f'static_assert(REPAIR_THREADS == {THREADS} && REPAIR_ROWS == {ROWS}, "csrc and '
        'kernels/chain_repair.py disagree");\n'
        f'extern "C" __global__ void __launch_bounds__({THREADS})\n'
        f"{kernel_name(problem)}(const __grid_constant__ ChainRepairArguments arguments) {{\n"
        f"  chain_repair_kernel<{ANY_TYPE[problem.dtype]}, Left, Right, {flags}>(arguments);\n"
        "}\n"
    )


def blocks_for(rows: int) -> int:
    """The blocks of a launch."""
    return min(-(-rows // ROWS), _MOST_BLOCKS)


class ChainRepair:
    """(x, weights, bias, y) -> y, with rows repaired in place.

    Args:
        problem: a chain of two factors; of its epilogue the bias counts, which y has already.
        device_index: where.

    Raises:
        UnavailableError, CompilationError: see :mod:`ksopt.jit`.
    """

    def __init__(self, problem: Problem, device_index: int) -> None:
        self.problem = problem
        code = nvrtc.cubin(source(problem), arch.of_device(device_index)).data
        self._kernel = driver.load_kernel(code, kernel_name(problem), 0, device_index)
        self._device = device_index

    def launch(self) -> int:
        """The driver's handle of the kernel, for the host library."""
        return self._kernel

    def __call__(
        self, x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, y: Tensor
    ) -> Tensor:
        """y, repaired.

        Args:
            x: contiguous, (*batch, N), or (N, *batch) when batch_last; y alike.
            weights: (a, b, c, d) of both factors, left to right; any strides.
            bias: contiguous, where the problem has one.
        """
        rows = y.numel() // self.problem.out_features
        if rows:
            operands = arguments_of(self.problem, x, weights, bias, y)
            launch = (self._kernel, blocks_for(rows), THREADS, 0, operands)
            driver.launch(*launch, self._device, early=True)
        return y


def arguments_of(
    problem: Problem, x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, y: Tensor
) -> Arguments:
    """The arguments of the kernel; operands as for `ChainRepair`."""
    rows = y.numel() // problem.out_features
    last = problem.batch_last
    operands = chain_launcher.Arguments(
        x=x.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
        y=y.data_ptr(),
        batch=rows,
        x_stride=rows if last else problem.chain.in_features,
        y_stride=rows if last else problem.out_features,
    )
    return Arguments(weight_packer.arguments_of(weights, 1, y), operands)
