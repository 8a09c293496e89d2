"""Generation, loading and launching of the kernels of csrc/cuda/chain_wgmma16.cuh."""

from __future__ import annotations

import ctypes
from typing import Protocol

import torch
from torch import Tensor

from ksopt.epilogue import ACTIVATIONS, activation_of, parts_of_result
from ksopt.jit import arch, driver, nvrtc
from ksopt.kernels.families.base import HALF
from ksopt.kernels.families.common.chain_tile import Config, Epilogue, Shape, template_arguments
from ksopt.kernels.families.common.row_grid import grid_of
from ksopt.kernels.families.common.weight_packer import WeightPacker
from ksopt.kernels.launcher import Entry, chain_entry
from ksopt.kernels.problem import IN_FLOAT32, DeviceSpec

ROWS_OF_UNIT = 64
"""Rows of the units that blocks take; a cluster's unit has the rows of a tile instead."""
_ANY = 2**31


def kernel_name(s: Shape, dtype: str, epilogue: Epilogue) -> str:
    """The kernel's name, as profilers show it."""
    shape = "_".join(map(str, (*s.left.weight_shape[1:], *s.right.weight_shape[:3])))
    words = [f"x{s.siblings}"] if s.siblings > 1 else []
    words += [f"{epilogue.middle}_between"] if epilogue.middle != "none" else []
    words += [epilogue.activation] if epilogue.activation != "none" else []
    words += ["z"] if epilogue.keeps_z else []
    words += [IN_FLOAT32] if epilogue.in_float32 else []
    return "_".join(["ksopt_chain_wgmma16", dtype, shape, *words])


def source(s: Shape, tile: Config, epilogue: Epilogue, dtype: str) -> str:
    """The generated file: one instance of the template."""
    pattern, fields = template_arguments(s, tile)
    activations = (epilogue.middle, activation_of(epilogue.activation))
    extras = (  # in the order of csrc/cuda/common/epilogue.cuh
        *map(ACTIVATIONS.index, activations),
        *(int(epilogue.bias), int(epilogue.residual), int(epilogue.keeps_z)),
        int(epilogue.is_gated),
        *((0, 1) if epilogue.in_float32 else ()),  # the first of two layers has none
    )
    cluster = f"__cluster_dims__({tile.cluster}, 1, 1) " if tile.cluster > 1 else ""
    return (
        '#include "chain_wgmma16.cuh"\n'
        f"using Support = ChainPattern<{pattern}>;\n"
        f"using Tile = ChainTile<Support, {fields}>;\n"
        f"using After = ChainEpilogue<{', '.join(map(str, extras))}>;\n"
        f"static_assert(Tile::SHARED_BYTES == {tile.shared_bytes(s)} && "
        f"Tile::PACKED_BYTES == {2 * tile.packed_elements(s)}, "
        '"csrc and kernels/families/common/chain_tile.py disagree");\n'
        f'extern "C" __global__ void {cluster}__launch_bounds__(Tile::THREADS, Tile::BLOCKS)\n'
        f"{kernel_name(s, dtype, epilogue)}(const __grid_constant__ ChainArguments arguments) {{\n"
        f"  chain_wgmma16_kernel<{HALF[dtype]}, Support, Tile, After>(arguments);\n"
        "}\n"
    )


