"""`gather_mma` for weights that do not change: packed once, in the order of the tensor cores."""

from __future__ import annotations

from collections.abc import Iterator

from ksopt.kernels import codegen
from ksopt.kernels.families.base import register_family
from ksopt.kernels.families.common.packed_weight import PackedFamily
from ksopt.kernels.families.gather_mma import Config, GatherMma
from ksopt.kernels.packing_launcher import geometry_of
from ksopt.kernels.problem import DeviceSpec, Geometry, Problem

# Packing pads small blocks to 8 outputs and 16 summands. A weight that becomes many times larger by
# that is not packed, unless it is small.
_MOST_TIMES, _FEW_ELEMENTS = 8, 2**21


@register_family
class GatherMmaPacked(GatherMma, PackedFamily[Config]):
    """The products of `GatherMma` by packed weights, which blocks copy at once or part by part."""

    name = "gather_mma_packed"
    packs_from_d = 1
    ways = ("packed", "streamed")

    def configs(self, problem: Problem, device: DeviceSpec) -> Iterator[Config]:
        p = problem.pattern
        for tile in super().configs(problem, device):
            packed = self.packed_elements(problem, tile)
            if packed <= _MOST_TIMES * p.nnz or packed <= _FEW_ELEMENTS:
                yield tile

    def packed_elements(self, problem: Problem, config: Config) -> int:
        p = problem.pattern
        return config.columns(p) * config.weight_bytes(p) // config.size

    def packed_form(self, problem: Problem, config: Config) -> str:
        columns = f"{config.groups} {config.jc} {config.outputs}"
        return f"gather_mma {self.arithmetic(problem)} {columns} {config.parts} {config.step}"

    def pack_geometry(self, problem: Problem, config: Config) -> Geometry:
        return geometry_of(self.packed_elements(problem, config))

    def pack_source(self, problem: Problem, config: Config) -> str:
        call = "gather_mma_pack_kernel<Support, Tile>"
        kernel = codegen.kernel(self.pack_name(problem), call, bounds="256")
        return self.tile(problem, config) + kernel
