"""The fp32 tensor-core family for batch first (csrc/cuda/mma_tf32x3.cuh)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass

from ksopt.kernels import codegen
from ksopt.kernels.families.base import SINGLE, TemplateFamily, register_family
from ksopt.kernels.families.common.cost_terms import overlapped
from ksopt.kernels.families.common.lane_layout import LaneLayout
from ksopt.kernels.families.common.lane_layout import lane_layout as layout_of
from ksopt.kernels.families.common.output_tiles import (
    may_cover,
    padding,
    unsupported_outputs,
)
from ksopt.kernels.problem import SHARED_LIMIT, DeviceSpec, Geometry, Problem
from ksopt.patterns.chain import Pattern

_REGISTERS = 65536  # of a multiprocessor
_LARGEST_INT = 2**31 - 1

# The cost model's constants, of one multiprocessor in a microsecond: a roofline, not a fit. The
# rates of memory, caches and shared memory are those that were fitted for the 16-bit family of the
# same walk (mma16.py); that of the products is read off docs/development: 54 effective TFLOP/s
# of an H200 where d = 1, which splits the fewest values. For 16 of the patterns there, the best
# predicted tile's time is 0.75 to 1.4 times that of the fastest tile measured.
_DRAM_BYTES = 32_300.0
_L2_BYTES = 22_500.0
_SHARED_BYTES = 107_800.0
_STEPS = {True: 215.0, False: 430.0}  # m16n8k8, exact (three products and their splits) or TF32
_STAGE_US = 0.25
_LAUNCH_US = 4.0
_SPLIT = 3.0  # what preparing the operands of a warp's steps costs, in steps
_OVERLAP = 4.0
_FULL_WARPS = 8.0  # with fewer on a multiprocessor, latency shows


def lane_layout(d: int) -> LaneLayout:
    """The layout for ``d``, which is 1, 2, 3, 6 or a multiple of 4."""
    return layout_of(d, 4)


@dataclass(frozen=True)
class Config:
    """Template arguments of ``MmaTf32x3Tile``, in its order and with its meaning."""

    warps_j: int
    warps_m: int
    warps_n: int
    mt: int
    nt: int
    kl: int
    stages: int
    blocks: int
    resident: bool
    max_blocks: int
    """Blocks of the largest launch; not a template argument."""

    @property
    def threads(self) -> int:
        return 32 * self.warps_j * self.warps_m * self.warps_n

    @property
    def rows(self) -> int:
        return self.warps_m * self.mt * 16

    @property
    def outputs(self) -> int:
        return self.warps_n * self.nt * 8

    def columns(self, p: Pattern) -> int:
        """Tiles that together cover all outputs of the same rows."""
        return p.a * (p.d // (self.warps_j * lane_layout(p.d).j)) * -(-p.b // self.outputs)

    def shared_bytes(self, p: Pattern) -> int:
        """Dynamic shared memory of a block."""
        f = lane_layout(p.d)
        width = self.warps_j * f.j
        spread = self.warps_j if p.d % 4 == 0 else f.run
        stage = row_pitch(self.kl * width // 4, spread)
        whole = row_pitch(-(-p.c // f.unit) * f.unit * width // 4, spread)
        rows = self.stages * stage * (self.rows + (0 if self.resident else self.outputs))
        rows += whole * self.outputs if self.resident else 0
        slices = self.warps_m * self.warps_n * slice_chunks(f, self.warps_j, self.nt, spread)
        return (rows + slices) * 16

    def registers(self, p: Pattern) -> int:
        """Registers a thread, roughly: sums, split operands, parts of sums, addresses."""
        f = lane_layout(p.d)
        sums = self.mt * self.nt * f.j * 4
        operands = self.mt * f.j * f.steps * 8 + f.chunks * 4
        return sums + operands + 16 + 38


def unsupported_layout(p: Pattern) -> str | None:
    """Why the fp32 families for batch first do not compute ``p``, or None if they do."""
    if p.d % 4 != 0 and p.d not in (1, 2, 3, 6):
        return f"d = {p.d} is not 1, 2, 3, 6 or a multiple of 4"
    if p.c * p.d % 4 != 0:
        return f"c*d = {p.c * p.d} is not a multiple of 4, so rows of a group are not aligned"
    if max(p.in_features, p.out_features, p.b * p.c * p.d) > _LARGEST_INT:
        return f"{p} has more elements in a row or a group than 32 bits count"
    return unsupported_outputs(p.b)


def row_pitch(chunks: int, spread: int) -> int:
    """``row_pitch`` of mma_tf32x3.cuh."""
    return chunks + ((1 if spread == 2 else 4) - chunks) % 8


def slice_chunks(f: LaneLayout, warps_j: int, nt: int, spread: int) -> int:
    """16-byte chunks of the buffer through which a warp's results leave."""
    preferred = (4, 2, 1) if f.j == 1 else (2, 1) if f.j < 4 else (1,)
    slice_n = next(n for n in preferred if nt % n == 0)
    return 16 * row_pitch(slice_n * 2 * warps_j * f.j, spread)


