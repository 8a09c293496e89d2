"""Tiles, launches, predicted times and packed weights, shared by the batch-last families."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor

from ksopt.kernels.families.common.cost_terms import overlapped
from ksopt.kernels.launcher import BY_GROUPS, Entry, Launcher
from ksopt.kernels.packing_launcher import PreparingLauncher
from ksopt.kernels.problem import SHARED_LIMIT, Geometry
from ksopt.patterns.chain import Pattern

_REGISTERS = 65536  # of a multiprocessor
_BLOCK_OVERHEAD_BYTES = 1024  # shared memory that the system takes for each block

# Rates of one multiprocessor of an H200, in bytes and microseconds, fitted to 1,740 random tiles of
# 22 of the paper's patterns (fp16 and fp32, batch 25,088): the fastest of a family's three best
# predicted was a mean 2 %, at worst 25 % slower than the fastest of its tiles.
_DRAM_BYTES_US = 30_000.0
_L2_BYTES_US = 59_500.0
_SHARED_BYTES_US = 123_500.0
_WEIGHT_BYTES_US = 22_000.0  # a column's weights, read and regrouped
_COLUMN_US = 1.0  # latency of a change of column
_LATENCY_US = 1.3  # from a load's issue to its data, under load
_STAGE_US = 0.23  # a stage's barriers
_LAUNCH_US = 5.0
_OVERLAP = 4.0
_FULL_WARPS = 5.0  # with fewer on a multiprocessor, shared memory is not busy all the time


def steps_of(p: Pattern, element_bytes: int) -> int:
    """Tensor-core steps over l: of 16 in 16 bit, of 8 in 32 bit."""
    return -(-p.c // (32 // element_bytes))


def output_tiles(p: Pattern, outputs: int) -> int:
    """Blocks of a group: together they cover all outputs of their (i, j)."""
    return -(-p.b // outputs)


def fits(shared_bytes: int, registers: int, threads: int, blocks: int) -> bool:
    """Whether this many blocks fit on a multiprocessor of sm_90."""
    shared = (shared_bytes + _BLOCK_OVERHEAD_BYTES) * blocks
    limit = SHARED_LIMIT + _BLOCK_OVERHEAD_BYTES
    return shared <= limit and fit_registers(registers, threads, blocks)


def fit_registers(registers: int, threads: int, blocks: int) -> bool:
    """Whether a multiprocessor has registers for this many blocks."""
    return registers <= min(255, _REGISTERS // (threads * blocks))


def geometry(
    p: Pattern, threads: int, shared_bytes: int, rows: int, outputs: int, groups: int
) -> Geometry:
    """The launch geometry of a kernel of these families."""
    tiles = output_tiles(p, outputs)
    return Geometry(
        threads=threads,
        shared_bytes=shared_bytes,
        rows_per_tile=rows,
        tiles_per_row_tile=p.a * p.d * tiles,
        max_blocks=groups * tiles,
    )


@dataclass(frozen=True)
class Load:
    """The load of a tile on one multiprocessor, for `predicted_us`.

    Attributes:
        element_bytes: 2 or 4.
        rows, outputs, groups: of the tile, as in its configuration.
        blocks: blocks on a multiprocessor.
        rings: teams of warps on a multiprocessor that have a ring of their own.
        warps: on a multiprocessor.
        stages_per_tile: stages of a tile.
        in_flight: bytes of x that a multiprocessor's rings prefetch.
        operand_bytes: read from shared memory for one tile's products.
        tensor_us: of one tile's products.
    """

    element_bytes: int
    rows: int
    outputs: int
    groups: int
    blocks: int
    rings: int
    warps: int
    stages_per_tile: int
    in_flight: int
    operand_bytes: float
    tensor_us: float


def predicted_us(p: Pattern, load: Load, batch: int, multiprocessors: int) -> float:
    """Predicted time of a tile, so that only the best few need to be compiled and measured.

    Args:
        p: the pattern.
        load: of the tile.
        batch: rows of x.
        multiprocessors: of the device.

    Returns:
        Microseconds.
    """
    size, tiles = load.element_bytes, output_tiles(p, load.outputs)
    items = -(-batch // load.rows) * p.a * p.d
    groups = min(load.groups, items)
    # Whole tiles for each walker, and whole waves of blocks.
    rounds = -(-items // (groups * load.rings // load.blocks)) * -(
        -groups * tiles // (multiprocessors * load.blocks)
    )
    busy = items * tiles / (multiprocessors * load.rings) / rounds
    x_tile, y_tile = load.rows * p.c * size, load.rows * load.outputs * size
    # For one tile, while the multiprocessor's other rings work too.
    demands = (
        (x_tile / tiles + y_tile) / _DRAM_BYTES_US,
        (x_tile + y_tile) / _L2_BYTES_US,
        x_tile * _LATENCY_US / load.in_flight,
        (load.operand_bytes + x_tile + 2 * y_tile)
        / (_SHARED_BYTES_US * min(1.0, load.warps / _FULL_WARPS)),
        load.tensor_us,
    )
    streaming = overlapped(demands, _OVERLAP)
    alone = load.stages_per_tile * _STAGE_US / load.rings
    tile_us = math.hypot(streaming, alone) / min(1.0, max(busy, 0.05))
    columns = -(-p.a * p.d // groups) + (1 if p.a * p.d % groups else 0)
    weights = columns * (_COLUMN_US + load.outputs * p.c * size * load.blocks / _WEIGHT_BYTES_US)
    packing = 2.0 + 2 * size * p.nnz / (_DRAM_BYTES_US * multiprocessors) if p.d > 1 else 0.0
    return items * tiles / multiprocessors * tile_us + weights + packing + _LAUNCH_US


class PackingLauncher(PreparingLauncher):
    """A launcher that permutes the weight to [a, d, b, c]: no copy where d = 1."""

    def __init__(self, launch: Launcher) -> None:
        super().__init__("adbc", launch, fallback=None)

    def pack(self, weight: Tensor) -> Tensor:
        return weight.permute(0, 3, 1, 2).contiguous()

    def entry(self) -> Entry | None:
        entry = super().entry()
        # A contiguous [a, b, c, 1] is laid out so already, whatever the stride of its last dim.
        if entry is None or self.problem.pattern.d == 1:
            return entry and replace(entry, repacks=True)
        return replace(entry, packing=BY_GROUPS)
