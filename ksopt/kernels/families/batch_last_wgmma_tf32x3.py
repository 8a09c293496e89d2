"""The fp32 family for batch last on Hopper's tensor cores (batch_last_wgmma_tf32x3.cuh)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace

from torch import Tensor

from ksopt.kernels import codegen, packing_launcher
from ksopt.kernels.families import batch_last_mma_tf32x3
from ksopt.kernels.families.base import SINGLE, register_family
from ksopt.kernels.families.common import batch_last
from ksopt.kernels.families.common.batch_last import output_tiles
from ksopt.kernels.families.common.cost_terms import chains_cycles, overlapped
from ksopt.kernels.families.common.packed_weight import PackedFamily
from ksopt.kernels.launcher import MakeLauncher
from ksopt.kernels.packing_launcher import PackedLauncher
from ksopt.kernels.problem import SHARED_LIMIT, DeviceSpec, Geometry, Problem
from ksopt.patterns.chain import Pattern

_OUTPUT_TILES = (1, 2, 3, 4, 6, 8, 12, 16)  # for which wgmma_tf32.cuh has an instruction
_FEWEST_OUTPUT_TILES = 6  # of a warpgroup, where b has more: products of fewer are never faster
_SHAPES = ((1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1))  # warpgroups: of outputs, of columns
_BARRIER_BYTES = 128
_LOADER_THREADS, _LOADER_REGISTERS = 128, 24
_REGISTERS = 65536  # of a multiprocessor
_MOST_STAGES = 8
_STAGE_BYTES = (4096, 65536)  # the least and most of a stage that are worth a barrier
_LONG_SUM = 128
"""From this many l on, exact products may leave sums of 16, not only 8, to the tensor cores:
cuBLAS's own error is larger there (docs/development/fp32.md)."""

# Of one multiprocessor of an H200, in bytes, cycles and microseconds, fitted together to 324 tiles
# of 24 of the paper's patterns (exact products, batch 25,088, as many stages as fit): half of them
# are within 6 %, and the fastest of a pattern's three best predicted was a mean 1.3 %, at worst
# 13 % slower than the fastest of its tiles.
_CYCLES_US = 1755.0
_TENSOR_CYCLES_US = 2130.0
_DRAM_BYTES_US = 38_060.0
_SHARED_BYTES_US = 180_900.0  # x, weights, and what the tensor cores read
_WEIGHT_BYTES_US = 54_200.0  # a column's resident weights
_COLUMN_US = 0.93  # latency of a change of column
_LATENCY_US = 1.05  # of the loads that fill the ring
_CHAIN_CYCLES = 122.0  # between two chains of products
_PENDING = 0.5  # the share of that which a running chain hides
_STAGE_CYCLES = 152.0
_ROW_CYCLES = 25.5  # a row of a stage, which one instruction copies
_STORED_BYTES_CYCLE = 16.25  # of a warpgroup
_LAUNCH_US = 8.4
_OVERLAP = 2.58

_STEP_CYCLES = 0.5  # of the tensor cores for 64 columns, 8 l and an output, each of three products


