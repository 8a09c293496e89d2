"""What the batch-last families share: tiles, launches, predicted times, packed weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from ksopt.kernels.families.cost_terms import overlapped
from ksopt.kernels.launcher import Entry, Launcher
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
_FULL_WARPS = 5.0  # with fewer on a multiprocessor, shared memory is not kept busy


@dataclass(frozen=True)
class Config:
    """Template arguments of ``BatchLastMma16Tile`` and ``BatchLastMmaTf32x3Tile``, explained."""

    warps_k: int
    warps_m: int
    mt: int
    nt: int
    kl: int
    stages: int
    blocks: int
    groups: int
    """Groups of blocks that share the work, in the largest launch; not a template argument."""
    element_bytes: int
    """2 or 4; not a template argument."""

    @property
    def template(self) -> tuple[int, ...]:
        """The template arguments that all kernels have, in order."""
        return (
            *(self.warps_k, self.warps_m, self.mt, self.nt),
            *(self.kl, self.stages, self.blocks),
        )

    @property
    def threads(self) -> int:
        return 32 * self.warps_k * self.warps_m

    @property
    def rows(self) -> int:
        """Columns of x and y, which are rows of the batch, in a tile."""
        return self.warps_m * self.nt * 8

    @property
    def outputs(self) -> int:
        return self.warps_k * self.mt * 16

    def shared_bytes(self, p: Pattern) -> int:
        """Dynamic shared memory of a block."""
        weights = self.outputs // 16 * steps_of(p, self.element_bytes) * 512
        pitch = self.rows * self.element_bytes + 8 * self.element_bytes
        results = 16 * (self.nt * 8 * self.element_bytes + 16)
        return weights + self.stages * self.kl * pitch + self.threads // 32 * results

    def registers(self) -> int:
        """Registers a thread, roughly: sums, operands, and what addresses take."""
        if self.element_bytes == 2:
            return self.mt * self.nt * 4 + self.nt * 2 + 48
        return self.mt * self.nt * 6 + self.nt * 4 + 60  # operands are split in two


def steps_of(p: Pattern, element_bytes: int) -> int:
    """Tensor-core steps over l: of 16 in 16 bit, of 8 in 32 bit."""
    return -(-p.c // (32 // element_bytes))


def output_tiles(p: Pattern, outputs: int) -> int:
    """Blocks of a group: together they cover all outputs of their (i, j)."""
    return -(-p.b // outputs)


def configs(p: Pattern, element_bytes: int, multiprocessors: int) -> Iterator[Config]:
    """All tiles worth considering, without order."""
    step = 32 // element_bytes
    steps = steps_of(p, element_bytes)
    outputs16 = -(-p.b // 16)
    for warps_k, warps_m, mt, nt in itertools.product(
        (1, 2, 3, 4, 6, 8), (1, 2, 4, 8), (1, 2, 3, 4, 6), (4, 8, 16)
    ):
        outputs = warps_k * mt
        tiles = -(-outputs16 // outputs)
        # Outputs that do not exist are computed too: few of them, or none where b is small.
        if not 4 <= warps_k * warps_m <= 12 or (tiles * outputs - outputs16) * 8 > outputs16:
            continue
        # The threads of a block share the chunks of a row evenly.
        if 32 * warps_k * 16 % (nt * 8 * element_bytes):
            continue
        least = Config(warps_k, warps_m, mt, nt, step, 3, 1, 1, element_bytes)
        residents = [n for n in (1, 2, 3, 4) if _fit_registers(least.registers(), least.threads, n)]
        # Where no stage of several steps divides c, stages of one step do.
        kls = [kl for kl in (1, 2, 3, 4, 6, 8, 12) if steps % kl == 0]
        for kl, stages, blocks in itertools.product(kls, (3, 4, 6, 8), residents):
            groups = max(1, multiprocessors * blocks // tiles)
            config = Config(
                warps_k, warps_m, mt, nt, kl * step, stages, blocks, groups, element_bytes
            )
            if fits(config.shared_bytes(p), config.registers(), config.threads, blocks):
                yield config


def fits(shared_bytes: int, registers: int, threads: int, blocks: int) -> bool:
    """Whether so many blocks fit on a multiprocessor of sm_90."""
    shared = (shared_bytes + _BLOCK_OVERHEAD_BYTES) * blocks
    limit = SHARED_LIMIT + _BLOCK_OVERHEAD_BYTES
    return shared <= limit and _fit_registers(registers, threads, blocks)


def _fit_registers(registers: int, threads: int, blocks: int) -> bool:
    return registers <= min(255, _REGISTERS // (threads * blocks))


def geometry(
    p: Pattern, threads: int, shared_bytes: int, rows: int, outputs: int, groups: int
) -> Geometry:
    """How a kernel of these families is launched."""
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
    """What a tile asks of one multiprocessor, for `predicted_us`.

    Attributes:
        element_bytes: 2 or 4.
        rows, outputs, groups: of the tile, as in its configuration.
        blocks: blocks on a multiprocessor.
        walkers: teams of warps on a multiprocessor that have a ring of their own.
        warps: on a multiprocessor.
        stages_per_tile: stages of a tile.
        in_flight: bytes of x that a multiprocessor's rings ask for ahead.
        operand_bytes: read from shared memory for one tile's products.
        tensor_us: of one tile's products.
    """

    element_bytes: int
    rows: int
    outputs: int
    groups: int
    blocks: int
    walkers: int
    warps: int
    stages_per_tile: int
    in_flight: int
    operand_bytes: float
    tensor_us: float


def predicted_us(p: Pattern, load: Load, batch: int, multiprocessors: int) -> float:
    """Predicted time of a tile, so that only the best few need to be compiled and measured.

    Args:
        p: the pattern.
        load: what the tile asks for.
        batch: rows of x.
        multiprocessors: of the device.

    Returns:
        Microseconds.
    """
    size, tiles = load.element_bytes, output_tiles(p, load.outputs)
    items = -(-batch // load.rows) * p.a * p.d
    groups = min(load.groups, items)
    # Whole tiles for each walker, and whole waves of blocks.
    rounds = -(-items // (groups * load.walkers // load.blocks)) * -(
        -groups * tiles // (multiprocessors * load.blocks)
    )
    busy = items * tiles / (multiprocessors * load.walkers) / rounds
    x_tile, y_tile = load.rows * p.c * size, load.rows * load.outputs * size
    # For one tile, while the multiprocessor's other walkers work too.
    demands = (
        (x_tile / tiles + y_tile) / _DRAM_BYTES_US,
        (x_tile + y_tile) / _L2_BYTES_US,
        x_tile * _LATENCY_US / load.in_flight,
        (load.operand_bytes + x_tile + 2 * y_tile)
        / (_SHARED_BYTES_US * min(1.0, load.warps / _FULL_WARPS)),
        load.tensor_us,
    )
    streaming = overlapped(demands, _OVERLAP)
    alone = load.stages_per_tile * _STAGE_US / load.walkers
    tile_us = math.hypot(streaming, alone) / min(1.0, max(busy, 0.05))
    columns = -(-p.a * p.d // groups) + (1 if p.a * p.d % groups else 0)
    weights = columns * (_COLUMN_US + load.outputs * p.c * size * load.blocks / _WEIGHT_BYTES_US)
    packing = 2.0 + 2 * size * p.nnz / (_DRAM_BYTES_US * multiprocessors) if p.d > 1 else 0.0
    return items * tiles / multiprocessors * tile_us + weights + packing + _LAUNCH_US


def predicted_of(
    p: Pattern, config: Config, batch: int, multiprocessors: int, steps_us: float, extra: float
) -> float:
    """`predicted_us` of a tile whose warps all share a ring.

    Args:
        p: the pattern.
        config: the tile.
        batch: rows of x.
        multiprocessors: of the device.
        steps_us: tensor-core steps (16 x 8 results) of a multiprocessor in a microsecond.
        extra: what preparing the operands of a warp's steps costs, in steps.
    """
    size = config.element_bytes
    warps = config.threads // 32 * config.blocks
    step_us = (1 + extra / (config.mt * config.nt)) / steps_us / min(1.0, (warps / 8) ** 0.4)
    steps = steps_of(p, size) * config.rows / 8 * config.outputs / 16
    return predicted_us(
        p,
        Load(
            element_bytes=size,
            rows=config.rows,
            outputs=config.outputs,
            groups=config.groups,
            blocks=config.blocks,
            walkers=config.blocks,
            warps=warps,
            stages_per_tile=steps_of(p, size) * (32 // size) // config.kl,
            in_flight=(config.stages - 1) * config.kl * config.rows * size * config.blocks,
            # Fragments of the weight and of x.
            operand_bytes=steps * (512 / config.nt + 256 / config.mt),
            tensor_us=steps * step_us,
        ),
        batch,
        multiprocessors,
    )


class PackingLauncher(PreparingLauncher):
    """Launches with the weight laid out as [a, d, b, c]: no copy where d = 1."""

    def __init__(self, launch: Launcher) -> None:
        super().__init__("adbc", launch, fallback=None)

    def pack(self, weight: Tensor) -> Tensor:
        return weight.permute(0, 3, 1, 2).contiguous()

    def entry(self) -> Entry | None:
        entry = super().entry()
        # A contiguous [a, b, c, 1] is laid out so already, whatever the stride of its last dim.
        already = self.problem.pattern.d == 1
        return replace(entry, anew=True) if entry is not None and already else entry
