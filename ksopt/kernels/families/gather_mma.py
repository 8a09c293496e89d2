"""The tensor-core family for factors of any size, batch first (csrc/cuda/gather_mma.cuh)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from typing import ClassVar, Literal

from ksopt.kernels import codegen
from ksopt.kernels.families.base import ANY_TYPE, TemplateFamily, register_family
from ksopt.kernels.families.cost_terms import overlapped
from ksopt.kernels.launcher import MakeLauncher
from ksopt.kernels.problem import DeviceSpec, Geometry, Problem
from ksopt.patterns.chain import Pattern

_REGISTERS = 65536  # of a multiprocessor
_LARGEST_INT = 2**31 - 1
_STAGES = 2  # a third seldom made a product faster (docs/development/any-size.md)
_NARROW = 4  # of so few outputs a lane adds all of a row
_LONG = 6_000  # bytes of a block of x: with more a block has windows of j, too
_WHOLE_J = 32  # up to this d a block has all j: fewer would be less than a sector of 16 bit
_SHORTEST_SPLIT_SUM = 32  # three TF32 products of shorter ones are less exact than cuBLAS's sums

# The cost model's constants, of one multiprocessor in a microsecond. Fitted to 1,720 tiles of 174
# random problems (bfloat16 and float32, from 600 rows, one H100): nine of ten of those near the
# fastest of a problem take 0.79 to 1.23 times what is predicted. The rate of memory is an H200's,
# as in other models.
_DRAM_BYTES = 32_300.0
_GATHERED = 65_000.0  # 16-bit elements of x for tensor cores; fp32 ones cost nothing beside these
_STEPS = {1: 1750.0, 3: 245.0}  # products of tensor cores, by those of two numbers
_ADDED = 163_000.0  # multiplications and additions without tensor cores
_PUT = 23_000.0  # results of warps
_UNITS = 140.0  # what a warp does once for a unit
_CHUNKS_IN, _CHUNKS_OUT = 1_800.0, 3_100.0
_LAID = 2_000.0  # elements of the weights, by a block
_COPIED = 40_000.0  # bytes of packed weights
_TILE_US = 1.1  # a part's latency: loads, barriers, stores
_LAUNCH_US = 4.7
_FULL_WARPS, _PACE = 17.0, 0.44  # with fewer on a multiprocessor, latency shows
_OVERLAP = 5.5


Weights = Literal["stored", "packed", "streamed"]
"""``GatherWeights`` of the template: how a block's weights come to shared memory."""