@dataclass(frozen=True)
class Config:
    """Template arguments of ``BatchLastWgmmaTf32x3Tile``, in its order and with its meaning."""

    groups_n: int
    groups_m: int
    mt: int
    nt: int
    kl: int
    stages: int
    resident: bool
    chain: int
    pending: int
    groups: int
    """Groups of blocks that share the work, in the largest launch; not a template argument."""

    @property
    def blocks(self) -> int:
        """Blocks that fit on a multiprocessor."""
        return 1

    @property
    def multipliers(self) -> int:
        """Warpgroups that multiply."""
        return self.groups_n * self.groups_m

    @property
    def threads(self) -> int:
        """Threads a block, with the warpgroup that loads."""
        return _LOADER_THREADS + 128 * self.multipliers

    @property
    def rows(self) -> int:
        """Columns of x and y, which are rows of the batch, in a tile: BM."""
        return 64 * self.groups_m * self.mt

    @property
    def outputs(self) -> int:
        return 8 * self.groups_n * self.nt

    def stages_per_tile(self, p: Pattern) -> int:
        return -(-p.c // self.kl)

    def layer_bytes(self, exact: bool = True) -> int:
        """Packed weights of four l of a column."""
        return (2 if exact else 1) * self.outputs * 16

    def column_bytes(self, p: Pattern, exact: bool = True) -> int:
        """Packed weights of a column and a block's outputs, with zeros at the end."""
        return self.stages_per_tile(p) * self.kl // 4 * self.layer_bytes(exact)

    def packed_elements(self, p: Pattern, exact: bool = True) -> int:
        """Elements of the packed weight."""
        return p.a * p.d * output_tiles(p, self.outputs) * self.column_bytes(p, exact) // 4

    def stage_bytes(self, exact: bool = True) -> int:
        """A stage: rows of x, and if streamed, layers of the weights."""
        weights = 0 if self.resident else self.kl // 4 * self.layer_bytes(exact)
        return self.kl * (self.rows + 8) * 4 + weights

    def shared_bytes(self, p: Pattern, exact: bool = True) -> int:
        """Dynamic shared memory of a block."""
        weights = self.column_bytes(p, exact) if self.resident else 0
        return _BARRIER_BYTES + weights + self.stages * self.stage_bytes(exact)

    def registers(self) -> int:
        """Registers a thread, roughly: sums, parts of them, operands, addresses."""
        parts = (self.pending + 1) * (self.nt * 4 + self.chain * 8)
        return self.mt * self.nt * 4 + parts + self.chain * 4 * self.mt + 12

    @property
    def register_limit(self) -> int:
        """``MULTIPLIER_REGISTERS`` of batch_last_wgmma_tf32x3.cuh."""
        at_start = _REGISTERS // self.threads // 8 * 8 * self.threads
        left = at_start - _LOADER_REGISTERS * _LOADER_THREADS
        return min(240, left // (128 * self.multipliers) // 8 * 8)


def _stages(p: Pattern, config: Config) -> int:
    """The number of stages: as many as fit, for the most loads of x in flight."""
    return min(_MOST_STAGES, (SHARED_LIMIT - config.shared_bytes(p)) // config.stage_bytes())


def _compiles(p: Pattern, config: Config) -> bool:
    """Whether ptxas 13.0 compiles all products: of other tiles it drops some silently."""
    return config.mt == 1 or config.pending == 1 or config.stages_per_tile(p) > 1


def _worth_a_stage(config: Config) -> bool:
    least, most = _STAGE_BYTES
    return config.kl == 8 or least <= config.stage_bytes() <= most


class ColumnsLauncher(PackedLauncher):
    """(x, weight) -> y, also with a weight that is packed already."""

    def takes(self, x: Tensor) -> bool:
        """Whether rows of x and y begin at multiples of 16 bytes; the batch may have many dims."""
        feature, *batch = x.stride()
        rows = 1
        for size, stride in zip(reversed(x.shape[1:]), reversed(batch), strict=True):
            if size != 1 and stride != rows:
                return False
            rows *= size
        return rows % 4 == 0 and feature % 4 == 0 and x.data_ptr() % 16 == 0


@register_family
class BatchLastWgmmaTf32x3(PackedFamily[Config]):
    """Products by TF32 warpgroup instructions: three for fp32 accuracy, or one."""

    name = "batch_last_wgmma_tf32x3"
    template = "batch_last_wgmma_tf32x3.cuh"
    dtypes = SINGLE
    layout = "batch_last"
    capability = (9, 0)
    capability_only = True
    splits = True
    packs_from_d = 1
    launcher_class = ColumnsLauncher

    def unsupported_shape(self, problem: Problem, device: DeviceSpec) -> str | None:
        # The family that takes rows that are not aligned must support the problem as well.
        return batch_last_mma_tf32x3.BatchLastMmaTf32x3().unsupported_shape(problem, device)

    def configs(self, problem: Problem, device: DeviceSpec) -> Iterator[Config]:
        p = problem.pattern
        outputs8 = -(-p.b // 8)
        chains = (1, 2) if p.c >= _LONG_SUM else (1,)
        for (groups_n, groups_m), mt, nt, chain, pending in itertools.product(
            _SHAPES, (1, 2), _OUTPUT_TILES, chains, (0, 1)
        ):
            tiles = output_tiles(p, 8 * groups_n * nt)
            # Outputs that do not exist are computed too: few of them, or none where b is small.
            if (tiles * groups_n * nt - outputs8) * 4 > outputs8:
                continue
            if nt < _FEWEST_OUTPUT_TILES and tiles > 1:
                continue
            whole = 8 * chain  # l that are multiplied at a time
            groups = max(1, device.multiprocessors // tiles)
            lengths = (16, 24, 32, 48, 64) if -(-p.c // whole) * whole % 16 == 0 else (8, 24)
            for kl, resident in itertools.product(lengths, (False, True)):
                if kl % whole or -(-p.c // kl) * kl != -(-p.c // whole) * whole:
                    continue
                config = Config(
                    *(groups_n, groups_m, mt, nt, kl, 0, resident, chain, pending, groups)
                )
                if config.registers() > config.register_limit or not _compiles(p, config):
                    continue
                config = replace(config, stages=_stages(p, config))
                if config.stages >= 2 and _worth_a_stage(config):
                    yield config

    def predicted_us(
        self, problem: Problem, config: Config, batch: int, device: DeviceSpec
    ) -> float:
        p = problem.pattern
        tiles, columns = output_tiles(p, config.outputs), p.a * p.d
        items = -(-batch // config.rows) * columns
        groups = min(config.groups, items)
        rounds = -(-items // groups) * -(-groups * tiles // device.multiprocessors)

        x_bytes = 4 * config.rows * p.c
        y_bytes = 4 * config.rows * min(config.outputs, p.b)
        weight_bytes = config.column_bytes(p, problem.exact)
        products, outputs = 3 if problem.exact else 1, config.nt * 8
        stages = config.stages_per_tile(p)
        steps = stages * config.kl // 8 * config.mt
        step_cycles = products * _STEP_CYCLES * outputs
        # Chains of products that a warpgroup computes one after the other, and what it stores then.
        hidden = 1 + _PENDING * config.pending
        alone = chains_cycles(steps, config.chain, step_cycles, _CHAIN_CYCLES, hidden)
        alone += stages * _STAGE_CYCLES + y_bytes / _STORED_BYTES_CYCLE
        operands = steps * config.multipliers * products * 32 * outputs
        through_shared = x_bytes * (1 + config.groups_n) + operands
        if not config.resident:
            through_shared += weight_bytes
        in_flight = (config.stages - 1) * config.kl * config.rows * 4
        demands = (
            (x_bytes / tiles + y_bytes) / _DRAM_BYTES_US,
            through_shared / _SHARED_BYTES_US,
            x_bytes * _LATENCY_US / in_flight,
            config.multipliers * steps * step_cycles / _TENSOR_CYCLES_US,
            alone / _CYCLES_US,
            stages * config.kl * _ROW_CYCLES / _CYCLES_US,
        )
        tile_us = overlapped(demands, _OVERLAP)
        weights_us = 0.0
        if config.resident:
            weights_us = (columns / groups + 1) * (_COLUMN_US + weight_bytes / _WEIGHT_BYTES_US)
        return float(rounds * tile_us + weights_us + _LAUNCH_US)

    def geometry(self, problem: Problem, config: Config) -> Geometry:
        p, c = problem.pattern, config
        shared = c.shared_bytes(p, problem.exact)
        return batch_last.geometry(p, c.threads, shared, c.rows, c.outputs, c.groups)

    def source(self, problem: Problem, config: Config) -> str:
        call = "batch_last_wgmma_tf32x3_kernel<Support, Tile>"
        kernel = codegen.kernel(self.kernel_name(problem), call, bounds="Tile::THREADS, 1")
        return self._tile(problem, config) + kernel

    def packed_elements(self, problem: Problem, config: Config) -> int:
        return config.packed_elements(problem.pattern, problem.exact)

    def packed_form(self, problem: Problem, config: Config) -> str:
        layers = config.stages_per_tile(problem.pattern) * config.kl // 4
        return f"batch_last_wgmma_tf32x3 {config.outputs} {layers} {problem.exact}"

    def pack_geometry(self, problem: Problem, config: Config) -> Geometry:
        # A thread writes four l of one output, of all halves.
        tasks = config.packed_elements(problem.pattern, problem.exact) // (
            8 if problem.exact else 4
        )
        return packing_launcher.geometry_of(tasks)

    def pack_source(self, problem: Problem, config: Config) -> str:
        name, call = self.pack_name(problem), "batch_last_mma_tf32x3_pack_kernel<Support, Tile>"
        kernel = codegen.kernel(name, call, bounds=str(packing_launcher.THREADS))
        return self._tile(problem, config) + kernel

    def _tile(self, problem: Problem, config: Config) -> str:
        p = problem.pattern
        arguments = ", ".join(str(int(value)) for value in astuple(config)[:-1])
        facts = {
            "Tile::SHARED_BYTES": config.shared_bytes(p, problem.exact),
            "Tile::MULTIPLIER_REGISTERS": config.register_limit,
            "int64(Tile::COLUMNS) * Tile::OUTPUT_TILES * Tile::COLUMN_BYTES": 4
            * config.packed_elements(p, problem.exact),
        }
        instance = f"BatchLastWgmmaTf32x3Tile<Support, {arguments}, {3 if problem.exact else 1}>"
        return codegen.tile(self.template, p, instance, facts, self.name)

    def fallback(self, problem: Problem, config: Config, device_index: int) -> MakeLauncher | None:
        return functools.partial(batch_last_mma_tf32x3.shifted_launcher, problem, device_index)
