"""Tiles of csrc/cuda/input_grad_wgmma16.cuh: supported chains, tiles that fit, their times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace

from ksopt.epilogue import ACTIVATIONS, Activation
from ksopt.kernels.families.common.cost_terms import overlapped
from ksopt.kernels.families.common.row_grid import grid_of
from ksopt.kernels.families.common.two_factors import multiplier_registers, unsupported_form
from ksopt.kernels.families.common.weight_packer import MOST_SIBLINGS
from ksopt.kernels.problem import SHARED_LIMIT, DeviceSpec
from ksopt.patterns.chain import Pattern

ROWS_OF_UNIT = 64
"""Rows of the units that blocks take."""

_BARRIER_BYTES = 128
_OTHER_REGISTERS = 44  # of a thread that multiplies, beside sums and operands
_MOST_SUMS = 256  # columns between the factors that a block computes
_MOST_CHUNKS = 32  # of the columns that it computes: each is unrolled code
_MOST_BLOCKS_OF_ROWS = 8
# The cost model's constants, of one multiprocessor: fitted to 36 launches in graphs on an H200,
# within 6 % (root mean square; docs/development/training.md). No other run was compared with them.
_READ_BYTES_US = 24_400.0
_WRITTEN_BYTES_US = 28_100.0
_L2_BYTES_US = 101_000.0
_SHARED_BYTES_US = 193_000.0
_MOST_BYTES_US = 106_000.0  # that one alone can take in
_FLOPS_US = 5.76e6
# Behind an activation, of an output, of 64 columns of a warpgroup, and of a launch: fitted to 26
# launches on an H100, within 10 % (root mean square).
_ACTIVATION_US = 1.5e-4
_ACTIVATED_CHUNK_US = 1.0
_ACTIVATED_LAUNCH_US = 5.0
_LATENCY_US = 1.17  # of the loads that fill a block's ring
_BETWEEN_US = 0.0475  # between two groups of a warpgroup's products
_LAUNCH_US = 4.5  # and for the kernel that packs, some 3
_OVERLAP = 3.55


@dataclass(frozen=True)
class Shape:
    """Chains (1,b1,c1,d1)*(a2,b2,c2,1) of the same patterns that read the same.

    Attributes:
        left, right: the factors.
        siblings: how many chains.
        activation: of the product that one chain reads: its gradient is multiplied by, too.
        below: the factor of that product, (1, b0, c0, d0); None without an activation.
    """

    left: Pattern
    right: Pattern
    siblings: int = 1
    activation: Activation = "none"
    below: Pattern | None = None

    @property
    def middle(self) -> int:
        """Features between the factors of a chain."""
        return self.right.out_features

    def __str__(self) -> str:
        times = "" if self.siblings == 1 else f"{self.siblings} x "
        behind = "" if self.below is None else f" of {self.activation} of {self.below}"
        return f"{times}{self.left}*{self.right}{behind}"

    @property
    def features_below(self) -> int:
        """What the factor below reads."""
        return 0 if self.below is None else self.below.in_features


@dataclass(frozen=True)
class Config:
    """Template arguments of ``InputGradTile``, in its order.

    Attributes:
        groups: warpgroups that multiply, of 64 rows each.
        blocks: that a multiprocessor runs at a time.
        splits: blocks that share the right factor's blocks for the same rows.
        parts: blocks that share the columns of the result; each recomputes the values between.
        kf: features of the gradient in a slot.
        nc: columns of the result that are computed at a time.
        stages: slots.
    """

    groups: int
    blocks: int
    splits: int
    parts: int
    kf: int
    nc: int
    stages: int

    @property
    def rows(self) -> int:
        """Rows that a block has at a time."""
        return 64 * self.groups

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * (self.groups + 1)

    @property
    def of_rows(self) -> int:
        """Blocks that have the same rows."""
        return self.splits * self.parts

    @property
    def registers(self) -> int:
        """Registers of a thread that multiplies."""
        return multiplier_registers(self.groups, self.blocks)

    @property
    def packing(self) -> Config:
        """The plainest tile that reads the same packed weights."""
        return replace(self, groups=1, blocks=1, parts=1, stages=2)

    def columns(self, s: Shape) -> int:
        """Columns between the factors of a chain that a block computes."""
        return s.middle // self.splits

    def chunks(self, s: Shape) -> int:
        """Chunks of columns that a block of the right factor computes."""
        return -(-s.right.c // self.nc)

    def chunks_of_block(self, s: Shape) -> int:
        """Chunks of columns that a block of the kernel computes."""
        return s.right.a // self.splits * self.chunks(s) // self.parts

    def slots(self, s: Shape) -> int:
        """Slots that the rows of one chain's gradient take."""
        return -(-s.left.out_features // self.kf)

    def left_bytes(self, s: Shape) -> int:
        """Weights of the left factor in a slot."""
        return self.kf // s.left.d * self.columns(s) * 2

    def right_bytes(self, s: Shape) -> int:
        """Weights of the right factors, and of the one below, for a chunk."""
        of_below = 0 if s.below is None else s.below.c
        return (s.siblings * s.right.b + of_below) * self.nc * 2

    def slot_bytes(self, s: Shape) -> int:
        """Bytes of a slot of the ring."""
        return max(self.rows * self.kf * 2 + self.left_bytes(s), self.right_bytes(s))

    def shared_bytes(self, s: Shape) -> int:
        """Dynamic shared memory of a block."""
        return _BARRIER_BYTES + self.stages * self.slot_bytes(s)

    def packed_elements(self, s: Shape) -> int:
        """Elements of the packed weights."""
        left = s.siblings * self.splits * self.slots(s) * self.left_bytes(s)
        return (left + s.right.a * self.chunks(s) * self.right_bytes(s)) // 2


def unsupported_reason(s: Shape, dtype: str, device: DeviceSpec) -> str | None:
    """Why no kernel computes a chain's input gradient on ``device``, or None if one does."""
    left, right = s.left, s.right
    reason = unsupported_form(left, right, dtype, device)
    if reason is not None:
        return reason
    if not 1 <= s.siblings <= MOST_SIBLINGS:
        return f"{s.siblings} siblings are not 1 to {MOST_SIBLINGS}"
    if left.d not in (1, 2, 4, 8):
        return f"d = {left.d} of the left factor is not 1, 2, 4 or 8"
    if right.b % 32 != 0:
        return f"b = {right.b} of the right factor is not a multiple of 32"
    if right.c % 8 != 0 or left.out_features % 8 != 0:
        return "rows of the gradients are not whole runs of 16 bytes"
    reason = _unsupported_below(s)
    if reason is not None:
        return reason
    if next(configs(s, device), None) is None:
        return "no tile fits in shared memory and registers"
    return None


def _unsupported_below(s: Shape) -> str | None:
    below = s.below
    if (below is None) != (s.activation == "none"):
        return "an activation needs the factor of the product that it is of"
    if below is None:
        return None
    if s.siblings > 1:
        return f"{s.siblings} siblings read an activation"
    if below.out_features != s.right.in_features:
        return f"{below} has not the features that {s.right} reads"
    if below.a != 1 or below.d not in (1, 2, 4, 8):
        return f"{below} is not of the form (1,b,c,d) with d = 1, 2, 4 or 8"
    return None if below.c % 32 == 0 else f"c = {below.c} of the factor below is no multiple of 32"


def configs(s: Shape, device: DeviceSpec) -> Iterator[Config]:
    """All tiles worth considering of a supported chain, in no order."""
    d, right = s.left.d, s.right
    unit = unit_of(d)
    all_widths = (64, 96, 128) if s.siblings == 1 else (32, 64, 96, 128)
    widths = [nc for nc in all_widths if nc - 32 < -(-right.c // 32) * 32] or [32]
    if s.below is not None:
        of_classes = 8 * s.below.d
        widths = [nc for nc in widths if nc % of_classes == 0] or [max(32, of_classes)]
    for splits in (n for n in range(1, _MOST_BLOCKS_OF_ROWS + 1) if right.a % n == 0):
        columns = s.middle // splits
        if columns > _MOST_SUMS or columns % (8 * d) != 0:
            continue
        for groups, blocks in ((1, 1), (1, 2), (2, 1), (3, 1)):
            for nc in widths:
                for kf in (2 * unit, 4 * unit):
                    for parts in (1, 2, 4):
                        tile = Config(groups, blocks, splits, parts, kf, nc, 2)
                        stages = _most_stages(tile, s, device)
                        if stages >= 2 and _is_whole(tile, s) and _fits_registers(tile, s):
                            yield replace(tile, stages=stages)


def unit_of(d: int) -> int:
    """Features of the gradient of a group of products, as ``UNIT`` in the template."""
    return 32 if d < 4 else 16 * d


def template_arguments(s: Shape, tile: Config) -> tuple[str, str]:
    """The arguments of ``InputGradPattern``, and those of ``InputGradTile`` after it."""
    activation = ACTIVATIONS.index(s.activation)
    below = () if s.below is None else (s.below.c, s.below.d)
    pattern = (s.right.a, s.right.b, s.right.c, s.left.b, s.left.d, s.siblings, activation, *below)
    return ", ".join(map(str, pattern)), ", ".join(map(str, astuple(tile)))


def launch_of(tile: Config, rows: int, multiprocessors: int) -> tuple[int, int]:
    """Blocks of a launch and rows of each."""
    at_a_time = max(1, multiprocessors * tile.blocks // tile.of_rows)
    return grid_of(rows, ROWS_OF_UNIT, at_a_time, tile.of_rows)


def predicted_us(s: Shape, tile: Config, rows: int, device: DeviceSpec) -> float:
    """Predicted time of a tile, in microseconds: one phase after the other."""
    blocks, of_block = launch_of(tile, rows, device.multiprocessors)
    busy = min(1.0, blocks / device.multiprocessors)
    at_a_time = min(tile.blocks, -(-blocks // device.multiprocessors))  # of a multiprocessor

    def rate(of_all: float) -> float:
        return min(of_all / busy, _MOST_BYTES_US)

    units = of_block // ROWS_OF_UNIT
    passes = -(-units // tile.groups)
    used = 128 * min(tile.groups, units) * tile.kf + tile.left_bytes(s)  # of a slot
    ring = tile.stages * max(used, tile.right_bytes(s)) * at_a_time
    grad = 128 * units * s.siblings * s.left.out_features
    left = s.siblings * tile.slots(s) * tile.left_bytes(s)
    right = tile.chunks_of_block(s) * tile.right_bytes(s)
    between, result = (
        128 * units * features
        for features in (
            s.siblings * tile.columns(s) / tile.parts,
            s.right.in_features / tile.of_rows,
        )
    )
    # For each thing that a column is multiplied with.
    flops = 128 * units * s.siblings * tile.columns(s)
    first = (
        grad / tile.of_rows / rate(_READ_BYTES_US),
        (grad + passes * left) / rate(_L2_BYTES_US),
        (2 * grad + (passes + units) * left) / _SHARED_BYTES_US,
        (grad + passes * left) / ring * _LATENCY_US,
        flops * s.left.b / _FLOPS_US,
        passes / at_a_time * s.siblings * s.left.out_features / unit_of(s.left.d) * _BETWEEN_US,
    )
    of_chunk = tile.nc * tile.chunks(s) // tile.parts
    activated = result / 2 if s.below is not None else 0.0
    activated_chunks = activated / (64 * units) / 64  # of a pass
    below = 128 * units * s.features_below
    flops_below = 0.0 if s.below is None else 2 * activated * s.below.c
    second = (
        (between + result) / rate(_WRITTEN_BYTES_US) + below / tile.of_rows / rate(_READ_BYTES_US),
        activated * _ACTIVATION_US,
        passes / at_a_time * activated_chunks * _ACTIVATED_CHUNK_US,
        (below + passes * right) / rate(_L2_BYTES_US),
        (passes + units) * right / _SHARED_BYTES_US,
        passes * right / ring * _LATENCY_US,
        (flops * of_chunk + flops_below) / _FLOPS_US,
    )
    launch_us = _LAUNCH_US + (_ACTIVATED_LAUNCH_US if s.below is not None else 0.0)
    return launch_us + at_a_time * (overlapped(first, _OVERLAP) + overlapped(second, _OVERLAP))


def best(s: Shape, rows: int, device: DeviceSpec, count: int | None = None) -> list[Config]:
    """The tiles with the least predicted times, the best first; none with idle warpgroups."""

    def is_busy(tile: Config) -> bool:
        _, of_block = launch_of(tile, rows, device.multiprocessors)
        return tile.groups == 1 or tile.rows <= of_block

    busy = filter(is_busy, configs(s, device))
    return sorted(busy, key=lambda t: predicted_us(s, t, rows, device))[:count]


def _is_whole(tile: Config, s: Shape) -> bool:
    """Whether blocks share the work evenly, within the limit on unrolled chunks."""
    few = tile.chunks_of_block(s) <= _MOST_CHUNKS and tile.of_rows <= _MOST_BLOCKS_OF_ROWS
    return few and tile.chunks(s) % tile.parts == 0


def _most_stages(tile: Config, s: Shape, device: DeviceSpec) -> int:
    limit = min(SHARED_LIMIT, device.shared_bytes // tile.blocks - 1024)
    return min((limit - _BARRIER_BYTES) // tile.slot_bytes(s), 8)


def _fits_registers(tile: Config, s: Shape) -> bool:
    columns = tile.columns(s)
    words = unit_of(s.left.d) // 4  # a quarter of a unit, of two rows, in pairs
    before = (s.siblings - 1) * columns // 4  # what is between, of the siblings before
    first = before + columns // 2 + 3 * words  # two groups' operands, and what is read for the next
    second = (
        before + columns // 4 + tile.nc
    )  # and the sums of two chunks, or of one's gradient and product
    below = s.features_below // 4  # what the factor below read
    return below + max(first, second) + _OTHER_REGISTERS <= tile.registers
