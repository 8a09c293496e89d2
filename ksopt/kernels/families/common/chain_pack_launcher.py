"""The kernel that packs chains' weights (csrc/cuda/common/chain_pack.cuh): one launch for all."""

from __future__ import annotations

from ksopt.kernels.families.common.chain_tile import Config, Shape, template_arguments
from ksopt.kernels.families.common.weight_packer import Launch, WeightPacker

THREADS = 256


def kernel_name(s: Shape, are_layers: bool = False) -> str:
    """The kernel's name, as profilers show it."""
    sizes = (*s.left.weight_shape[1:], *s.right.weight_shape[:3])
    siblings = f"_x{s.siblings}" if s.siblings > 1 else ""
    layers = "_layers" if are_layers else ""
    return f"ksopt_chain_pack_{'_'.join(map(str, sizes))}{siblings}{layers}"


def source(s: Shape, tile: Config, are_layers: bool = False) -> str:
    """The generated file: one instance of the template, for all tiles of the same packing."""
    pattern, fields = template_arguments(s, tile.packing)
    return (
        '#include "common/chain_pack.cuh"\n'
        f"using Support = ChainPattern<{pattern}>;\n"
        f"using Tile = ChainTile<Support, {fields}>;\n"
        f"static_assert(Tile::PACKED_BYTES == {2 * tile.packed_elements(s)} && "
        f"PACK_THREADS == {THREADS}, "
        '"csrc and kernels/families/common/chain_tile.py disagree");\n'
        f'extern "C" __global__ void __launch_bounds__({THREADS})\n'
        f"{kernel_name(s, are_layers)}(const __grid_constant__ ChainPackArguments arguments) {{\n"
        f"  chain_pack_kernel<Support, Tile, {str(are_layers).lower()}>(arguments);\n"
        "}\n"
    )


def blocks_for(elements: int) -> int:
    """Blocks of a launch that packs this many elements: a thread packs 8."""
    return -(-elements // (8 * THREADS))


def chain_packer(
    s: Shape, tile: Config, device_index: int, are_layers: bool = False
) -> WeightPacker:
    """The loaded kernel; tests/chain_packing.py defines its result.

    Args:
        s: the chains.
        tile: any of the same packing.
        device_index: of the device.
        are_layers: whether each factor is a layer's: the weights are then the right factor's and
            the left one's.
    """
    elements = tile.packed_elements(s)
    launch = Launch(THREADS, blocks_for(elements), elements, 2 if are_layers else s.siblings)
    name, text = kernel_name(s, are_layers), source(s, tile, are_layers)
    return WeightPacker(name, text, launch, device_index)