@register_family
class MmaTf32x3(TemplateFamily[Config]):
    """Products by m16n8k8 TF32 instructions: three for fp32 accuracy, or one."""

    name = "mma_tf32x3"
    template = "mma_tf32x3.cuh"
    dtypes = SINGLE
    layout = "batch_first"
    splits = True
    takes_epilogues = True

    def unsupported_shape(self, problem: Problem, device: DeviceSpec) -> str | None:
        return unsupported_layout(problem.pattern)

    def configs(self, problem: Problem, device: DeviceSpec) -> Iterator[Config]:
        p = problem.pattern
        f = lane_layout(p.d)
        warps_js = [j for j in (1, 2) if p.d % (4 * j) == 0] if p.d % 4 == 0 else [1]
        kls = [kl for kl in (8, 16, 32, 64) if kl % f.unit == 0 and kl <= max(f.unit, p.c)]
        for warps_j, warps_m, warps_n, mt, nt in itertools.product(
            warps_js, (1, 2, 4, 8), (1, 2, 4), (1, 2), (1, 2, 3, 4, 6, 8, 12, 16)
        ):
            if warps_j * warps_m * warps_n not in (4, 8) or not may_cover(p.b, warps_n * nt * 8):
                continue
            shape = (warps_j, warps_m, warps_n, mt, nt)
            least = Config(*shape, f.unit, 2, 1, False, 0)
            columns, registers = least.columns(p), least.registers(p)
            for kl, stages, blocks, resident in itertools.product(
                kls, (2, 3, 4), (1, 2, 3), (False, True)
            ):
                if registers > min(256, _REGISTERS // (least.threads * blocks)):
                    continue
                slots = device.multiprocessors * blocks
                max_blocks = max(1, slots // columns) * columns if resident else slots
                config = Config(*shape, kl, stages, blocks, resident, max_blocks)
                if config.shared_bytes(p) * blocks <= SHARED_LIMIT:
                    yield config

    def predicted_us(
        self, problem: Problem, config: Config, batch: int, device: DeviceSpec
    ) -> float:
        p = problem.pattern
        warps = config.threads // 32 * config.blocks
        pace = min(1.0, (warps / _FULL_WARPS) ** 0.4)
        step_us = (1 + _SPLIT / (config.mt * config.nt)) / (_STEPS[problem.exact] * pace)
        # Fragments of x and of the weight for one step, reused mt and nt times.
        step_bytes = 256 / config.mt + 512 / config.nt
        f = lane_layout(p.d)
        columns = config.columns(p)
        tiles = -(-batch // config.rows) * columns
        slots = device.multiprocessors * config.blocks
        blocks = min(config.max_blocks, tiles)
        rounds = -(-tiles // blocks) * -(-blocks // slots)
        busy = tiles / (rounds * slots)  # share of the multiprocessors' time that has work

        x_bytes, y_bytes = 4 * batch * p.in_features, 4 * batch * p.out_features
        # 16 bytes of a row cost the sector of 32.
        waste = 2.0 if p.d % 4 == 0 and p.d > 4 and config.warps_j == 1 else 1.0
        x_reads = -(-p.b // config.outputs) * waste
        width = config.warps_j * f.j
        weight_bytes = 4 * config.outputs * p.c * width
        streamed = 0 if config.resident else tiles * weight_bytes
        steps = batch * p.nnz / 1024 * padding(p.b, config.outputs)
        demands = (
            (x_bytes + y_bytes) / _DRAM_BYTES,
            (x_bytes * x_reads + y_bytes + streamed) / _L2_BYTES,
            (steps * step_bytes + x_bytes * x_reads + y_bytes + streamed) / _SHARED_BYTES,
            steps * step_us,
        )
        streaming = overlapped(demands, _OVERLAP) / device.multiprocessors
        stages = rounds * -(-(-(-p.c // f.unit) * f.unit) // config.kl)
        first_weights = weight_bytes / _L2_BYTES if config.resident else 0.0
        return (
            math.hypot(streaming / max(busy, 1e-3), stages * _STAGE_US) + first_weights + _LAUNCH_US
        )

    def geometry(self, problem: Problem, config: Config) -> Geometry:
        return Geometry(
            threads=config.threads,
            shared_bytes=config.shared_bytes(problem.pattern),
            rows_per_tile=config.rows,
            tiles_per_row_tile=config.columns(problem.pattern),
            max_blocks=config.max_blocks,
            early=True,
        )

    def source(self, problem: Problem, config: Config) -> str:
        p = problem.pattern
        arguments = ", ".join(str(int(value)) for value in astuple(config)[:-1])
        facts = {"Tile::SHARED_BYTES": config.shared_bytes(p)}
        instance = f"MmaTf32x3Tile<Support, {arguments}, {3 if problem.exact else 1}>"
        tile = codegen.tile(self.template, p, instance, facts, self.name)
        call = "mma_tf32x3_kernel<Support, Tile>"
        return tile + codegen.kernel(self.kernel_name(problem), call, after=problem.epilogue)
