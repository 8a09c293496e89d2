"""The 16-bit family for a few rows of x, batch first (csrc/cuda/decode_mma16.cuh)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace

from ksopt.kernels import codegen
from ksopt.kernels.families.base import HALF, TemplateFamily, register_family
from ksopt.kernels.families.common.lane_layout import lane_layout
from ksopt.kernels.problem import SHARED_LIMIT, DeviceSpec, Geometry, Problem
from ksopt.patterns.chain import Pattern

MAX_BATCH = 128
"""More rows than this are computed correctly, but other families are faster."""

_REGISTERS = 65536  # of a multiprocessor
_MAX_THREADS = 2048  # of a multiprocessor
_MAX_BLOCKS = 2**30  # never reached: its outputs would not fit into any device's memory

# The cost model's constants: fitted to about 30 tiles of each of 13 patterns at 1, 16 and 64 rows
# (bfloat16, one H200, cold weights, docs/development). Among those tiles, the best of the four
# that it ranks first takes a median 1.01 times as long as the fastest, at most 1.23 times.
_LAUNCH_US = 1.05
_DRAM_BYTES_US = 3_500_000.0
_WEIGHT_BYTES_US = 106_000.0  # into one multiprocessor
_COPIES_US = 32.5  # 16-byte copies of x that a thread makes in a microsecond
_ROUND_US = 0.16  # from asking for weights to using them
_WAVE_US = 0.78  # a block's life beside what is counted otherwise
_TENSOR_STEPS_US = 455.0  # m16n8k16 products of a multiprocessor
_SUM_BYTES_US = 54_000.0  # sums written to shared memory and added
_REMOTE_BYTES_US = 31_000.0  # read from other blocks of a cluster
_CLUSTER_US, _CLUSTER_DOUBLED_US = 0.54, 0.09  # two cluster barriers; and for each doubling
_WIDE_US, _WIDE_BYTES_US = 0.57, 70_000.0  # regrouping where 8 divides d: always, and x's bytes


@dataclass(frozen=True)
class Config:
    """Template arguments of ``DecodeMma16Tile``, in its order and with its meaning."""

    warps_j: int
    warps_m: int
    warps_n: int
    warps_l: int
    mt: int
    nt: int
    units: int
    cluster: int
    blocks: int

    @property
    def capability(self) -> tuple[int, int]:
        """The least compute capability that can run it: clusters came with 9.0."""
        return (9, 0) if self.cluster > 1 else (8, 0)

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.warps_j * self.warps_m * self.warps_n * self.warps_l

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    @property
    def rows(self) -> int:
        """Rows of x that a block takes."""
        return self.warps_m * self.mt * 16

    @property
    def outputs(self) -> int:
        """Values of k that a block owns."""
        return self.warps_n * self.nt * 8

    def block_units(self, p: Pattern) -> int:
        """Units of l that a block sums over."""
        return -(-_units(p) // self.cluster)

    def columns(self, p: Pattern) -> int:
        """Tiles that together cover all outputs of the same rows."""
        return p.a * (p.d // (self.warps_j * lane_layout(p.d).j)) * -(-p.b // self.outputs)

    def features(self, p: Pattern) -> int:
        """Outputs of one row that a block owns."""
        return self.outputs * self.warps_j * lane_layout(p.d).j

    def shared_bytes(self, p: Pattern) -> int:
        """Dynamic shared memory of a block."""
        f = lane_layout(p.d)
        chunks = self.block_units(p) * f.unit * self.warps_j * f.j // 8
        bank = 1 if (self.warps_j if p.d % 8 == 0 else f.run) == 2 else 4
        pitch = chunks + (bank - chunks) % 8
        sum_pitch = self.features(p) + (4 if p.d % 8 == 0 else 8)
        return max(self.rows * pitch * 16, self.warps_l * self.rows * sum_pitch * 4)

    def in_flight(self, p: Pattern) -> int:
        """16-byte loads of a thread that are in flight at a time."""
        return self.units * self.nt * lane_layout(p.d).chunks

    def registers(self, p: Pattern) -> int:
        """Registers a thread, roughly: sums, weights, operands, and what addresses take."""
        f = lane_layout(p.d)
        sums = self.mt * self.nt * f.j * 4
        operands = f.j * f.steps * 4 + f.chunks * 4
        return sums + self.in_flight(p) * 4 + operands + 32


def _units(p: Pattern) -> int:
    return -(-p.c // lane_layout(p.d).unit)


@register_family
class DecodeMma16(TemplateFamily[Config]):
    """Products by m16n8k16 instructions for a few rows of x, summed by clusters of blocks."""

    name = "decode_mma16"
    template = "decode_mma16.cuh"
    dtypes = HALF
    layout = "batch_first"
    max_batch = MAX_BATCH
    takes_epilogues = True
    takes_float32_results = True

    def unsupported_shape(self, problem: Problem, device: DeviceSpec) -> str | None:
        p = problem.pattern
        if p.d % 8 != 0 and p.d not in (1, 2, 3, 4, 6, 12):
            return f"d = {p.d} is not 1, 2, 3, 4, 6, 12 or a multiple of 8"
        if p.c * p.d % 8 != 0:
            return (
                f"c*d = {p.c * p.d} is not a multiple of 8, so rows of the weight are not aligned"
            )
        if next(self.configs(problem, device), None) is None:
            return f"a sum over c = {p.c} of 16 rows does not fit in shared memory"
        return None

    def configs(self, problem: Problem, device: DeviceSpec) -> Iterator[Config]:
        p = problem.pattern
        warps_js = [j for j in (1, 2, 3, 4) if p.d % (8 * j) == 0] if p.d % 8 == 0 else [1]
        if p.d % 16 == 0:
            warps_js.remove(1)  # half a sector of 32 bytes costs as much as all of it
        for warps_j, (warps_m, mt), warps_n, nt in itertools.product(
            warps_js, ((1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4)), (1, 2, 4), (1, 2, 4)
        ):
            if warps_n * nt * 8 >= p.b + 8 * nt:
                continue
            for warps_l, units, cluster in itertools.product(
                (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8)
            ):
                warps = warps_j * warps_m * warps_n * warps_l
                block_units = -(-_units(p) // cluster)
                if not 2 <= warps <= 16 or warps_l * units > max(block_units + units - 1, warps_l):
                    continue
                if warps_l > block_units or (cluster > 1 and _units(p) < 2 * cluster):
                    continue
                config = Config(
                    *(warps_j, warps_m, warps_n, warps_l, mt, nt, units, cluster), blocks=1
                )
                registers = config.registers(p)
                # The estimate is conservative: a few registers more than the limit do not spill.
                most = min(240, 1.1 * _REGISTERS / config.threads)
                if config.shared_bytes(p) > SHARED_LIMIT or registers > most:
                    continue
                fit = min(
                    _REGISTERS // (-(-registers // 8) * 8 * config.threads),
                    SHARED_LIMIT // (config.shared_bytes(p) + 1024),
                    4,
                )
                tiles = config.columns(p) * cluster
                # As many as fit, but registers are not held back for blocks that never come.
                yield replace(config, blocks=max(1, min(fit, -(-tiles // device.multiprocessors))))

    def fits(self, problem: Problem, config: Config, device: DeviceSpec) -> bool:
        return config.capability <= device.capability and super().fits(problem, config, device)

    def predicted_us(
        self, problem: Problem, config: Config, batch: int, device: DeviceSpec
    ) -> float:
        p = problem.pattern
        if batch > MAX_BATCH:
            return math.inf
        f = lane_layout(p.d)
        shared = config.shared_bytes(p)
        blocks = -(-batch // config.rows) * config.columns(p) * config.cluster
        share = -(-blocks // device.multiprocessors)  # blocks of the busiest multiprocessor
        registers = -(-min(255, config.registers(p)) // 8) * 8 * config.threads
        fit = min(
            _REGISTERS // registers, SHARED_LIMIT // (shared + 1024), _MAX_THREADS // config.threads
        )
        waves = -(-share // max(1, min(share, fit)))

        rows, jc, l = min(batch, config.rows), config.warps_j * f.j, config.block_units(p) * f.unit
        weight_bytes = 2 * config.outputs * jc * l * (2 if jc == 8 < p.d else 1)  # whole sectors
        x_bytes, sum_bytes = 2 * rows * jc * l, 4 * rows * config.features(p)
        us = _LAUNCH_US + _WAVE_US * (waves - 1)
        us += max(2 * p.nnz / _DRAM_BYTES_US, share * weight_bytes / _WEIGHT_BYTES_US)
        us += waves * -(-config.block_units(p) // (config.warps_l * config.units)) * _ROUND_US
        us += waves * x_bytes / (16 * config.threads) / _COPIES_US
        us += share * config.rows * config.outputs * jc * l / 2048 / _TENSOR_STEPS_US
        us += share * sum_bytes * config.warps_l / _SUM_BYTES_US
        if config.cluster > 1:
            us += waves * (_CLUSTER_US + _CLUSTER_DOUBLED_US * math.log2(config.cluster))
            us += share * sum_bytes / _REMOTE_BYTES_US
        if p.d % 8 == 0:
            us += _WIDE_US + share * x_bytes / _WIDE_BYTES_US
        return us

    def geometry(self, problem: Problem, config: Config) -> Geometry:
        return Geometry(
            threads=config.threads,
            shared_bytes=config.shared_bytes(problem.pattern),
            rows_per_tile=config.rows,
            tiles_per_row_tile=config.columns(problem.pattern) * config.cluster,
            max_blocks=_MAX_BLOCKS,
            early=True,
        )

    def source(self, problem: Problem, config: Config) -> str:
        p = problem.pattern
        arguments = ", ".join(map(str, astuple(config)))
        cluster = f"__cluster_dims__({config.cluster}, 1, 1) " if config.cluster > 1 else ""
        facts = {"Tile::SHARED_BYTES": config.shared_bytes(p)}
        call = f"decode_mma16_kernel<{self.dtypes[problem.dtype]}, Support, Tile>"
        tile = codegen.tile(
            self.template, p, f"DecodeMma16Tile<Support, {arguments}>", facts, self.name
        )
        return tile + codegen.kernel(
            self.kernel_name(problem), call, attributes=cluster, after=problem.epilogue
        )
