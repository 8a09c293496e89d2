"""The weight gradient of a 16-bit factor on Hopper (csrc/cuda/weight_grad_wgmma16.cuh): kernels.

dY's features are multiplied by X's, all of one i by all of it: d times the sums that are
needed, and no operand is copied into another order. The rows are split into shares, whose sums a
second kernel adds in a fixed order: the result is the same at every call. The gradient of a bias
added to the product, the sum of dY's rows, is computed beside it on request.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ksopt.jit import arch, driver, nvrtc
from ksopt.kernels.codegen import kernel_name
from ksopt.kernels.families.base import HALF
from ksopt.kernels.families.cost_terms import overlapped
from ksopt.kernels.problem import RESERVED_SHARED, DeviceSpec
from ksopt.patterns.chain import Pattern

ROWS = 64
"""The rows of a share are a multiple of this: whole stages."""
MOST_D = 8
"""The largest d: more would multiply too much in vain."""

_SHARED = 233_472  # of a multiprocessor
ADDING_THREADS, ADDED_BY_BLOCK = 256, 128
# Fitted to 47 launches on an H200, within 4 % (docs/development/training.md): TFLOP/s of tiles,
# TB/s of memory, of the L2 cache and of shares, and how well the first three overlap.
TFLOPS, MEMORY, L2, SHARES, OVERLAP = 652.0, 3.47, 6.84, 2.76, 10.6
L2_FILLED = 0.83  # power of the share of the blocks that run
LAUNCH_US, ADDING_US = 3.5, 7.7


@dataclass(frozen=True)
class Config:
    """A block's tile.

    Attributes:
        groups: warpgroups, with 64 features of dY each.
        panels: of 64 features of X.
    """

    groups: int
    panels: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * self.groups

    @property
    def rows(self) -> int:
        """Rows of a stage: fewer of wide tiles, so that several stages are in flight."""
        return 64 if self.groups + self.panels <= 4 else 32

    @property
    def blocks(self) -> int:
        """Blocks on a multiprocessor at a time: two where stages and sums are small."""
        return 2 if self.groups + self.panels <= 3 else 1

    @property
    def stages(self) -> int:
        """The number of stages: as many as fit."""
        return min(8, (_SHARED // self.blocks - RESERVED_SHARED) // self._stage_bytes)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self.stages * self._stage_bytes

    @property
    def _stage_bytes(self) -> int:
        return (self.groups + self.panels) * self.rows * 128

    def tiles(self, p: Pattern) -> int:
        """The number of tiles of the whole gradient."""
        return p.a * -(-p.b * p.d // (64 * self.groups)) * -(-p.c * p.d // (64 * self.panels))


@dataclass(frozen=True)
class Launch:
    """A launch that computes a gradient.

    Attributes:
        tile: of a block.
        shares: of the rows; 1 for one block a tile.
        rows_per_share: a multiple of `ROWS`.
    """

    tile: Config
    shares: int
    rows_per_share: int


def unsupported(p: Pattern, dtype: str, spec: DeviceSpec) -> str | None:
    """Why no kernel computes a pattern's weight gradient; None if one does."""
    if spec.capability != (9, 0):
        return "needs a GPU of compute capability 9.0"
    if dtype not in HALF:
        return f"{dtype} is not one of {', '.join(HALF)}"
    if p.d > MOST_D:
        return f"d = {p.d} is more than {MOST_D}"
    if p.b * p.d % 8 or p.c * p.d % 8:
        return "b*d or c*d is not a multiple of 8, the elements of 16 bytes"
    return None


def configs() -> Iterator[Config]:
    """The tiles whose sums fit into registers."""
    for groups, most in ((1, 4), (2, 4), (3, 3), (4, 2)):
        for panels in range(1, most + 1):
            yield Config(groups, panels)


def best(p: Pattern, rows: int, spec: DeviceSpec) -> Launch:
    """The launch with the least predicted time."""
    launches = [launch_of(tile, p, rows, spec) for tile in configs()]
    return min(launches, key=lambda launch: predicted_us(launch, p, rows, spec))


