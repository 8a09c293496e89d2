"""The kernel that packs the weights of chains (csrc/cuda/chain_pack.cuh): one launch for all."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ksopt.jit import arch, driver, nvrtc
from ksopt.kernels.families.chain_tile import MOST_SIBLINGS, Config, Shape, template_arguments

THREADS = 256


class Weights(ctypes.Structure):
    """``ChainWeights`` of csrc/cuda/chain_pack.cuh."""

    _fields_ = [
        ("left", ctypes.c_void_p),
        ("right", ctypes.c_void_p),
        ("left_strides", ctypes.c_int64 * 3),
        ("right_strides", ctypes.c_int64 * 3),
    ]


class Arguments(ctypes.Structure):
    """``ChainPackArguments`` of csrc/cuda/chain_pack.cuh."""

    _fields_ = [
        ("siblings", Weights * MOST_SIBLINGS),
        ("packed", ctypes.c_void_p),
        ("packed_of_grad", ctypes.c_void_p),
    ]


def kernel_name(s: Shape) -> str:
    """The kernel's name, as profilers show it."""
    sizes = (*s.left.weight_shape[1:], *s.right.weight_shape[:3])
    siblings = f"_x{s.siblings}" if s.siblings > 1 else ""
    return f"ksopt_chain_pack_{'_'.join(map(str, sizes))}{siblings}"


def source(s: Shape, tile: Config) -> str:
    """The generated file: one instance of the template, for all tiles of the same packing."""
    pattern, fields = template_arguments(s, tile.packing)
    return (
        '#include "chain_pack.cuh"\n'
        f"using Support = ChainPattern<{pattern}>;\n"
        f"using Tile = ChainTile<Support, {fields}>;\n"
        f"static_assert(Tile::PACKED_BYTES == {2 * tile.packed_elements(s)} && "
        f"PACK_THREADS == {THREADS}, "
        '"csrc and kernels/families/chain_tile.py disagree");\n'
        f'extern "C" __global__ void __launch_bounds__({THREADS})\n'
        f"{kernel_name(s)}(const __grid_constant__ ChainPackArguments arguments) {{\n"
        "  chain_pack_kernel<Support, Tile>(arguments);\n"
        "}\n"
    )


def blocks_for(elements: int) -> int:
    """Blocks of a launch that packs this many elements: a thread packs 8."""
    return -(-elements // (8 * THREADS))


def arguments_of(weights: Sequence[Tensor], packed: Tensor) -> Arguments:
    """The arguments of the kernel.

    Args:
        weights: left factor (1, b, c, d) and right factor (a, b, c, 1) of each sibling, in turns;
            16-bit elements, any strides.
        packed: where they go.
    """
    arguments = Arguments(packed=packed.data_ptr())
    for at, (left, right) in enumerate(zip(weights[0::2], weights[1::2], strict=True)):
        arguments.siblings[at] = Weights(
            *(left.data_ptr(), right.data_ptr()),
            (ctypes.c_int64 * 3)(*left.stride()[1:]),
            (ctypes.c_int64 * 3)(*right.stride()[:3]),
        )
    return arguments


class ChainPacker:
    """A loaded kernel: called with the weights of all siblings, returns them packed.

    It is right in a graph that is being captured: all that it takes is the memory of the result.
    """

    def __init__(self, s: Shape, tile: Config, device_index: int) -> None:
        self._load(kernel_name(s), source(s, tile), tile.packed_elements(s), device_index)

    def _load(self, name: str, text: str, elements: int, device_index: int) -> None:
        code = nvrtc.cubin(text, arch.of_device(device_index)).data
        self._kernel = driver.load_kernel(code, name, 0, device_index)
        self._blocks, self._elements = blocks_for(elements), elements
        self._device = device_index

    def __call__(self, weights: Sequence[Tensor]) -> Tensor:
        """The packed weights, as by `chain_packing.pack`; ``weights`` as for `arguments_of`."""
        weights = [weight.resolve_neg() for weight in weights]
        packed = torch.empty(self._elements, dtype=weights[0].dtype, device=weights[0].device)
        arguments = arguments_of(weights, packed)
        launch = (self._kernel, self._blocks, THREADS, 0, arguments, self._device)
        driver.launch(*launch, early=True)
        return packed
