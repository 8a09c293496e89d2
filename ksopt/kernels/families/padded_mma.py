"""The tensor-core family for factors of any size, batch first (csrc/cuda/padded_mma.cuh)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass

from ksopt.kernels import codegen
from ksopt.kernels.families.base import ANY_TYPE, TemplateFamily, register_family
from ksopt.kernels.families.cost_terms import overlapped
from ksopt.kernels.launcher import MakeLauncher
from ksopt.kernels.problem import SHARED_LIMIT, DeviceSpec, Geometry, Problem
from ksopt.patterns.chain import Pattern

_REGISTERS = 65536  # of a multiprocessor
_LARGEST_INT = 2**31 - 1
_WHOLE_J = 32  # up to this d a block has all j: fewer would be less than a sector of 16 bit
_SHORTEST_SPLIT_SUM = 32  # three TF32 products of shorter ones are less exact than cuBLAS's sums

# The cost model's constants, of one multiprocessor in a microsecond.
_DRAM_BYTES = 32_300.0
_L2_BYTES = 22_500.0
_SHARED_BYTES = 107_800.0
_SORTED = {
    1: 40_000.0,
    2: 22_000.0,
}  # elements of x or the weight, where d is 1 and where it is not
_PUT = 25_000.0  # elements of y
_STEPS = {(2, 1): 530.0, (4, 1): 430.0, (4, 3): 215.0}  # by bytes of an element and products
_ADDED = 110_000.0  # multiplications and additions without tensor cores
_TILE_US = 1.6  # a tile's latency: loads, barriers, stores
_LAUNCH_US = 3.5
_OVERLAP = 2.0


@dataclass(frozen=True)
class Config:
    """Template arguments of ``PaddedMmaTile``, in its order and with its meaning."""

    warps: int
    bm: int
    mt: int
    nt: int
    groups: int
    jc: int
    parts: int
    resident: bool
    blocks: int
    size: int
    """Bytes of an element; from here on no template arguments."""
    walkers: int
    """Blocks that share a column's rows, in the largest launch."""

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def outputs(self) -> int:
        return 8 * self.nt

    @property
    def step(self) -> int:
        """Values of l in a product of the tensor cores."""
        return 32 // self.size

    def steps(self, p: Pattern) -> int:
        return -(-p.c // self.step)

    def part_steps(self, p: Pattern) -> int:
        return -(-self.steps(p) // self.parts)

    @property
    def units(self) -> int:
        """What the warps of a block share: tiles of rows of a plane."""
        return self.groups * self.jc * self.bm // (16 * self.mt)

    def columns(self, p: Pattern) -> int:
        """Tiles that together cover all outputs of the same rows."""
        return -(-p.a // self.groups) * -(-p.d // self.jc) * -(-p.b // self.outputs)

    def shared_bytes(self, p: Pattern) -> int:
        """Dynamic shared memory of a block."""
        planes, vector = self.groups * self.jc, 16 // self.size
        part = self.part_steps(p) * 32 + 16
        weights = self.steps(p) * 32 + 16 if self.resident else part
        kb = min(self.outputs, p.b)
        runs, run = (1, self.groups * kb * p.d) if self.jc == p.d else (kb, self.jc)
        chunks = runs * ((run + 2 * (vector - 1)) // vector)
        x = planes * (self.bm * part + 16)
        w = planes * (-(-self.nt // 2) * 16 * weights + 16)
        return x + w + self.bm * (chunks | 1) * 16

    def registers(self, p: Pattern) -> int:
        """Registers a thread, roughly: sums, operands, chunks on their way, addresses."""
        held = 1 if self.parts == 1 else -(-self.units // self.warps)
        sums = held * self.mt * self.nt * 4
        return max(sums + self.mt * (8 if self.size == 4 else 4) + 50, 68)


@register_family
class PaddedMma(TemplateFamily[Config]):
    """Products by tensor cores of elements that are sorted one by one, for any b, c, d and rows."""

    name = "padded_mma"
    template = "padded_mma.cuh"
    dtypes = ANY_TYPE
    layout = "batch_first"

    def unsupported_shape(self, problem: Problem, device: DeviceSpec) -> str | None:
        p = problem.pattern
        if max(p.in_features, p.out_features, p.b * p.c * p.d) > _LARGEST_INT:
            return f"{p} has more elements in a row or a group than 32 bits count"
        if next(self.configs(problem, device), None) is None:
            return "no tile fits in shared memory"
        return None

    def configs(self, problem: Problem, device: DeviceSpec) -> Iterator[Config]:
        p, size = problem.pattern, 4 if problem.dtype == "float32" else 2
        adds = self.products(problem) == 0
        most_nt = -(-p.b // 8)
        for bm, nt, mt, warps, (groups, jc) in itertools.product(
            (16, 32, 64, 128),
            _widths(most_nt),
            (2,) if adds else (1, 2),
            (4, 8),
            _planes(p, size),
        ):
            if bm % (16 * mt) or (groups > 1 and 8 * nt < p.b):
                continue
            if bm * groups * jc < 16 * mt * warps and bm < 128:
                continue  # warps without work
            seen = set()
            for blocks in (1, 2, 3, 4, 6):
                tile = self._fitting(p, (warps, bm, mt, nt, groups, jc), blocks, size, adds)
                if tile is None:
                    break
                if tile.registers(p) > min(255, _REGISTERS // (tile.threads * blocks)):
                    break
                columns = tile.columns(p)
                walkers = max(1, device.multiprocessors * blocks // columns)
                config = Config(*astuple(tile)[:-1], walkers)
                if config not in seen:
                    seen.add(config)
                    yield config

    def _fitting(
        self, p: Pattern, shape: tuple[int, ...], blocks: int, size: int, adds: bool
    ) -> Config | None:
        """The tile of a shape whose sums come in the fewest parts that fit."""
        groups, steps = shape[4], -(-p.c * size // 32)
        most = 1 if adds or groups > 1 else steps
        for parts in _parts(steps, most):
            for resident in (True, False):
                if parts == 1 and not resident:
                    continue
                tile = Config(*shape, parts, resident, blocks, size, 1)
                if tile.shared_bytes(p) * blocks <= SHARED_LIMIT:
                    return tile
        return None

    def products(self, problem: Problem) -> int:
        """Of a number, by tensor cores; 0 for ordinary arithmetic."""
        if problem.dtype != "float32" or not problem.exact:
            return 1
        return 3 if problem.pattern.c >= _SHORTEST_SPLIT_SUM else 0

    def predicted_us(
        self, problem: Problem, config: Config, batch: int, device: DeviceSpec
    ) -> float:
        p, size, products = problem.pattern, config.size, self.products(problem)
        columns = config.columns(p)
        tiles = -(-batch // config.bm) * columns
        slots = device.multiprocessors * config.blocks
        blocks = min(columns * config.walkers, tiles)
        rounds = -(-tiles // blocks) * -(-blocks // slots)
        busy = tiles / (rounds * slots)  # share of the multiprocessors' time that has work

        planes = config.groups * config.jc
        x, y = batch * p.in_features, batch * p.out_features
        x_reads = x * -(-p.b // config.outputs)
        weights = planes * min(config.outputs, p.b) * p.c  # of a column
        sorts = blocks if config.resident else tiles
        covered = tiles * planes * config.bm  # rows of planes, those without work included
        steps = covered / 16 * config.nt * config.steps(p)
        step_bytes = 512 / config.nt + 256 / config.mt
        if products:
            arithmetic = steps / _STEPS[size, products]
        else:
            arithmetic = covered * config.outputs * -(-p.c // 4) * 4 / _ADDED
            step_bytes = 0.0
        demands = (
            (x + y) * size / _DRAM_BYTES,
            ((x_reads + y) + sorts * weights) * size / _L2_BYTES,
            (x_reads + sorts * weights) / _SORTED[1 if p.d == 1 else 2]
            + y / _PUT
            + arithmetic
            + steps * step_bytes / _SHARED_BYTES,
        )
        streaming = overlapped(demands, _OVERLAP) / device.multiprocessors
        return (
            math.hypot(streaming / max(busy, 1e-3), rounds * config.parts * _TILE_US) + _LAUNCH_US
        )

    def geometry(self, problem: Problem, config: Config) -> Geometry:
        columns = config.columns(problem.pattern)
        return Geometry(
            threads=config.threads,
            shared_bytes=config.shared_bytes(problem.pattern),
            rows_per_tile=config.bm,
            tiles_per_row_tile=columns,
            max_blocks=min(config.walkers * columns, _LARGEST_INT),
        )

    def arithmetic(self, problem: Problem) -> str:
        return problem.dtype if problem.exact else "tf32"

    def source(self, problem: Problem, config: Config) -> str:
        p, dtype = problem.pattern, self.dtypes[problem.dtype]
        of_tile = ", ".join(str(int(value)) for value in astuple(config)[:-2])
        facts = {"Tile::SHARED_BYTES": config.shared_bytes(p)}
        instance = f"PaddedMmaTile<{dtype}, Support, {of_tile}, {self.products(problem)}>"
        tile = codegen.tile(self.template, p, instance, facts, self.name)
        return tile + codegen.kernel(self.kernel_name(problem), "padded_mma_kernel<Support, Tile>")

    def fallback(self, problem: Problem, config: Config, device_index: int) -> MakeLauncher | None:
        return None


def _widths(most: int) -> list[int]:
    """Output tiles of a block, of which ``most`` cover all outputs; wide ones waste few."""
    usual = [nt for nt in (1, 2, 3, 4, 6, 8, 12, 16) if nt <= most]
    exact = -(-most // -(-most // 16))  # as even as it gets
    least = -(-most // max(usual)) * max(usual)
    several = {nt for nt in usual if -(-most // nt) * nt <= max(least, 1.2 * most)} | {exact}
    return sorted(several)[-4:]


def _planes(p: Pattern, size: int) -> list[tuple[int, int]]:
    """Whole blocks i of a column, and j of each: few of many."""
    if p.d > _WHOLE_J:
        return [(1, jc) for jc in (8, 16, 32, 64) if jc * size >= 32 and jc < 2 * p.d and jc <= p.d]
    wide = 1024 // size  # features of a row that several blocks should have
    several = []
    for groups in (1, 2, 4, 8, 16, 32):
        features = groups * p.d * max(p.b, p.c)
        if groups <= p.a and (groups == 1 or features <= wide):
            several.append((groups, p.d))
    return several[-3:]


def _parts(steps: int, most: int) -> list[int]:
    """Numbers of parts of a sum, each of which needs them all."""
    several = [parts for parts in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64) if parts <= most]
    return sorted({-(-steps // -(-steps // parts)) for parts in several})
