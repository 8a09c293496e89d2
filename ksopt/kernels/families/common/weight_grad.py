"""What the kernels of a factor's weight gradient have in common: launches, arguments, shares.

A block has a tile of the gradient, for a share of the rows. Where a tile has several shares, a
second kernel adds them in a fixed order: the result is the same at every call. The gradient of a
bias added to the product, the sum of dY's rows, is computed beside it on request.
"""

from __future__ import annotations

import abc
import ctypes
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ksopt.jit import arch, driver, nvrtc
from ksopt.kernels.codegen import kernel_name
from ksopt.kernels.families.base import ANY_TYPE, HALF
from ksopt.kernels.families.gradient_base import Gradient, GradientFamily, GradientProblem
from ksopt.kernels.problem import DeviceSpec
from ksopt.patterns.chain import Pattern

ROWS = 64
"""The rows of a share are a multiple of this: whole stages."""

ADDING_THREADS, ADDED_BY_BLOCK = 256, 128


class Tile(Protocol):
    """A block's tile of a gradient, as a kernel family has them."""

    @property
    def family(self) -> str:
        """The family's name."""

    @property
    def threads(self) -> int:
        """Threads of a block."""

    @property
    def blocks(self) -> int:
        """Blocks on a multiprocessor at a time."""

    def shared_bytes(self, p: Pattern) -> int:
        """Dynamic shared memory of a block."""

    def tiles(self, p: Pattern) -> int:
        """The number of tiles of the whole gradient."""

    def declaration(self, p: Pattern) -> str:
        """``Support`` and ``Tile`` in C++."""

    def predicted_us(self, p: Pattern, rows: int, shares: int, spec: DeviceSpec) -> float:
        """Predicted microseconds of a launch, and of the one that adds its shares."""


@dataclass(frozen=True)
class Launch:
    """A launch that computes a gradient.

    Attributes:
        tile: of a block.
        shares: of the rows; 1 for one block a tile.
        rows_per_share: a multiple of `ROWS`.
    """

    tile: Tile
    shares: int
    rows_per_share: int

    def predicted_us(self, p: Pattern, rows: int, spec: DeviceSpec) -> float:
        """Predicted microseconds."""
        return self.tile.predicted_us(p, rows, self.shares, spec)


