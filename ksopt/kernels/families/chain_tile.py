"""Tiles of csrc/cuda/chain_wgmma16.cuh: their costs, how weights are packed, how they are launched.

`chain_wgmma16` is the family.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ksopt.epilogue import ACTIVATIONS, Activation
from ksopt.jit import arch, driver, nvrtc
from ksopt.kernels import problem
from ksopt.kernels.families.base import HALF
from ksopt.kernels.families.cost_terms import overlapped
from ksopt.kernels.launcher import Entry, chain_entry
from ksopt.kernels.problem import SHARED_LIMIT, DeviceSpec
from ksopt.patterns.chain import Chain, Pattern

MOST_SIBLINGS = 4
_BARRIER_BYTES = 128
_MOST_SHARED_BIAS = 1536  # features
_LOADER_REGISTERS = 40
_OTHER_REGISTERS = 44  # of a thread that multiplies, beside sums and operands

# The cost model's constants, of one multiprocessor: fitted to 144 tiles of 24 chains (bf16, 25,088
# rows, one H200; docs/performance/chains.md).
_READ_BYTES_US = 24_000.0
_WRITTEN_BYTES_US = 37_800.0
_SHARED_BYTES_US = 138_000.0
_LATENCY_US = 0.99  # in which what a block's ring holds arrives
_BETWEEN_US = 0.086  # from a group of a warpgroup's products to its next
_ACTIVATION_US = 1.43e-4  # of an output
_LAUNCH_US = 5.8
_OVERLAP = 1.97


@dataclass(frozen=True)
class Epilogue(problem.Epilogue):
    """What is done beside the products.

    Attributes:
        middle: activation of what the right factor gives, before the left one; of two chains, of
            what the first one gives.
    """

    middle: Activation = "none"


@dataclass(frozen=True)
class Shape:
    """Chains (1,b1,c1,d1)*(a2,b2,c2,1) of the same patterns on one x.

    Attributes:
        left, right: the chain's patterns; x meets ``right`` first.
        siblings: how many chains.
    """

    left: Pattern
    right: Pattern
    siblings: int = 1

    @classmethod
    def of(cls, chain: Chain, siblings: int = 1) -> Shape:
        """The shape of a chain of two factors."""
        left, right = chain
        return cls(left, right, siblings)

    @property
    def l_of_block(self) -> int:
        """Values of z of one class that a block of the right factor gives."""
        return self.right.b // self.left.d

    @property
    def tiles_of_block(self) -> int:
        """The same in tiles of 8, the last one filled up."""
        return -(-self.l_of_block // 8)

    @property
    def classes(self) -> int:
        """Classes j of all siblings."""
        return self.siblings * self.left.d

    @property
    def steps(self) -> int:
        """Steps of 16 values of z in a class."""
        return -(-self.right.a * self.tiles_of_block // 2)

    def flops(self, batch: int) -> int:
        """Of the products, as they are: what is filled up does not count."""
        return 2 * batch * self.siblings * (self.left.nnz + self.right.nnz)

    def bytes(self, batch: int) -> int:
        """Of x, the weights and y, each moved once."""
        features = self.right.in_features + self.siblings * self.left.out_features
        return 2 * (batch * features + self.siblings * (self.left.nnz + self.right.nnz))

    def __str__(self) -> str:
        times = "" if self.siblings == 1 else f"{self.siblings} x "
        return f"{times}{self.left}*{self.right}"


@dataclass(frozen=True)
class Config:
    """Template arguments of ``ChainTile``, in its order."""

    groups: int
    blocks: int
    nk: int
    ks: int
    splits: int
    slot_j: int
    slot_p: int
    stages: int

    @property
    def rows(self) -> int:
        """Rows of x that a block has at a time."""
        return 64 * self.groups

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * (self.groups + 1)

    @property
    def registers(self) -> int:
        """Registers of a thread that multiplies."""
        at_start = 65536 // (self.threads * self.blocks) // 8 * 8
        taken = (at_start * (self.groups + 1) - _LOADER_REGISTERS) // self.groups // 8 * 8
        return min(taken, 240)

    def columns(self, s: Shape) -> int:
        """Columns of z that a warpgroup computes at a time."""
        return s.classes * (s.tiles_of_block // self.splits) * 8

    def first_slot_bytes(self, s: Shape) -> int:
        """Rows of x, and the weights of the right factor for them."""
        return (self.rows + self.columns(s)) * self.ks * 2

    @property
    def second_slot_bytes(self) -> int:
        """Weights of the left factor."""
        return self.slot_j * self.slot_p * self.nk * 32

    def stash_bytes(self, s: Shape) -> int:
        """z of a block's rows."""
        return self.groups * s.classes * s.steps * 2048

    def ring_slots(self, s: Shape) -> tuple[int, int]:
        """Slots that pass through the ring for each of the two factors."""
        parts = -(-s.right.c // self.ks)
        j = min(s.left.d, 8)
        chunks = -(-s.left.b // self.nk) * (s.left.d // j)
        second = s.siblings * chunks * (j // self.slot_j) * (s.steps // self.slot_p)
        return s.right.a * self.splits * parts, second

    def packed_elements(self, s: Shape) -> int:
        """Elements of the packed weights of all siblings."""
        first, second = self.ring_slots(s)
        return first * self.columns(s) * self.ks + second * self.second_slot_bytes // 2

    def shared_bytes(self, s: Shape) -> int:
        """Dynamic shared memory of a block."""
        slot = max(self.first_slot_bytes(s), self.second_slot_bytes)
        return self.fixed_bytes(s) + self.stages * slot

    def fixed_bytes(self, s: Shape) -> int:
        """Shared memory beside the ring: barriers, the bias, z."""
        features = s.siblings * s.left.out_features
        bias = -(-features * 2 // 128) * 128 if features <= _MOST_SHARED_BIAS else 0
        return _BARRIER_BYTES + bias + self.stash_bytes(s)


def unsupported_reason(s: Shape, dtype: str, device: DeviceSpec) -> str | None:
    """Why no kernel of this family computes the chains on ``device``, or None if one does."""
    left, right = s.left, s.right
    if device.capability != (9, 0):
        return "it needs compute capability 9.0"
    if dtype not in HALF:
        return f"{dtype} is not one of {', '.join(HALF)}"
    if left.a != 1 or right.d != 1:
        return f"{left}*{right} is not of the form (1,b,c,d)*(a,b,c,1)"
    if left.in_features != right.out_features:
        return f"{left} takes {left.in_features} features and {right} gives {right.out_features}"
    if not 1 <= s.siblings <= MOST_SIBLINGS:
        return f"{s.siblings} siblings are not 1 to {MOST_SIBLINGS}"
    if left.d not in (1, 2, 4) and left.d % 8 != 0:
        return f"d = {left.d} of the left factor is not 1, 2, 4 or a multiple of 8"
    if right.b % left.d != 0:
        return f"b = {right.b} of the right factor is not a multiple of the left one's d = {left.d}"
    if right.c % 8 != 0 or left.out_features % 8 != 0:
        return "rows of x's blocks and of y are not whole runs of 16 bytes"
    if next(configs(s, device), None) is None:
        return "no tile fits in shared memory and registers"
    return None


def configs(s: Shape, device: DeviceSpec, residual: bool = False) -> Iterator[Config]:
    """All tiles worth considering, without order.

    Args:
        s: chains that are supported.
        device: what the tiles must fit into.
        residual: whether outputs are added to one, which takes registers.
    """
    j = min(s.left.d, 8)
    run = 8 * max(1, 4 // s.left.d)
    most = max(-(-s.left.b // run) * run, run)
    for groups, blocks in ((1, 1), (1, 2), (2, 1), (3, 1)):
        for splits in _divisors(s.tiles_of_block):
            for ks in (16, 32, 48, 64, 96, 128):
                if -(-s.right.c // 16) * 16 % ks != 0:
                    continue
                for nk in range(run, min(256 // j, most) + 1, run):
                    if nk % 16 != 0 and nk != most:
                        continue
                    if -(-s.left.b // nk) * nk * 8 > s.left.b * 9 and nk != run:
                        continue  # too much would be filled up
                    tile = Config(groups, blocks, nk, ks, splits, 1, 1, 2)
                    tile = _with_slots(tile, s)
                    stages = _most_stages(tile, s, device)
                    if _fits_registers(tile, s, residual) and stages >= 2:
                        yield replace(tile, stages=stages)


def fields(tile: Config) -> tuple[int, ...]:
    return (
        *(tile.groups, tile.blocks, tile.nk, tile.ks),
        *(tile.splits, tile.slot_j, tile.slot_p, tile.stages),
    )


def _with_slots(tile: Config, s: Shape) -> Config:
    """The tile, with as much of the left factor in a slot as one of the right has room for."""
    first = tile.first_slot_bytes(s)
    choices = [(1, steps) for steps in _divisors(s.steps)]
    choices += [(j, s.steps) for j in _divisors(min(s.left.d, 8))]
    sizes = sorted((j * steps, j, steps) for j, steps in choices)
    fitting = [one for one in sizes if one[0] * tile.nk * 32 <= first] or sizes[:1]
    _, j, steps = fitting[-1]
    return replace(tile, slot_j=j, slot_p=steps)


def _most_stages(tile: Config, s: Shape, device: DeviceSpec) -> int:
    limit = min(SHARED_LIMIT, device.shared_bytes // tile.blocks - 1024)
    slot = max(tile.first_slot_bytes(s), tile.second_slot_bytes)
    return min((limit - tile.fixed_bytes(s)) // slot, 8)


def _at_once(tile: Config) -> int:
    """Steps of a group of products, as ``AT_ONCE`` in the template."""
    most = min(tile.slot_p, 6)
    return max(n for n in range(1, most + 1) if tile.slot_p % n == 0)


def _fits_registers(tile: Config, s: Shape, residual: bool) -> bool:
    first = tile.columns(s) // 2 + tile.ks // 16 * 8
    sums = min(s.left.d, 8) * tile.nk // 2
    second = sums + sums // 2 * residual + _at_once(tile) * 8
    return tile.columns(s) <= 256 and max(first, second) + _OTHER_REGISTERS <= tile.registers


def _divisors(n: int) -> list[int]:
    return [m for m in range(1, n + 1) if n % m == 0]


def predicted_us(
    s: Shape, tile: Config, batch: int, device: DeviceSpec, epilogue: Epilogue | None = None
) -> float:
    """Predicted time of a tile, in microseconds: one phase after the other."""
    e = epilogue or Epilogue()
    units = -(-batch // 64)
    of_block = -(-units // (device.multiprocessors * tile.blocks))  # the busiest block's
    passes = -(-of_block // tile.groups) * tile.blocks
    at_a_time = min(tile.groups, of_block) * tile.blocks
    of_block *= tile.blocks
    left, right = s.left, s.right
    first, second = tile.ring_slots(s)
    right_bytes = first * tile.columns(s) * tile.ks * 2
    left_bytes = second * tile.second_slot_bytes
    chunks = -(-left.b // tile.nk)
    features = s.siblings * left.out_features
    # Of 64 rows. z goes into shared memory once, and out of it for each chunk of outputs.
    x_bytes = 128 * right.a * -(-right.c // tile.ks) * tile.ks * tile.splits
    z_bytes = s.classes * s.steps * 2048
    y_bytes = 128 * features * (2 if e.residual else 1)
    groups = s.siblings * chunks * left.d * s.steps / _at_once(tile)
    ring = tile.stages * max(tile.first_slot_bytes(s), tile.second_slot_bytes)
    activated = 64 * features if e.activation != "none" else 0
    return (
        _LAUNCH_US
        + overlapped(
            (
                of_block * 128 * right.in_features / _READ_BYTES_US,
                (passes * right_bytes + of_block * (2 * x_bytes + right_bytes)) / _SHARED_BYTES_US,
                (passes * right_bytes + of_block * x_bytes) / ring * _LATENCY_US,
            ),
            _OVERLAP,
        )
        + overlapped(
            (
                of_block * y_bytes / _WRITTEN_BYTES_US,
                (passes * left_bytes + of_block * (left_bytes + z_bytes * chunks))
                / _SHARED_BYTES_US,
                passes * left_bytes / ring * _LATENCY_US,
                of_block / at_a_time * groups * _BETWEEN_US,
                of_block * activated * _ACTIVATION_US,
            ),
            _OVERLAP,
        )
    )


def best(
    s: Shape, batch: int, device: DeviceSpec, epilogue: Epilogue | None = None, count: int = 1
) -> list[Config]:
    """The tiles with the least predicted times, the best first."""
    candidates = configs(s, device, epilogue is not None and epilogue.residual)
    ranked = sorted(candidates, key=lambda t: predicted_us(s, t, batch, device, epilogue))
    return ranked[:count]


def pack_index(s: Shape, tile: Config) -> Tensor:
    """Where each element of the packed weights comes from.

    Returns:
        int64, one entry for each packed element: an index into the siblings' left factors, then
        their right factors, each flattened, one after another; -1 for a zero.
    """
    right, left = right_index(s, tile), left_index(s, tile)
    right = torch.where(right < 0, right, right + s.siblings * s.left.nnz)
    return torch.cat([right.reshape(-1), left.reshape(-1)])


def span(n: int, dim: int, dims: int) -> Tensor:
    """0 to n - 1 along dimension ``dim`` of ``dims``."""
    return torch.arange(n).view(*(-1 if at == dim else 1 for at in range(dims)))


def right_index(s: Shape, tile: Config) -> Tensor:
    """The right factors' part of `pack_index`, slot by slot: indices into these factors."""
    right, d = s.right, s.left.d
    tiles = s.tiles_of_block // tile.splits
    sizes = (right.a, tile.splits, -(-right.c // tile.ks), tile.ks // 16)
    dims = 10
    i, split, part, step = (span(n, at, dims) for at, n in enumerate(sizes))
    half, sibling, j, u, column, e = (
        span(n, at + 4, dims) for at, n in enumerate((2, s.siblings, d, tiles, 8, 8))
    )
    of_class = (split * tiles + u) * 8 + column
    feature = part * tile.ks + step * 16 + half * 8 + e
    source = sibling * right.nnz + (i * right.b + of_class * d + j) * right.c + feature
    return torch.where((of_class < s.l_of_block) & (feature < right.c), source, -1)


def left_index(s: Shape, tile: Config) -> Tensor:
    """The left factors' part, chunk by chunk: [sibling, chunk, group of j, j, step, half, k, l]."""
    left, right, d = s.left, s.right, s.left.d
    dims, group = 8, min(s.left.d, 8)
    sizes = (s.siblings, -(-left.b // tile.nk), d // group, group)
    sibling, chunk, j_group, j = (span(n, at, dims) for at, n in enumerate(sizes))
    step, half, n, e = (span(m, at + 4, dims) for at, m in enumerate((s.steps, 2, tile.nk, 8)))
    k = chunk * tile.nk + output_of_column(n, d)
    i, u = (2 * step + half) // s.tiles_of_block, (2 * step + half) % s.tiles_of_block
    of_class = u * 8 + e
    z = i * s.l_of_block + of_class  # of the class
    source = sibling * left.nnz + (k * left.c + z) * d + j_group * group + j
    return torch.where((k < left.b) & (i < right.a) & (of_class < s.l_of_block), source, -1)


def output_of_column(column: Tensor, d: int) -> Tensor:
    """Which output of its chunk a column of the tensor cores' operand holds.

    Four threads share the columns of 8; each has two of them, whose outputs must make runs of 8
    neighbouring features.
    """
    tile, quarter, odd = column // 8, column % 8 // 2, column % 2
    if d >= 8:
        return tile * 8 + quarter + 4 * odd
    tiles = max(1, 4 // d)  # that make whole runs
    return tile // tiles * tiles * 8 + quarter * (8 // d) + tile % tiles * 2 + odd


def pack(left: Sequence[Tensor], right: Sequence[Tensor], index: Tensor) -> Tensor:
    """The packed weights of siblings' factors, [1, b, c, d] and [a, b, c, 1] each."""
    flat = torch.cat([w.reshape(-1) for w in (*left, *right)])
    packed = flat.index_select(0, index.clamp_min(0))
    return packed.masked_fill_(index < 0, 0)


def kernel_name(s: Shape, dtype: str, epilogue: Epilogue) -> str:
    """The kernel's name, as profilers show it."""
    shape = "_".join(map(str, (*s.left.weight_shape[1:], *s.right.weight_shape[:3])))
    words = [f"x{s.siblings}"] if s.siblings > 1 else []
    words += [epilogue.activation] if epilogue.activation != "none" else []
    return "_".join(["ksopt_chain_wgmma16", dtype, shape, *words])


def source(s: Shape, tile: Config, epilogue: Epilogue, dtype: str) -> str:
    """The generated file: one instance of the template."""
    left, right = s.left, s.right
    pattern = (right.a, right.b, right.c, left.b, left.d, s.siblings)
    extras = (  # in the order of csrc/cuda/epilogue.cuh
        *(ACTIVATIONS.index(epilogue.middle), ACTIVATIONS.index(epilogue.activation)),
        *(int(epilogue.bias), int(epilogue.residual)),
    )

    def arguments(values: Sequence[int]) -> str:
        return ", ".join(map(str, values))

    return (
        '#include "chain_wgmma16.cuh"\n'
        f"using Support = ChainPattern<{arguments(pattern)}>;\n"
        f"using Tile = ChainTile<Support, {arguments(fields(tile))}>;\n"
        f"using After = ChainEpilogue<{arguments(extras)}>;\n"
        f"static_assert(Tile::SHARED_BYTES == {tile.shared_bytes(s)} && "
        f"Tile::PACKED_BYTES == {2 * tile.packed_elements(s)}, "
        '"csrc and kernels/families/chain_tile.py disagree");\n'
        'extern "C" __global__ void __launch_bounds__(Tile::THREADS, Tile::BLOCKS)\n'
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
    ]


class Launched(Protocol):
    """What a launch needs to know of a tile."""

    @property
    def blocks(self) -> int:
        """Blocks that run on a multiprocessor at a time."""

    @property
    def threads(self) -> int:
        """Threads of a block."""


def launch_of(tile: Launched, batch: int, multiprocessors: int) -> tuple[int, int]:
    """Blocks of a launch, and the rows of each."""
    units = -(-batch // 64)
    of_block = -(-units // min(units, multiprocessors * tile.blocks))
    return -(-units // of_block), of_block * 64


class ChainLauncher:
    """A loaded kernel: called with (x, packed weights), gives y, on x's current stream."""

    def __init__(
        self, s: Shape, tile: Config, epilogue: Epilogue, dtype: str, device_index: int
    ) -> None:
        self.out_features = s.siblings * s.left.out_features
        self.tile: Launched = tile
        self.epilogue = epilogue
        text = source(s, tile, epilogue, dtype)
        self._load(kernel_name(s, dtype, epilogue), text, tile.shared_bytes(s), device_index)

    def _load(self, name: str, text: str, shared_bytes: int, device_index: int) -> None:
        code = nvrtc.cubin(text, arch.of_device(device_index)).data
        self._kernel = driver.load_kernel(code, name, shared_bytes, device_index)
        self._shared_bytes, self._device = shared_bytes, device_index
        self._multiprocessors = DeviceSpec.of_device(device_index).multiprocessors

    def entry(self, form: int) -> Entry | None:
        """What the host library needs to launch it on weights of this form."""
        most = self._multiprocessors * self.tile.blocks
        block = (self.tile.threads, self._shared_bytes)
        return chain_entry(self._kernel, self.out_features, *block, most, form)

    def __call__(
        self,
        x: Tensor,
        packed: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """y of (rows, siblings * out_features).

        Args:
            x: (rows, in_features); the elements of a row side by side, rows at multiples of 16
                bytes. So are bias, residual and out.
            packed: by `pack`.
            bias: (siblings * out_features,), where the epilogue has one.
            residual: as y, where the epilogue has one.
            out: where y goes; None makes it.
        """
        rows = x.shape[0]
        y = x.new_empty(rows, self.out_features) if out is None else out
        if rows == 0:
            return y
        blocks, of_block = launch_of(self.tile, rows, self._multiprocessors)
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
            of_block,
        )
        driver.launch(
            *(self._kernel, blocks, self.tile.threads, self._shared_bytes),
            *(arguments, self._device),
        )
        return y
