"""The kernel that packs trained chains' weights (csrc/cuda/common/trained_pack.cuh).

One launch packs them for the forward pass and for the gradient of the chains' input.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ksopt.kernels.families.common import chain_pack_launcher, input_grad_tile
from ksopt.kernels.families.common.chain_pack_launcher import THREADS, blocks_for
from ksopt.kernels.families.common.chain_tile import Config, Shape, template_arguments
from ksopt.kernels.families.common.weight_packer import Launch, WeightPacker


def source(s: Shape, tile: Config, of_grad: input_grad_tile.Config) -> str:
    """The generated file: one instance of the template."""
    grad_shape = input_grad_tile.Shape(s.left, s.right, s.siblings)
    pattern, fields = template_arguments(s, tile.packing)
    grad_pattern, grad_fields = input_grad_tile.template_arguments(grad_shape, of_grad.packing)
    return (
        '#include "common/trained_pack.cuh"\n'
        f"using Support = ChainPattern<{pattern}>;\n"
        f"using Tile = ChainTile<Support, {fields}>;\n"
        f"using GradSupport = InputGradPattern<{grad_pattern}>;\n"
        f"using GradTile = InputGradTile<GradSupport, {grad_fields}>;\n"
        f"static_assert(Tile::PACKED_BYTES == {2 * tile.packed_elements(s)} && "
        f"GradTile::PACKED_BYTES == {2 * of_grad.packed_elements(grad_shape)} && "
        f"PACK_THREADS == {THREADS}, "
        '"csrc and kernels/families disagree");\n'
        f'extern "C" __global__ void __launch_bounds__({THREADS})\n'
        f"{kernel_name(s)}(const __grid_constant__ ChainPackArguments arguments) {{\n"
        "  trained_pack_kernel<Support, Tile, GradSupport, GradTile>(arguments);\n"
        "}\n"
    )


def kernel_name(s: Shape) -> str:
    """The kernel's name, as profilers show it."""
    return chain_pack_launcher.kernel_name(s).replace("chain_pack", "trained_pack")


class TrainedPacker:
    """A loaded kernel: called with all weights, returns them packed, for both passes.

    Args:
        s: the chains.
        tile: of the forward pass.
        of_grad: the tile of the gradient of the chains' input; None: they are not packed for it.
        device_index: where.
    """

    def __init__(
        self, s: Shape, tile: Config, of_grad: input_grad_tile.Config | None, device_index: int
    ) -> None:
        self._elements, self._of_grad = tile.packed_elements(s), 0
        name, text = chain_pack_launcher.kernel_name(s), chain_pack_launcher.source(s, tile)
        if of_grad is not None:
            grad_shape = input_grad_tile.Shape(s.left, s.right, s.siblings)
            self._of_grad = of_grad.packed_elements(grad_shape)
            name, text = kernel_name(s), source(s, tile, of_grad)
        blocks = blocks_for(self._elements + self._of_grad)
        launch = Launch(THREADS, blocks, self._elements, s.siblings)
        self._packer = WeightPacker(name, text, launch, device_index)

    def launch(self) -> dict[str, int]:
        """The launch for the host library."""
        return self._packer.launch()

    def __call__(self, weights: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The weights for the forward pass, and for the gradient of the input, or nothing, [0]."""
        packed, of_grad = (weights[0].new_empty(n) for n in (self._elements, self._of_grad))
        self._packer.pack(weights, packed, of_grad)
        return packed, of_grad
