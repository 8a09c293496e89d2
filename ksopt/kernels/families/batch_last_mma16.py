"""The 16-bit tensor-core family for batch last (csrc/cuda/batch_last_mma16.cuh)."""

from __future__ import annotations

from ksopt.kernels import codegen
from ksopt.kernels.families.base import HALF, register_family
from ksopt.kernels.families.common.batch_last_mma import BatchLastMmaFamily, Config
from ksopt.kernels.problem import Problem

_STEPS_US = 560.0  # m16n8k16 products of a multiprocessor in a microsecond
_EXTRA = 0.5  # and what a warp's loads of operands cost, in products


@register_family
class BatchLastMma16(BatchLastMmaFamily):
    """Products by m16n8k16 instructions, each block with its weights in shared memory."""

    name = "batch_last_mma16"
    template = "batch_last_mma16.cuh"
    dtypes = HALF
    element_bytes = 2

    def rate(self, problem: Problem) -> tuple[float, float]:
        return _STEPS_US, _EXTRA

    def source(self, problem: Problem, config: Config, shifted: bool = False) -> str:
        p = problem.pattern
        arguments = ", ".join(map(str, (*config.template, str(shifted).lower())))
        facts = {"Tile::SHARED_BYTES": config.shared_bytes(p)}
        call = f"batch_last_mma16_kernel<{self.dtypes[problem.dtype]}, Support, Tile>"
        instance = f"BatchLastMma16Tile<Support, {arguments}>"
        tile = codegen.tile(self.template, p, instance, facts, "batch_last_mma")
        return tile + codegen.kernel(self.kernel_name(problem), call)