@dataclass(frozen=True)
class Config:
    """Template arguments of ``GatherMmaTile``, in its order and with its meaning."""

    warps: int
    bm: int
    mt: int
    nt: int
    groups: int
    jc: int
    parts: int
    stages: int
    blocks: int
    size: int
    """Bytes of an element; from here on no template arguments."""
    step: int
    """Values of l that are added at a time."""
    walkers: int
    """Blocks that share a column's rows, in the largest launch."""
    weights: Weights

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def outputs(self) -> int:
        return 8 * self.nt

    def steps(self, p: Pattern) -> int:
        return -(-p.c // self.step)

    @property
    def planes(self) -> int:
        """Products of matrices, one for each (i, j)."""
        return self.groups * self.jc

    @property
    def units(self) -> int:
        """What the warps of a block share: tiles of rows of a plane."""
        return self.planes * self.bm // (16 * self.mt)

    def columns(self, p: Pattern) -> int:
        """Tiles that together cover all outputs of the same rows."""
        return -(-p.a // self.groups) * -(-p.d // self.jc) * -(-p.b // self.outputs)

    def part_steps(self, p: Pattern) -> int:
        """Steps of a part."""
        return -(-self.steps(p) // self.parts)

    def weight_bytes(self, p: Pattern) -> int:
        """A column's weights in the order of the tensor cores."""
        step = 8 * self.size if self.step == 1 else 256
        return self.parts * self.planes * self.part_steps(p) * self.nt * step

    def part(self, p: Pattern) -> int:
        """Values of l of a part."""
        return p.c if self.parts == 1 else self.part_steps(p) * self.step

    def shared_bytes(self, p: Pattern) -> int:
        """Dynamic shared memory of a block."""
        x = (self.chunks(p, self.part(p)) | 1) * 16
        y = (self.chunks(p, min(self.outputs, p.b)) | 1) * 16
        weights = self.weight_bytes(p)
        if self.weights == "streamed":
            weights = weights // self.parts * self.stages
        return weights + self.bm * (self.stages * x + y)

    def chunks(self, p: Pattern, values: int) -> int:
        """Of a row of x or y with so many values of l or k, at any address."""
        vector = 16 // self.size
        runs, run = (1, self.groups * values * p.d) if self.jc == p.d else (values, self.jc)
        return runs * ((run + 2 * (vector - 1)) // vector)

    def registers(self, p: Pattern) -> int:
        """Registers a thread, roughly: sums, operands, addresses."""
        held = 1 if self.parts == 1 else -(-self.units // self.warps)
        sums = held * self.mt * self.nt * 4
        return max(sums + self.mt * (16 if self.size == 4 else 12) + 56, 72)


@register_family
class GatherMma(TemplateFamily[Config]):
    """Products by tensor cores, x gathered element by element, for any b, c, d and rows.

    Attributes:
        ways: how weights come to shared memory, and of how many stages the ring may be.
    """

    name = "gather_mma"
    ways: ClassVar[tuple[tuple[Weights, int], ...]] = (("stored", _STAGES),)
    template = "gather_mma.cuh"
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
        for step, bm, nt, mt, warps, (groups, jc) in itertools.product(
            self.steps(problem),
            (16, 32, 64, 128),
            _widths(-(-p.b // 8)),
            (1, 2),
            (4, 8),
            _planes(p, size),
        ):
            if bm % (16 * mt) or (groups > 1 and 8 * nt < p.b):
                continue
            if step == 1 and p.b <= _NARROW and mt != 2:
                continue
            if bm * groups * jc < 16 * mt * warps and bm < 128:
                continue  # warps without work
            most = 1 if step == 1 or groups > 1 else -(-p.c // step)
            shape = (warps, bm, mt, nt, groups, jc)
            for (weights, stages), blocks in itertools.product(self.ways, (1, 2, 3, 4, 6)):
                rest = (stages, blocks, size, step, 1, weights)
                fewest = 2 if weights == "streamed" else 1
                several = (Config(*shape, parts, *rest) for parts in _parts(fewest, most))
                tile = next((t for t in several if self.fits(problem, t, device)), None)
                if tile is None:
                    continue
                if tile.registers(p) > min(255, _REGISTERS // (tile.threads * blocks)):
                    continue
                walkers = max(1, device.multiprocessors * blocks // tile.columns(p))
                yield replace(tile, walkers=walkers)

    def steps(self, problem: Problem) -> tuple[int, ...]:
        """How many l are added at a time: by tensor cores, or, of short sums, one."""
        c, is_single = problem.pattern.c, problem.dtype == "float32"
        if is_single and problem.exact:
            return (8,) if c >= _SHORTEST_SPLIT_SUM else (1,)
        by_tensor_cores = 8 if is_single else 16
        return (by_tensor_cores, 1) if c <= by_tensor_cores else (by_tensor_cores,)

    def products(self, problem: Problem, config: Config) -> int:
        """Of two numbers, by tensor cores; 0 for ordinary arithmetic."""
        if config.step == 1:
            return 0
        return 3 if problem.dtype == "float32" and problem.exact else 1

    def predicted_us(
        self, problem: Problem, config: Config, batch: int, device: DeviceSpec
    ) -> float:
        p, products = problem.pattern, self.products(problem, config)
        columns, row_tiles = config.columns(p), -(-batch // config.bm)
        walkers = min(config.walkers, row_tiles)
        blocks, slots = columns * walkers, device.multiprocessors * config.blocks
        waves, tiles = -(-blocks // slots), -(-row_tiles // walkers)  # of a multiprocessor, a block
        busy = row_tiles * columns / (waves * tiles * slots)

        outputs, of_b = min(config.outputs, p.b), -(-p.b // config.outputs)
        tile_rows = row_tiles * config.bm
        planes = tile_rows * p.a * -(-p.d // config.jc) * config.jc * of_b  # rows of planes
        put = planes * config.outputs
        work = planes / (16 * config.mt) / _UNITS
        if products:
            work += planes / 16 * config.nt * config.steps(p) / _STEPS[products]
            work += planes * config.steps(p) * config.step / _GATHERED if config.size == 2 else 0.0
        else:
            put = planes * p.b if p.b <= _NARROW else put
            work += put * p.c / _ADDED
        work += put / _PUT
        parts = config.parts * config.chunks(p, config.part(p))
        work += tile_rows * columns * parts / _CHUNKS_IN
        work += tile_rows * columns * config.chunks(p, outputs) / _CHUNKS_OUT
        weights = 0.0
        if config.weights == "streamed":
            work += row_tiles * columns * config.weight_bytes(p) / _COPIED
        warps = min(config.blocks, -(-blocks // device.multiprocessors)) * config.warps
        pace = min(1.0, (warps / _FULL_WARPS) ** _PACE)
        memory = batch * (p.in_features + p.out_features) * config.size / _DRAM_BYTES
        streaming = overlapped((memory, work / pace), _OVERLAP) / device.multiprocessors
        latency = waves * tiles * config.parts * _TILE_US
        if config.weights == "stored":
            weights = waves * config.planes * outputs * p.c / _LAID
        elif config.weights == "packed":
            weights = waves * config.blocks * config.weight_bytes(p) / _COPIED
        return math.hypot(streaming / max(busy, 1e-3), latency) + weights + _LAUNCH_US

    def geometry(self, problem: Problem, config: Config) -> Geometry:
        columns = config.columns(problem.pattern)
        return Geometry(
            threads=config.threads,
            shared_bytes=config.shared_bytes(problem.pattern),
            rows_per_tile=config.bm,
            tiles_per_row_tile=columns,
            max_blocks=config.walkers * columns,
        )

    def arithmetic(self, problem: Problem) -> str:
        return problem.dtype if problem.exact else "tf32"

    def source(self, problem: Problem, config: Config) -> str:
        call = "gather_mma_kernel<Support, Tile>"
        return self.tile(problem, config) + codegen.kernel(self.kernel_name(problem), call)

    def tile(self, problem: Problem, config: Config) -> str:
        """The generated file's part that names the tile."""
        p, dtype = problem.pattern, self.dtypes[problem.dtype]
        of_tile = ", ".join(str(int(value)) for value in astuple(config)[:-4])
        facts = {"Tile::SHARED_BYTES": config.shared_bytes(p)}
        if config.weights != "stored":
            facts["Tile::PACKED_BYTES"] = config.columns(p) * config.weight_bytes(p)
        weights = f"GatherWeights::{config.weights.upper()}"
        rest = f"{self.products(problem, config)}, {weights}"
        instance = f"GatherMmaTile<{dtype}, Support, {of_tile}, {rest}>"
        return codegen.tile(self.template, p, instance, facts, self.name)

    def fallback(self, problem: Problem, config: Config, device_index: int) -> MakeLauncher | None:
        return None


def _widths(most: int) -> list[int]:
    """Output tiles of a block, of which ``most`` cover all outputs: as even as they get."""
    fewest = -(-most // 16)
    blocks = (fewest * times for times in (1, 2, 3, 4, 6, 8, 12, 16))
    return sorted({-(-most // several) for several in blocks})


def _planes(p: Pattern, size: int) -> list[tuple[int, int]]:
    """Whole blocks i of a column, and j of each: few of many."""
    wide = 1024 // size  # features of a row that several blocks should have
    several = [
        (groups, p.d)
        for groups in (1, 2, 4, 8, 16, 32)
        if p.d <= 4 * _WHOLE_J
        and (groups == 1 or (groups <= p.a and groups * p.d * max(p.b, p.c) <= wide))
    ]
    windows = [(1, jc) for jc in (4, 8, 16, 32, 64) if jc * size >= 16 and jc < p.d]
    is_long = p.d * p.c * size > _LONG  # weights of few outputs, of all j, fill the memory
    return several[-3:] + (windows[-3:] if p.d > _WHOLE_J or is_long else [])


def _parts(fewest: int, most: int) -> list[int]:
    """Numbers of parts of a sum of so many steps, each of which has some."""
    several = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
    some = [parts for parts in several if fewest <= parts <= most]
    return sorted({-(-most // -(-most // parts)) for parts in some})
