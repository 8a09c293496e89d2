"""Kernels of csrc/cuda/chain_mlp_wgmma16.cuh and chain_mlp_pack.cuh: generated and launched."""

from __future__ import annotations

import ctypes

from torch import Tensor

from ksopt.epilogue import ACTIVATIONS
from ksopt.kernels.families.base import HALF
from ksopt.kernels.families.common import chain_launcher, chain_pack_launcher, chain_tile
from ksopt.kernels.families.common.chain_mlp_tile import Config
from ksopt.kernels.families.common.chain_tile import Epilogue, Shape
from ksopt.kernels.families.common.weight_packer import Launch, WeightPacker
from ksopt.kernels.launcher import Entry, chain_entry


class Arguments(chain_launcher.Arguments):
    """``MlpArguments`` of csrc/cuda/common/chain_mlp_tile.cuh."""

    _fields_ = [("hidden_bias", ctypes.c_void_p)]  # noqa: RUF012 (as ctypes wants it)


def kernel_name(first: Shape, second: Shape, dtype: str) -> str:
    """The kernel's name, as profilers show it."""
    return f"ksopt_chain_mlp_wgmma16_{dtype}_{_sizes(first, second)}"


def source(first: Shape, second: Shape, tile: Config, epilogue: Epilogue, dtype: str) -> str:
    """The generated file. The epilogue's ``middle`` is the activation between the chains."""
    extras = (
        *(ACTIVATIONS.index(epilogue.middle), ACTIVATIONS.index(epilogue.activation)),
        *(int(epilogue.bias), int(epilogue.residual)),
    )
    lines = [
        '#include "chain_mlp_wgmma16.cuh"',
        *_types(first, second, tile),
        f"using After = ChainEpilogue<{', '.join(map(str, extras))}>;",
        f"static_assert(Tile::SHARED_BYTES == {tile.shared_bytes((first, second))}, "
        '"csrc and kernels/families/common/chain_mlp_tile.py disagree");',
        'extern "C" __global__ void __launch_bounds__(Tile::THREADS, Tile::BLOCKS)',
        f"{kernel_name(first, second, dtype)}(const __grid_constant__ MlpArguments arguments) {{",
        f"  chain_mlp_wgmma16_kernel<{HALF[dtype]}, Chain1, Chain2, Tile, After>(arguments);",
        "}",
    ]
    return "\n".join(lines) + "\n"


def pack_name(first: Shape, second: Shape) -> str:
    """The packing kernel's name, as profilers show it."""
    return f"ksopt_chain_mlp_pack_{_sizes(first, second)}"


def pack_source(first: Shape, second: Shape, tile: Config) -> str:
    """The generated file of the packing kernel, for all tiles of the same packing."""
    lines = [
        '#include "common/chain_mlp_pack.cuh"',
        *_types(first, second, tile.packing),
        f'extern "C" __global__ void __launch_bounds__({chain_pack_launcher.THREADS})',
        f"{pack_name(first, second)}(const __grid_constant__ ChainPackArguments arguments) {{",
        "  chain_mlp_pack_kernel<Chain1, Chain2, Tile>(arguments);",
        "}",
    ]
    return "\n".join(lines) + "\n"


def _sizes(first: Shape, second: Shape) -> str:
    factors = (first.left, first.right, second.left, second.right)
    return "_".join(str(n) for factor in factors for n in factor.weight_shape)


def _types(first: Shape, second: Shape, tile: Config) -> list[str]:
    """The template's arguments, and an assertion that both sides agree on the packed weights."""
    lines = []
    for at, (s, of_chain) in enumerate(((first, tile.first), (second, tile.second)), 1):
        pattern, fields = chain_tile.template_arguments(s, of_chain)
        lines.append(f"using Chain{at} = ChainPattern<{pattern}>;")
        lines.append(f"using Tile{at} = ChainTile<Chain{at}, {fields}>;")
    return [
        *lines,
        f"using Tile = MlpTile<Chain1, Chain2, Tile1, Tile2, {tile.slot_steps}, {tile.stages}>;",
        f"static_assert(Tile::PACKED_BYTES == {2 * tile.packed_elements(first, second)}, "
        '"csrc and kernels/families/common/chain_mlp_tile.py disagree");',
    ]


def mlp_packer(first: Shape, second: Shape, tile: Config, device_index: int) -> WeightPacker:
    """A loaded kernel: called with the weights of both chains, returns them packed."""
    elements = tile.packed_elements(first, second)
    blocks = chain_pack_launcher.blocks_for(elements)
    launch = Launch(chain_pack_launcher.THREADS, blocks, elements, siblings=2)
    text = pack_source(first, second, tile)
    return WeightPacker(pack_name(first, second), text, launch, device_index)


class MlpLauncher(chain_launcher.LoadedKernel):
    """A loaded kernel: called with (x, packed weights, ...), returns y on x's current stream."""

    def __init__(
        self, first: Shape, second: Shape, tile: Config, epilogue: Epilogue, dtype: str, index: int
    ) -> None:
        self.out_features = second.left.out_features
        super().__init__(
            tile,
            kernel_name(first, second, dtype),
            source(first, second, tile, epilogue, dtype),
            tile.shared_bytes((first, second)),
            index,
        )

    def entry(self, form: int, packer: WeightPacker) -> Entry | None:
        """The entry that lets the host library launch it on weights of this form."""
        return chain_entry(**self.launch(), **packer.launch(), form=form)

    def __call__(
        self,
        x: Tensor,
        packed: Tensor,
        hidden_bias: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        y: Tensor,
    ) -> Tensor:
        """y of (rows, out_features).

        Args:
            x: (rows, in_features); the elements of a row side by side, rows at multiples of 16
                bytes. So are the biases, residual and y.
            packed: by `mlp_packer`.
            hidden_bias: of the first chain's outputs, where the epilogue has biases.
            bias: of the second one's, where the epilogue has biases.
            residual: as y, where the epilogue has one.
            y: where the result goes.
        """
        if x.shape[0] == 0:
            return y
        arguments = Arguments(
            *(x.data_ptr(), packed.data_ptr()),
            0 if bias is None else bias.data_ptr(),
            0 if residual is None else residual.data_ptr(),
            y.data_ptr(),
            *(x.shape[0], x.stride(0), y.stride(0)),
            0 if residual is None else residual.stride(0),
            hidden_bias=0 if hidden_bias is None else hidden_bias.data_ptr(),
        )
        self._start(arguments)
        return y
