"""The fp32 family for batch first on Hopper's tensor cores (csrc/cuda/wgmma_tf32x3.cuh)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace

from ksopt.kernels import codegen, packing_launcher
from ksopt.kernels.families.base import SINGLE, register_family
from ksopt.kernels.families.common.cost_terms import chains_cycles, overlapped
from ksopt.kernels.families.common.lane_layout import LaneLayout
from ksopt.kernels.families.common.output_tiles import may_cover
from ksopt.kernels.families.common.packed_weight import PackedFamily
from ksopt.kernels.families.mma_tf32x3 import (
    lane_layout,
    row_pitch,
    slice_chunks,
    unsupported_layout,
)
from ksopt.kernels.problem import SHARED_LIMIT, DeviceSpec, Geometry, Problem
from ksopt.patterns.chain import Pattern

_BARRIER_BYTES = 256
_STAGES = (8, 6, 4, 3, 2)
_LONG_SUM = 128
"""From this many l on, exact products may leave sums of 16, not only 8, to the tensor cores:
cuBLAS's own error is larger there (docs/development)."""

# Of one multiprocessor of an H200, in bytes, cycles and microseconds, fitted to 298 tiles of 47 of
# the paper's patterns (exact products, batch 25,088, as many stages as fit): the fastest of a
# pattern's three best predicted was a mean 0.3 %, at worst 6 % slower than the fastest of its
# tiles.
_CYCLES_US = 1755.0
_TENSOR_CYCLES_US = 1457.0
_DRAM_BYTES_US = 31_800.0
_L2_BYTES_US = 54_900.0
_CHAIN_CYCLES = 198.0  # from a chain of products to the next, beside the products themselves
_PENDING = 0.41  # how much of that a chain under way hides
_STAGE_CYCLES = 98.0
_COPY_CYCLES = 79.0  # for a chunk of each thread that copies
_STORED_BYTES_CYCLE = 36.7
_LAUNCH_US = 6.2
_OVERLAP = 3.0
_READ_AGAIN = 0.39  # share of x that another block no longer finds in the L2 cache
_PART_OF_SECTOR = 5.2  # cost of each byte of a sector that a store leaves out

_STEP_CYCLES = 0.5  # of the tensor cores for 64 rows, 8 l and an output, each of three products