def launches(tile: Tile, p: Pattern, rows: int, spec: DeviceSpec) -> Iterator[Launch]:
    """A tile's launches, for ever more shares: those that fill the device once, twice and so on."""
    stages = max(1, -(-rows // ROWS))
    at_a_time, tiles = spec.multiprocessors * tile.blocks, tile.tiles(p)
    known = set()
    for waves in range(1, max(1, tiles // at_a_time) + 4):
        most = max(1, waves * at_a_time // tiles)
        of_share = -(-stages // min(most, stages))
        if of_share not in known:
            known.add(of_share)
            yield Launch(tile, -(-stages // of_share), of_share * ROWS)


class WeightGradFamily(GradientFamily[Launch]):
    """A family of kernels of a factor's weight gradient: one template, and its tiles."""

    computes: ClassVar[Gradient] = "weight"

    @abc.abstractmethod
    def tiles(self, p: Pattern, spec: DeviceSpec) -> Iterable[Any]:
        """The tiles, dataclasses of type `Tile`, of a supported pattern."""

    @abc.abstractmethod
    def unsupported_pattern(self, p: Pattern, dtype: str, spec: DeviceSpec) -> str | None:
        """Why no kernel computes a pattern's weight gradient; None if one does."""

    def unsupported_reason(self, problem: GradientProblem, device: DeviceSpec) -> str | None:
        (p,) = problem.factors
        return self.unsupported_pattern(p, problem.dtype, device)

    def launches(self, problem: GradientProblem, rows: int, device: DeviceSpec) -> Iterator[Launch]:
        (p,) = problem.factors
        for tile in self.tiles(p, device):
            yield from launches(tile, p, rows, device)

    def predicted_us(
        self, problem: GradientProblem, launch: Launch, rows: int, device: DeviceSpec
    ) -> float:
        (p,) = problem.factors
        return launch.predicted_us(p, rows, device)

    def tile(self, launch: Launch) -> Tile:
        return launch.tile

    def launcher(
        self, problem: GradientProblem, launch: Launch, device_index: int
    ) -> WeightGradient:
        (p,) = problem.factors
        return WeightGradient(p, problem.dtype, launch, device_index, problem.with_bias)


def source(p: Pattern, tile: Tile, dtype: str, with_bias: bool = False) -> str:
    """The generated file: the kernel of the gradient, and of the bias's if ``with_bias``."""
    return (
        f'#include "{tile.family}.cuh"\n'
        f"{tile.declaration(p)}"
        f"static_assert(Tile::SHARED_BYTES == {tile.shared_bytes(p)} && "
        f"Tile::TILES == {tile.tiles(p)}, "
        f'"csrc and kernels/families/{tile.family}.py disagree");\n'
        'extern "C" __global__ void __launch_bounds__(Tile::THREADS, Tile::BLOCKS)\n'
        f"{_name(p, tile, dtype, with_bias)}(const __grid_constant__ WeightGradArguments "
        "arguments) {\n"
        f"  {tile.family}_kernel<{ANY_TYPE[dtype]}, Support, Tile, {int(with_bias)}>(arguments);\n"
        "}\n"
    )


def adding_source(dtype: str) -> str:
    """The generated file of the kernel that adds shares, of 16 bits."""
    return (
        '#include "common/weight_grad_shares.cuh"\n'
        f'extern "C" __global__ void __launch_bounds__({ADDING_THREADS})\n'
        f"{_adding_name(dtype)}(const __grid_constant__ SharesArguments arguments) {{\n"
        f"  add_shares_kernel<{HALF[dtype]}>(arguments, blockIdx.x);\n"
        "}\n"
    )


def _name(p: Pattern, tile: Tile, dtype: str, with_bias: bool) -> str:
    return kernel_name(tile.family, dtype, p) + ("_bias" if with_bias else "")


def _adding_name(dtype: str) -> str:
    return f"ksopt_add_shares_{dtype}"


class Arguments(ctypes.Structure):
    """``WeightGradArguments`` of csrc/cuda/common/weight_grad_shares.cuh."""

    _fields_ = [
        ("grad", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("to", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("grad_stride", ctypes.c_int64),
        ("x_stride", ctypes.c_int64),
        ("rows_per_share", ctypes.c_int64),
        ("shares", ctypes.c_int64),
    ]


class SharesArguments(ctypes.Structure):
    """``SharesArguments`` of csrc/cuda/common/weight_grad_shares.cuh."""

    _fields_ = [
        ("shares", ctypes.c_void_p),
        ("to", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("elements", ctypes.c_int64),
        ("own", ctypes.c_int64),
    ]


def arguments_of(
    grad: Tensor, x: Tensor, to: Tensor, launch: Launch, bias: Tensor | None = None
) -> Arguments:
    """The arguments of the kernel; grad and x are rows of features, of any stride."""
    return Arguments(
        *(grad.data_ptr(), x.data_ptr(), to.data_ptr(), 0 if bias is None else bias.data_ptr()),
        *(x.shape[0], grad.stride(0), x.stride(0), launch.rows_per_share, launch.shares),
    )


def adding_arguments(
    shares: Tensor, to: Tensor, launch: Launch, bias: Tensor | None = None
) -> SharesArguments:
    """The arguments of the kernel that adds shares; a bias follows the weight."""
    elements = to.numel() + (0 if bias is None else bias.numel())
    return SharesArguments(
        *(shares.data_ptr(), to.data_ptr(), 0 if bias is None else bias.data_ptr()),
        *(launch.shares, elements, to.numel()),
    )


def adding_blocks(elements: int) -> int:
    """Blocks of the kernel that adds shares."""
    return -(-elements // ADDED_BY_BLOCK)


class WeightGradient:
    """Loaded kernels of one pattern, for one number of rows: called with (grad, x).

    They are right in a graph that is being captured: all that they take is memory.

    Raises:
        CompilationError, UnavailableError: see :mod:`ksopt.jit`.
    """

    def __init__(
        self, p: Pattern, dtype: str, launch: Launch, device_index: int, with_bias: bool = False
    ) -> None:
        self.pattern, self.launch, self._device = p, launch, device_index
        self._with_bias = with_bias
        target = arch.of_device(device_index)
        code = nvrtc.cubin(source(p, launch.tile, dtype, with_bias), target).data
        self._kernel = driver.load_kernel(
            code, _name(p, launch.tile, dtype, with_bias), launch.tile.shared_bytes(p), device_index
        )
        self._shared = launch.tile.shared_bytes(p)
        self._blocks = launch.tile.tiles(p) * launch.shares
        self._elements = p.nnz + (p.out_features if with_bias else 0)
        self._adding = 0
        if launch.shares > 1:
            code = nvrtc.cubin(adding_source(dtype), target).data
            self._adding = driver.load_kernel(code, _adding_name(dtype), 0, device_index)

    def entry(self, rows: int) -> tuple[int, ...]:
        """As for `EnterableGradient`, on the rows that it was made for."""
        launch, tile = self.launch, self.launch.tile
        return (
            *(self._kernel, self._adding, tile.threads, self._shared, ADDING_THREADS),
            *(self._blocks, launch.shares, launch.rows_per_share, adding_blocks(self._elements)),
        )

    def __call__(self, grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """dK [a, b, c, d] of grad [rows, a*b*d] and x [rows, a*c*d]; rows begin at 16 bytes.

        Behind it the sum of grad's rows, of a kernel ``with_bias``.
        """
        launch = self.launch
        result, bias = x.new_empty(self.pattern.weight_shape), None
        if self._with_bias:
            bias = x.new_empty(self.pattern.out_features)
        to = result
        if launch.shares > 1:
            to = x.new_empty((launch.shares, self._elements), dtype=torch.float32)
        arguments = arguments_of(grad, x, to, launch, bias)
        tile = launch.tile
        driver.launch(
            self._kernel, self._blocks, tile.threads, self._shared, arguments, self._device
        )
        if launch.shares > 1:
            adding = adding_arguments(to, result, launch, bias)
            blocks = adding_blocks(self._elements)
            driver.launch(self._adding, blocks, ADDING_THREADS, 0, adding, self._device)
        return result, bias
