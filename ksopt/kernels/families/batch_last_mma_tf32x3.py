"""The fp32 tensor-core family for batch last (csrc/cuda/batch_last_mma_tf32x3.cuh)."""

from __future__ import annotations

from ksopt.kernels import codegen
from ksopt.kernels.families.base import SINGLE, register_family
from ksopt.kernels.families.common.batch_last import PackingLauncher
from ksopt.kernels.families.common.batch_last_mma import BatchLastMmaFamily, Config
from ksopt.kernels.problem import Problem

_STEPS_US = {True: 215.0, False: 430.0}  # of a multiprocessor, exact or not
_EXTRA = 3.0  # what a warp's loads and splits of operands cost, in steps


@register_family
class BatchLastMmaTf32x3(BatchLastMmaFamily):
    """Products by m16n8k8 TF32 instructions: three for fp32 accuracy, or one."""

    name = "batch_last_mma_tf32x3"
    template = "batch_last_mma_tf32x3.cuh"
    dtypes = SINGLE
    splits = True
    element_bytes = 4

    def rate(self, problem: Problem) -> tuple[float, float]:
        return _STEPS_US[problem.exact], _EXTRA

    def source(self, problem: Problem, config: Config, shifted: bool = False) -> str:
        p, products = problem.pattern, 3 if problem.exact else 1
        arguments = ", ".join(map(str, (*config.template, products, str(shifted).lower())))
        facts = {"Tile::SHARED_BYTES": config.shared_bytes(p)}
        instance = f"BatchLastMmaTf32x3Tile<Support, {arguments}>"
        tile = codegen.tile(self.template, p, instance, facts, "batch_last_mma")
        call = "batch_last_mma_tf32x3_kernel<Support, Tile>"
        return tile + codegen.kernel(self.kernel_name(problem), call)


def shifted_launcher(problem: Problem, device_index: int) -> PackingLauncher:
    """Compile and load the kernel that takes rows at any address; it packs the weight itself."""
    return PackingLauncher(BatchLastMmaTf32x3().default_shifted_launcher(problem, device_index))