@dataclass(frozen=True)
class Config:
    """Template arguments of ``WgmmaTf32x3Tile``, in its order and with its meaning."""

    warpgroups_j: int
    warpgroups_m: int
    teams: int
    nt: int
    kl: int
    stages: int
    resident: bool
    chain: int
    pending: int
    max_blocks: int
    """Blocks of the largest launch; not a template argument."""

    @property
    def blocks(self) -> int:
        """Blocks that fit on a multiprocessor."""
        return 1

    @property
    def multipliers(self) -> int:
        """Warpgroups that multiply."""
        return self.warpgroups_j * self.warpgroups_m * self.teams

    @property
    def threads(self) -> int:
        """Threads a block, with the warpgroup that loads."""
        return 128 * (1 + self.multipliers)

    @property
    def rows(self) -> int:
        return self.warpgroups_m * 64

    @property
    def outputs(self) -> int:
        return self.nt * 8

    def columns(self, p: Pattern) -> int:
        """Tiles that together cover all outputs of the same rows."""
        return p.a * (p.d // (self.warpgroups_j * lane_layout(p.d).j)) * -(-p.b // self.outputs)

    def turn(self, f: LaneLayout) -> int:
        """Values of l that a warp multiplies at a time."""
        return f.unit * max(1, self.chain // f.steps)

    def column_layers(self, p: Pattern) -> int:
        """Layers of four l in the packed weights of a column, with zeros at the end."""
        f = lane_layout(p.d)
        whole = self.turn(f) if self.resident else self.kl
        return -(-p.c // whole) * whole // 4

    def layer_bytes(self, p: Pattern, exact: bool = True) -> int:
        """Packed weights of four l of a column."""
        return self.warpgroups_j * lane_layout(p.d).j * (2 if exact else 1) * self.outputs * 16

    def packed_elements(self, p: Pattern, exact: bool = True) -> int:
        """Elements of the packed weight."""
        return self.columns(p) * self.column_layers(p) * self.layer_bytes(p, exact) // 4

    def shared_bytes(self, p: Pattern, exact: bool = True) -> int:
        """Dynamic shared memory of a block."""
        f = lane_layout(p.d)
        width = self.warpgroups_j * f.j
        spread = self.warpgroups_j if p.d % 4 == 0 else f.run
        chunks = self.kl * width // 4
        pitch = chunks if chunks % 8 == 0 and f.run == 1 else row_pitch(chunks, spread)
        stage = self.rows * pitch * 16
        weights = self.layer_bytes(p, exact)
        if self.resident:
            weights *= self.column_layers(p)
        else:
            stage += weights * self.kl // 4
            weights = 0
        slices = 0
        if p.d % 4 != 0 or self.warpgroups_j > 1:  # else results leave straight from registers
            slices = 4 * self.warpgroups_m * self.teams
            slices *= slice_chunks(f, self.warpgroups_j, self.nt, spread) * 16
        return _BARRIER_BYTES + weights + self.stages * stage + slices

    def registers(self, p: Pattern) -> int:
        """Registers a thread, roughly: sums, parts of them, operands, addresses."""
        f = lane_layout(p.d)
        sums = self.nt * f.j * 4 + (self.pending + 1) * self.nt * 4
        operands = f.chunks * 8 * max(1, self.chain // f.steps)
        return sums + operands + 8 * self.chain * (self.pending + 1) + 8


def _shapes(d: int) -> list[tuple[int, int, int]]:
    """Warpgroups side by side in j, in rows, and teams.

    Results narrower than a sector of memory cost as much as whole sectors: where d allows it, two
    or three warpgroups make them wider.
    """
    if d % 8 == 0:
        return [(2, 1, 1)]
    if d % 12 == 0:
        return [(3, 1, 1)]
    return [(1, 2, 1), (1, 3, 1), (1, 1, 2), (1, 1, 3)]


def _registers(config: Config) -> int:
    """``MULTIPLIER_REGISTERS`` of wgmma_tf32x3.cuh."""
    if config.multipliers == 3:
        return (512 - (32 if config.warpgroups_j == 1 else 56)) // 3
    return (504 - 56) // 2


@register_family
class WgmmaTf32x3(PackedFamily[Config]):
    """Products by TF32 warpgroup instructions: three for fp32 accuracy, or one."""

    name = "wgmma_tf32x3"
    template = "wgmma_tf32x3.cuh"
    dtypes = SINGLE
    layout = "batch_first"
    capability = (9, 0)
    capability_only = True
    splits = True
    takes_epilogues = True
    packs_from_d = 1

    def unsupported_shape(self, problem: Problem, device: DeviceSpec) -> str | None:
        return unsupported_layout(problem.pattern)

    def configs(self, problem: Problem, device: DeviceSpec) -> Iterator[Config]:
        p = problem.pattern
        f = lane_layout(p.d)
        chains = (1, 2) if p.c >= _LONG_SUM else (1,)
        for (group_j, group_m, teams), nt, kl, resident, chain, pending in itertools.product(
            _shapes(p.d), (1, 2, 3, 4, 6, 8, 12, 16), (8, 16, 32, 64), (False, True), chains, (0, 1)
        ):
            config = Config(group_j, group_m, teams, nt, kl, 0, resident, chain, pending, 0)
            turn = config.turn(f)
            if not may_cover(p.b, nt * 8) or kl % turn or kl > max(turn, p.c):
                continue
            if config.registers(p) > _registers(config):
                continue
            columns = config.columns(p)
            persistent_ctas = max(1, device.multiprocessors // columns)
            most = persistent_ctas * columns if resident else device.multiprocessors
            deepest = (replace(config, stages=stages, max_blocks=most) for stages in _STAGES)
            fitting = (config for config in deepest if config.shared_bytes(p) <= SHARED_LIMIT)
            yield from itertools.islice(fitting, 1)

    def predicted_us(
        self, problem: Problem, config: Config, batch: int, device: DeviceSpec
    ) -> float:
        p = problem.pattern
        f = lane_layout(p.d)
        width = config.warpgroups_j * f.j
        products = 3 if problem.exact else 1
        columns, output_tiles = config.columns(p), -(-p.b // config.outputs)
        row_tiles = -(-batch // config.rows)
        blocks = min(config.max_blocks, row_tiles * columns)
        if config.resident:
            rounds = -(-row_tiles // (blocks // columns))
        else:
            rounds = -(-row_tiles * columns // blocks)
        rounds *= -(-blocks // device.multiprocessors)

        # Bytes of a tile. Runs of x and y narrower than a sector of 32 bytes cross in whole ones.
        sectors = 1.0
        if p.d > width:
            sectors = 2.0 if width == 4 else 4 / 3 if width == 12 else 1.0
        x_bytes = 4 * config.rows * p.c * width
        y_bytes = 4 * config.rows * config.outputs * width
        weight_bytes = (8 if problem.exact else 4) * config.outputs * p.c * width
        again = x_bytes * (1 - 1 / output_tiles) * _READ_AGAIN if config.resident else 0.0
        memory = (
            x_bytes / output_tiles + y_bytes + again + (sectors - 1) * y_bytes * _PART_OF_SECTOR
        )
        cache = (x_bytes + y_bytes) * sectors + (0 if config.resident else weight_bytes)

        # Chains of products that a warpgroup computes one after the other.
        steps = -(-p.c // f.unit) * f.unit // 8 * f.j
        step_cycles = products * _STEP_CYCLES * config.outputs
        hidden = 1 + _PENDING * config.pending
        alone = chains_cycles(steps, config.chain, step_cycles, _CHAIN_CYCLES, hidden)
        alone += -(-p.c // config.kl) * _STAGE_CYCLES + y_bytes * sectors / _STORED_BYTES_CYCLE
        demands = (
            memory / _DRAM_BYTES_US,
            cache / _L2_BYTES_US,
            config.warpgroups_j * config.warpgroups_m * steps * step_cycles / _TENSOR_CYCLES_US,
            alone / config.teams / _CYCLES_US,
            x_bytes / 16 / 128 * _COPY_CYCLES / _CYCLES_US,
        )
        tile_us = overlapped(demands, _OVERLAP)
        first_weights_us = weight_bytes / _L2_BYTES_US if config.resident else 0.0
        return float(rounds * tile_us + first_weights_us + _LAUNCH_US)

    def geometry(self, problem: Problem, config: Config) -> Geometry:
        return Geometry(
            threads=config.threads,
            shared_bytes=config.shared_bytes(problem.pattern, problem.exact),
            rows_per_tile=config.rows,
            tiles_per_row_tile=config.columns(problem.pattern),
            max_blocks=config.max_blocks,
            early=True,
        )

    def source(self, problem: Problem, config: Config) -> str:
        call = "wgmma_tf32x3_kernel<Support, Tile>"
        name, after = self.kernel_name(problem), problem.epilogue
        kernel = codegen.kernel(name, call, bounds="Tile::THREADS, 1", after=after)
        return self._tile(problem, config) + kernel

    def packed_elements(self, problem: Problem, config: Config) -> int:
        return config.packed_elements(problem.pattern, problem.exact)

    def packed_form(self, problem: Problem, config: Config) -> str:
        layers = config.column_layers(problem.pattern)
        return f"wgmma_tf32x3 {config.warpgroups_j} {config.nt} {layers} {problem.exact}"

    def pack_geometry(self, problem: Problem, config: Config) -> Geometry:
        p, f = problem.pattern, lane_layout(problem.pattern.d)
        # A thread writes the matrices' places of one output, of all halves, j and l of its chunks.
        written = (2 if problem.exact else 1) * f.j * f.run_l * 4
        return packing_launcher.geometry_of(-(-config.packed_elements(p, problem.exact) // written))

    def pack_source(self, problem: Problem, config: Config) -> str:
        name, call = self.pack_name(problem), "mma_tf32x3_pack_kernel<Support, Tile>"
        kernel = codegen.kernel(name, call, bounds=str(packing_launcher.THREADS))
        return self._tile(problem, config) + kernel

    def _tile(self, problem: Problem, config: Config) -> str:
        p = problem.pattern
        arguments = ", ".join(str(int(value)) for value in astuple(config)[:-1])
        facts = {
            "Tile::SHARED_BYTES": config.shared_bytes(p, problem.exact),
            "Tile::COLUMNS * Tile::COLUMN_BYTES": 4 * config.packed_elements(p, problem.exact),
        }
        instance = f"WgmmaTf32x3Tile<Support, {arguments}, {3 if problem.exact else 1}>"
        return codegen.tile(self.template, p, instance, facts, self.name)