def launch_of(tile: Config, p: Pattern, rows: int, spec: DeviceSpec) -> Launch:
    """A tile's launch: one wave of blocks, or a block for each tile."""
    stages = max(1, -(-rows // ROWS))
    most_shares = max(1, spec.multiprocessors * tile.blocks // tile.tiles(p))
    of_share = -(-stages // min(most_shares, stages))
    return Launch(tile, -(-stages // of_share), of_share * ROWS)


def predicted_us(launch: Launch, p: Pattern, rows: int, spec: DeviceSpec) -> float:
    """Predicted microseconds: the slowest of products, memory and L2 cache, then the shares."""
    tile = launch.tile
    m, n = 64 * tile.groups, 64 * tile.panels
    tiles = tile.tiles(p)
    at_a_time = spec.multiprocessors * tile.blocks
    blocks = tiles * launch.shares
    waves = -(-blocks // at_a_time)
    filled = blocks / (waves * at_a_time)
    products = 2 * rows * tiles * m * n / (TFLOPS * 1e6 * filled)
    features = p.a * (p.b + p.c) * p.d
    memory = 2 * rows * features / (MEMORY * 1e6)
    l2 = 2 * rows * tiles * (m + n) / (L2 * 1e6 * filled**L2_FILLED)
    total = LAUNCH_US + overlapped((products, memory, l2), OVERLAP)
    if launch.shares > 1:
        total += ADDING_US + 8 * p.nnz * launch.shares / (SHARES * 1e6)
    return total


def source(p: Pattern, tile: Config, dtype: str, with_bias: bool = False) -> str:
    """The generated file: the kernel of the gradient, and of the bias's if ``with_bias``."""
    return (
        '#include "weight_grad_wgmma16.cuh"\n'
        f"using Support = Pattern<{p.a}, {p.b}, {p.c}, {p.d}>;\n"
        f"using Tile = WeightGradTile<Support, {tile.groups}, {tile.panels}, {tile.rows}, "
        f"{tile.stages}, {tile.blocks}>;\n"
        f"static_assert(Tile::SHARED_BYTES == {tile.shared_bytes} && "
        f"Tile::TILES == {tile.tiles(p)}, "
        '"csrc and kernels/families/weight_grad_wgmma16.py disagree");\n'
        'extern "C" __global__ void __launch_bounds__(Tile::THREADS, Tile::BLOCKS)\n'
        f"{_name(p, dtype, with_bias)}(const __grid_constant__ WeightGradArguments arguments) {{\n"
        f"  weight_grad_wgmma16_kernel<{HALF[dtype]}, Support, Tile, {int(with_bias)}>"
        "(arguments);\n"
        "}\n"
    )


def adding_source(dtype: str) -> str:
    """The generated file of the kernel that adds shares."""
    return (
        '#include "weight_grad_wgmma16.cuh"\n'
        f'extern "C" __global__ void __launch_bounds__({ADDING_THREADS})\n'
        f"{_adding_name(dtype)}(const __grid_constant__ SharesArguments arguments) {{\n"
        f"  add_shares_kernel<{HALF[dtype]}>(arguments, blockIdx.x);\n"
        "}\n"
    )


def _name(p: Pattern, dtype: str, with_bias: bool) -> str:
    return kernel_name("weight_grad_wgmma16", dtype, p) + ("_bias" if with_bias else "")


def _adding_name(dtype: str) -> str:
    return f"ksopt_add_shares_{dtype}"


class Arguments(ctypes.Structure):
    """``WeightGradArguments`` of csrc/cuda/weight_grad_wgmma16.cuh."""

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
    """``SharesArguments`` of csrc/cuda/weight_grad_wgmma16.cuh."""

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
            code, _name(p, dtype, with_bias), launch.tile.shared_bytes, device_index
        )
        self._blocks = launch.tile.tiles(p) * launch.shares
        self._elements = p.nnz + (p.out_features if with_bias else 0)
        code = nvrtc.cubin(adding_source(dtype), target).data
        self._adding = driver.load_kernel(code, _adding_name(dtype), 0, device_index)

    @property
    def entry(self) -> tuple[int, ...]:
        """The launch for the host library, as ``know_weight_grad`` of csrc/host takes it."""
        launch, tile = self.launch, self.launch.tile
        return (
            *(self._kernel, self._adding, tile.threads, tile.shared_bytes, ADDING_THREADS),
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
            self._kernel, self._blocks, tile.threads, tile.shared_bytes, arguments, self._device
        )
        if launch.shares > 1:
            adding = adding_arguments(to, result, launch, bias)
            blocks = adding_blocks(self._elements)
            driver.launch(self._adding, blocks, ADDING_THREADS, 0, adding, self._device)
        return result, bias
