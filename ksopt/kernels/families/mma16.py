"""The 16-bit tensor-core family for batch first (csrc/cuda/mma16.cuh)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass

from ksopt.kernels import codegen
from ksopt.kernels.families.base import HALF, TemplateFamily, register_family
from ksopt.kernels.families.common.lane_layout import lane_layout
from ksopt.kernels.families.common.output_tiles import (
    may_cover,
    padding,
    unsupported_outputs,
)
from ksopt.kernels.problem import SHARED_LIMIT, DeviceSpec, Geometry, Problem
from ksopt.patterns.chain import Pattern

_REGISTERS = 65536  # of a multiprocessor

# The cost model's constants, for one multiprocessor: fitted to 70 random tiles of each of 18 of the
# paper's patterns (fp16, batch 25,088, one H200). ``docs/experiments/tiles.py`` measures such
# tiles, and how much slower the best predicted ones are than the best (docs/development).
_DRAM_BYTES_US = 32_300.0  # per multiprocessor and microsecond
_L2_BYTES_US = 22_500.0
_SHARED_BYTES_US = 107_800.0
_WEIGHT_BYTES_US = 20_000.0  # a block's weights, read and regrouped before it starts
_TENSOR_STEPS_US = 530.0  # m16n8k16 products
_STEP_US = 0.21  # a stage's barrier and latency
_LAUNCH_US = 7.5
_FULL_WARPS = 5.0  # with fewer on a multiprocessor, shared memory is not busy all the time


@dataclass(frozen=True)
class Config:
    """Template arguments of ``Mma16Tile``, in its order and with its meaning."""

    warps_j: int
    warps_m: int
    warps_n: int
    mt: int
    nt: int
    kl: int
    stages: int
    blocks: int
    persistent_ctas: int
    """Blocks that share a column's rows, in the largest launch; not a template argument."""

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
        """Blocks that together cover all outputs of the same rows."""
        return p.a * (p.d // (self.warps_j * lane_layout(p.d).j)) * -(-p.b // self.outputs)

    def shared_bytes(self, p: Pattern) -> int:
        """Dynamic shared memory of a block."""
        f = lane_layout(p.d)
        units = -(-p.c // f.unit)
        weights = self.warps_j * units * (self.outputs // 8) * (f.j * f.steps // 2) * 512
        chunks = self.kl * self.warps_j * f.j // 8
        spread = self.warps_j if p.d % 8 == 0 else f.run
        out_chunks = self.outputs * self.warps_j * f.j // 8
        bank = 1 if spread == 2 else 4
        pitch = chunks + (bank - chunks) % 8
        out_pitch = out_chunks + (bank - out_chunks) % 8
        return weights + self.rows * (self.stages * pitch + out_pitch) * 16

    def registers(self, p: Pattern) -> int:
        """Registers a thread, roughly: sums, operands, and what addresses take."""
        f = lane_layout(p.d)
        sums = self.mt * self.nt * f.j * 4
        operands = self.mt * f.j * f.steps * 4 + f.chunks * 4 + 4
        return sums + operands + 40


@register_family
class Mma16(TemplateFamily[Config]):
    """Products by m16n8k16 instructions, each block with its weights in shared memory."""

    name = "mma16"
    template = "mma16.cuh"
    dtypes = HALF
    layout = "batch_first"
    takes_epilogues = True
    takes_float32_results = True

    def unsupported_shape(self, problem: Problem, device: DeviceSpec) -> str | None:
        p = problem.pattern
        if p.d % 8 != 0 and p.d not in (1, 2, 3, 4, 6, 12):
            return f"d = {p.d} is not 1, 2, 3, 4, 6, 12 or a multiple of 8"
        if p.c * p.d % 8 != 0:
            return f"c*d = {p.c * p.d} is not a multiple of 8, so rows of a group are not aligned"
        reason = unsupported_outputs(p.b)
        if reason is not None:
            return reason
        if next(self.configs(problem, device), None) is None:
            return "no tile's weights fit in shared memory"
        return None

    def configs(self, problem: Problem, device: DeviceSpec) -> Iterator[Config]:
        p = problem.pattern
        f = lane_layout(p.d)
        warps_js = [j for j in (1, 2, 3) if p.d % (8 * j) == 0] if p.d % 8 == 0 else [1]
        length = -(-p.c // f.unit) * f.unit
        kls = [kl for kl in (16, 32, 48, 64, 96, 128) if kl % f.unit == 0 and length % kl == 0]
        for warps_j, warps_m, warps_n, mt, nt in itertools.product(
            warps_js, (1, 2, 4), (1, 2, 3, 4, 8), (1, 2), range(1, 9)
        ):
            warps = warps_j * warps_m * warps_n
            outputs = warps_n * nt * 8
            if not 4 <= warps <= 16 or not may_cover(p.b, outputs):
                continue
            shape = (warps_j, warps_m, warps_n, mt, nt)
            least = Config(*shape, f.unit, 3, 1, 1)
            if least.shared_bytes(p) > SHARED_LIMIT:
                continue
            registers, columns = least.registers(p), least.columns(p)
            for kl, stages, blocks in itertools.product(kls, (3, 4, 6), (1, 2, 3)):
                if registers > min(255, _REGISTERS // (least.threads * blocks)):
                    continue
                persistent_ctas = max(1, device.multiprocessors * blocks // columns)
                config = Config(*shape, kl, stages, blocks, persistent_ctas)
                if config.shared_bytes(p) * blocks <= SHARED_LIMIT:
                    yield config

    def predicted_us(
        self, problem: Problem, config: Config, batch: int, device: DeviceSpec
    ) -> float:
        p = problem.pattern
        f = lane_layout(p.d)
        columns = config.columns(p)
        tiles = -(-batch // config.rows) * columns
        slots = device.multiprocessors * config.blocks
        blocks = min(columns * config.persistent_ctas, tiles)
        waves = -(-blocks // slots)
        busy = device.multiprocessors * blocks / (waves * slots)

        x_bytes, y_bytes = 2 * batch * p.in_features, 2 * batch * p.out_features
        # Every block reads x for its own outputs; 16 bytes of a row cost the sector of 32.
        sector_waste = {1: 2.0, 2: 1.0, 3: 1.5}[config.warps_j] if p.d % 8 == 0 and p.d > 8 else 1.0
        x_reads = -(-p.b // config.outputs) * sector_waste
        steps = batch * p.nnz / 2048 * padding(p.b, config.outputs)
        step_bytes = 512 / config.nt + 256 / config.mt  # fragments of x and of the weight
        warps = config.threads // 32 * config.blocks
        streaming = max(
            (x_bytes + y_bytes) / _DRAM_BYTES_US,
            (x_bytes * x_reads + y_bytes) / _L2_BYTES_US,
            (steps * step_bytes + x_bytes * x_reads + y_bytes)
            / (_SHARED_BYTES_US * min(1.0, warps / _FULL_WARPS)),
            steps / _TENSOR_STEPS_US,
        )
        stages = -(-tiles // blocks) * waves * -(-(-(-p.c // f.unit) * f.unit) // config.kl)
        weight_bytes = 2 * config.outputs * p.c * config.warps_j * f.j
        return (
            math.hypot(streaming / busy, stages * _STEP_US)
            + waves * weight_bytes / _WEIGHT_BYTES_US
            + _LAUNCH_US
        )

    def geometry(self, problem: Problem, config: Config) -> Geometry:
        columns = config.columns(problem.pattern)
        return Geometry(
            threads=config.threads,
            shared_bytes=config.shared_bytes(problem.pattern),
            rows_per_tile=config.rows,
            tiles_per_row_tile=columns,
            max_blocks=config.persistent_ctas * columns,
            early=True,
        )

    def source(self, problem: Problem, config: Config) -> str:
        p = problem.pattern
        arguments = ", ".join(map(str, astuple(config)[:-1]))
        facts = {"Tile::SHARED_BYTES": config.shared_bytes(p)}
        call = f"mma16_kernel<{self.dtypes[problem.dtype]}, Support, Tile>"
        tile = codegen.tile(self.template, p, f"Mma16Tile<Support, {arguments}>", facts, self.name)
        return tile + codegen.kernel(self.kernel_name(problem), call, after=problem.epilogue)
