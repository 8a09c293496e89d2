"""The family for a few rows whose weights come by bulk copies (csrc/cuda/small_batch_ring.cuh)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace

from ksopt.kernels import general, generated
from ksopt.kernels.lanes16 import DTYPES, fold
from ksopt.kernels.launch import Launcher
from ksopt.kernels.problem import SHARED_LIMIT, Geometry, Problem
from ksopt.pattern import Pattern

MAX_BATCH = 128
"""More rows than this are computed rightly, but other families are the ones to try."""

_REGISTERS = 65536  # of a multiprocessor
_BARRIER_BYTES = 128
_MAX_BLOCKS = 2**30  # never reached: its outputs would not fit into any device's memory
_MOST_PASSES = 12


@dataclass(frozen=True)
class Config:
    """Template arguments of ``SmallBatchRingTile``, in its order and with its meaning."""

    warps_j: int
    warps_m: int
    warps_n: int
    warps_l: int
    mt: int
    nt: int
    units: int
    stages: int
    share: int
    group_blocks: int
    blocks: int

    @property
    def multiplying_warps(self) -> int:
        """Warps of a block but the one that copies."""
        return self.warps_j * self.warps_m * self.warps_n * self.warps_l

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * (self.multiplying_warps + 1)

    @property
    def rows(self) -> int:
        """Rows of x that a block takes."""
        return self.warps_m * self.mt * 16

    @property
    def outputs(self) -> int:
        """Values of k of a tile."""
        return self.warps_n * self.nt * 8

    def output_tiles(self, p: Pattern) -> int:
        """Tiles that cover a group's outputs."""
        return -(-p.b // self.outputs)

    def passes(self, p: Pattern) -> int:
        """Tiles of the block that has most."""
        return -(-self.output_tiles(p) // self.group_blocks)

    def stage_bytes(self, p: Pattern) -> int:
        """A tile's weights in shared memory."""
        chunks = p.c * p.d // 8
        pitch = chunks + (9 - chunks % 8) % 8 if p.d % 8 == 0 else self._x_pitch(p)
        return self.outputs * pitch * 16

    def shared_bytes(self, p: Pattern) -> int:
        """Dynamic shared memory of a block."""
        ring_end = (
            _BARRIER_BYTES + self.rows * self._x_pitch(p) * 16 + self.stages * self.stage_bytes(p)
        )
        sum_pitch = self.outputs * p.d + (4 if p.d % 8 == 0 else 8)
        sums = self.warps_l * self.rows * sum_pitch * 4
        if self.passes(p) == 1:
            return max(ring_end, _BARRIER_BYTES + sums)
        return ring_end + sums

    def _x_pitch(self, p: Pattern) -> int:
        chunks = p.c * p.d // 8
        spread = self.warps_j if p.d % 8 == 0 else fold(p.d).run
        return chunks + ((1 if spread == 2 else 4) - chunks) % 8

    def registers(self, p: Pattern) -> int:
        """Registers a thread, roughly: sums, weights, operands, and what addresses take."""
        f = fold(p.d)
        sums = self.mt * self.nt * f.j * 4
        weights = self.units * self.nt * f.chunks * 4
        return sums + weights + f.j * f.steps * 4 + f.chunks * 4 + 32


def _units(p: Pattern) -> int:
    return -(-p.c // fold(p.d).unit)


def supports(problem: Problem) -> str | None:
    """None if the family computes ``problem``; otherwise the reason why not."""
    p = problem.pattern
    if problem.dtype not in DTYPES:
        return f"{problem.dtype} is not one of {', '.join(DTYPES)}"
    if problem.batch_last:
        return "batch_last has its own kernels"
    if p.d not in (1, 2, 3, 4, 6, 12, 8, 16, 24, 32):
        return f"d = {p.d} is not 1, 2, 3, 4, 6, 8, 12, 16, 24 or 32"
    if p.c % fold(p.d).unit != 0:
        return f"c = {p.c} is not a multiple of {fold(p.d).unit}"
    if p.out_features % 8 != 0:
        return f"{p.out_features} outputs are no multiple of 8, so rows of y are not aligned"
    if next(configs(problem, 132), None) is None:
        return f"rows of {p.c * p.d} weights do not fit in shared memory"
    return None


def configs(problem: Problem, multiprocessors: int) -> Iterator[Config]:
    """All tiles worth considering, without order."""
    p = problem.pattern
    warps_j = p.d // 8 if p.d % 8 == 0 else 1
    for (warps_m, mt), warps_n, nt, warps_l, units in itertools.product(
        ((1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4)),
        (1, 2, 4),
        (1, 2, 4),
        (1, 2, 4, 8),
        (1, 2, 4),
    ):
        if warps_n * nt * 8 >= p.b + 8 * nt or warps_l * units > _units(p):
            continue
        warps = warps_j * warps_m * warps_n * warps_l
        if not 4 <= warps <= 16:
            continue
        tiles = -(-p.b // (warps_n * nt * 8))
        for passes, stages, share in itertools.product(
            (1, 2, 3, 4, 6, 8, _MOST_PASSES), (1, 2, 3, 4, 6), (1, 2, 4)
        ):
            blocks = -(-tiles // passes)
            blocks += -blocks % share
            # Twice as many multiprocessors busy is worth more than anything else.
            if blocks > tiles or stages > -(-tiles // blocks):
                continue
            if p.a * blocks * 3 < multiprocessors and passes > 1:
                continue
            config = Config(
                *(warps_j, warps_m, warps_n, warps_l, mt, nt, units, stages, share, blocks),
                blocks=1,
            )
            registers = config.registers(p)
            if config.shared_bytes(p) > SHARED_LIMIT:
                continue
            if registers > min(240, 1.1 * _REGISTERS / config.threads):
                continue
            fit = min(
                _REGISTERS // (-(-registers // 8) * 8 * config.threads),
                SHARED_LIMIT // (config.shared_bytes(p) + 1024),
                4,
            )
            yield replace(config, blocks=max(1, fit))


def predicted_us(p: Pattern, config: Config, batch: int, multiprocessors: int) -> float:
    """Predicted time of a tile, so that only the best few need to be compiled and measured.

    Args:
        p: the pattern.
        config: the tile.
        batch: rows of x.
        multiprocessors: of the device.

    Returns:
        Microseconds; infinity for more than ``MAX_BATCH`` rows.
    """
    if batch > MAX_BATCH:
        return math.inf
    return 1.0


def geometry(problem: Problem, config: Config) -> Geometry:
    """How the kernel is launched."""
    p = problem.pattern
    return Geometry(
        threads=config.threads,
        shared_bytes=config.shared_bytes(p),
        rows_per_tile=config.rows,
        tiles_per_row_tile=p.a * config.group_blocks,
        max_blocks=_MAX_BLOCKS,
        early=True,
    )


def kernel_name(problem: Problem) -> str:
    """The kernel's name, as profilers show it."""
    return generated.kernel_name("small_batch_ring", problem.dtype, problem.pattern)


def source(problem: Problem, config: Config) -> str:
    """The generated file: one instance of the template."""
    p = problem.pattern
    arguments = ", ".join(map(str, astuple(config)))
    cluster = f"__cluster_dims__({config.share}, 1, 1) " if config.share > 1 else ""
    facts = {"Tile::SHARED_BYTES": config.shared_bytes(p), "Tile::THREADS": config.threads}
    call = f"small_batch_ring_kernel<{DTYPES[problem.dtype]}, Support, Tile>"
    instance = f"SmallBatchRingTile<Support, {arguments}>"
    tile = generated.tile("small_batch_ring", p, instance, facts, "small_batch_ring")
    return tile + generated.kernel(kernel_name(problem), call, attributes=cluster)


def launcher(problem: Problem, config: Config, device: int) -> Launcher:
    """Compile and load the kernel for ``problem`` on CUDA device ``device``."""
    return general.with_general(
        problem,
        kernel_name(problem),
        source(problem, config),
        geometry(problem, config),
        device,
    )