class Arguments(ctypes.Structure):
    """``ChainArguments`` of csrc/cuda/chain_wgmma16.cuh."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("x_stride", ctypes.c_int64),
        ("y_stride", ctypes.c_int64),
        ("residual_stride", ctypes.c_int64),
        ("rows_per_block", ctypes.c_int64),
        ("z", ctypes.c_void_p),
    ]


class Launched(Protocol):
    """The properties of a tile that a launch depends on."""

    @property
    def blocks(self) -> int:
        """Blocks that run on a multiprocessor at a time."""

    @property
    def threads(self) -> int:
        """Threads of a block."""

    @property
    def rows(self) -> int:
        """Rows of x that a block has at a time."""

    @property
    def cluster(self) -> int:
        """Blocks that share the work on their rows."""


def launch_of(tile: Launched, batch: int, multiprocessors: int) -> tuple[int, int]:
    """Blocks of a launch and rows of each; the blocks of a cluster have the same rows, once."""
    return grid_of(batch, *_grid_limits(tile, multiprocessors), tile.cluster)


def _grid_limits(tile: Launched, multiprocessors: int) -> tuple[int, int]:
    """Rows of a unit, and the most clusters of a launch: see `grid_of`."""
    if tile.cluster > 1:
        return tile.rows, _ANY
    return ROWS_OF_UNIT, multiprocessors * tile.blocks


class LoadedKernel:
    """A loaded kernel, launched on the grid of `launch_of` its tile."""

    out_features: int

    def __init__(
        self, tile: Launched, name: str, text: str, shared_bytes: int, device_index: int
    ) -> None:
        self.tile = tile
        code = nvrtc.cubin(text, arch.of_device(device_index)).data
        self._kernel = driver.load_kernel(code, name, shared_bytes, device_index)
        self._shared_bytes, self._device = shared_bytes, device_index
        self._multiprocessors = DeviceSpec.of_device(device_index).multiprocessors

    def launch(self) -> dict[str, int]:
        """The launch for the host library, for any number of rows."""
        tile = self.tile
        rows_per_unit, most_blocks = _grid_limits(tile, self._multiprocessors)
        return {
            "kernel": self._kernel,
            "out_features": self.out_features,
            "threads": tile.threads,
            "shared_bytes": self._shared_bytes,
            "rows_per_unit": rows_per_unit,
            "most_blocks": most_blocks,
            "cluster": tile.cluster,
        }

    def _start(self, arguments: Arguments) -> None:
        """Set ``rows_per_block`` and launch on the current stream."""
        rows = arguments.batch
        blocks, arguments.rows_per_block = launch_of(self.tile, rows, self._multiprocessors)
        driver.launch(
            *(self._kernel, blocks, self.tile.threads, self._shared_bytes),
            *(arguments, self._device),
            early=True,
        )


class ChainLauncher(LoadedKernel):
    """A loaded kernel: called with (x, packed weights), returns y on x's current stream."""

    def __init__(
        self, s: Shape, tile: Config, epilogue: Epilogue, dtype: str, device_index: int
    ) -> None:
        parts = parts_of_result(epilogue.activation, s.siblings)
        self.out_features = parts * s.left.out_features
        self.epilogue = epilogue
        name, text = kernel_name(s, dtype, epilogue), source(s, tile, epilogue, dtype)
        super().__init__(tile, name, text, tile.shared_bytes(s), device_index)

    def entry(self, form: int, packer: WeightPacker) -> Entry | None:
        """The entry that lets the host library launch it on weights of this form."""
        casts = self.epilogue.in_float32
        return chain_entry(False, casts, **self.launch(), **packer.launch(), form=form)

    def __call__(
        self,
        x: Tensor,
        packed: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        z: Tensor | None = None,
    ) -> Tensor:
        """y of (rows, siblings * out_features), or with a gate of (rows, out_features).

        Args:
            x: (rows, in_features); the elements of a row side by side, rows at multiples of 16
                bytes. So are bias, residual and out.
            packed: by `pack`.
            bias: (siblings * out_features,), where the epilogue has one.
            residual: as y, where the epilogue has one.
            out: where y is written; None allocates it.
            z: where the values between the factors are written, contiguous, if stored.
        """
        rows = x.shape[0]
        dtype = torch.float32 if self.epilogue.in_float32 else x.dtype
        y = x.new_empty(rows, self.out_features, dtype=dtype) if out is None else out
        if rows == 0:
            return y
        arguments = Arguments(
            x.data_ptr(),
            packed.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            0 if residual is None else residual.data_ptr(),
            y.data_ptr(),
            rows,
            x.stride(0),
            y.stride(0),
            0 if residual is None else residual.stride(0),
            0,
            0 if z is None else z.data_ptr(),
        )
        self._start(arguments)
        return y
