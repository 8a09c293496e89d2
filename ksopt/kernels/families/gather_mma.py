"""The tensor-core family for factors of any size, batch first (csrc/cuda/gather_mma.cuh)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import ClassVar, Literal

from ksopt.kernels import codegen
from ksopt.kernels.families.base import ANY_TYPE, TemplateFamily, register_family
from ksopt.kernels.families.common.cost_terms import overlapped
from ksopt.kernels.launcher import MakeLauncher
from ksopt.kernels.problem import RESERVED_SHARED, DeviceSpec, Geometry, Problem
from ksopt.patterns.chain import Pattern

_REGISTERS, _MOST_REGISTERS = 65536, 255  # of a multiprocessor, of a thread
_MOST_BLOCKS, _FEWEST_WARPS = 6, 8  # at a time on a multiprocessor
_LARGEST_INT = 2**31 - 1
_STAGES = 2  # a third seldom made a product faster (docs/development/any-size.md)
_NARROW = 4  # of so few outputs a lane adds all of a row
_LONG = 6_000  # bytes of a block of x: with more a block has windows of j, too
_WHOLE_J = 32  # up to this d a block has all j: fewer would be less than a sector of 16 bit
_SHORT = 4_096  # bytes of a block of x: with less a block may have all j, however many
_SHORTEST_SPLIT_SUM = 32  # three TF32 products of shorter ones are less exact than cuBLAS's sums

# The cost model's constants, of one multiprocessor in a microsecond. Fitted to 723 tiles of 44
# problems (bfloat16 and float32, one H100): nine of ten of the tiles near the fastest of a problem
# are predicted to take 0.79 to 1.32 times what they take. The rate of memory is an H200's, as in
# other models.
_DRAM_BYTES = 32_300.0
_GATHERED = 77_000.0  # 16-bit elements of x for tensor cores; fp32 ones cost nothing beside these
_STEPS = {1: 751.0, 3: 188.0}  # products of tensor cores, by those of two numbers
_ADDED = 114_000.0  # multiplications and additions without tensor cores
_PUT = 150_000.0  # results of warps
_CONFLICT = 0.9  # what a further way of a bank conflict adds to both
_UNITS = 51.7  # what a warp does once for a unit
_ENDS = 700.0  # ends of runs of y that begin inside chunks: windows have one run for each output
# All of these but memory are of 14 warps. The latency of some of it is hidden by other warps, up to
# the second number of them.
_UNHIDDEN, _MOST_WARPS, _FITTED_WARPS = 4.0, 16, 14
_CHUNKS_IN, _CHUNKS_OUT = 2_810.0, 3_010.0
_LAID = 2_000.0  # elements of the weights, by a block
_COPIED = 201_000.0  # bytes of packed weights
_TILE_US = 0.8  # a part's latency: loads, barriers, stores
_LAUNCH_US = 3.72
_OVERLAP = 4.5


Weights = Literal["stored", "packed", "streamed"]
"""``GatherWeights`` of the template: how a block's weights come to shared memory."""


_Shape = tuple[int, int, int, int, int, int, int, int]
"""The first fields of `Config`, up to ``jc``."""


@dataclass(frozen=True)
class Config:
    """Template arguments of ``GatherMmaTile``, in its order and with its meaning."""

    warps: int
    bm: int
    mt: int
    nt: int
    ns: int
    jt: int
    groups: int
    jc: int
    parts: int
    stages: int
    blocks: int
    size: int
    """Bytes of an element; from here on no template arguments but the last."""
    step: int
    """Values of l that are added at a time."""
    persistent_ctas: int
    """Blocks that share a column's rows, in the largest launch."""
    weights: Weights

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def outputs(self) -> int:
        return 8 * self.ns * self.nt

    def steps(self, p: Pattern) -> int:
        return -(-p.c // self.step)

    @property
    def planes(self) -> int:
        """Products of matrices, one for each (i, j)."""
        return self.groups * self.jc

    @property
    def units(self) -> int:
        """What the warps of a block share: tiles of rows of a plane."""
        return self.planes // self.jt * self.bm // (16 * self.mt) * self.ns

    def columns(self, p: Pattern) -> int:
        """Tiles that together cover all outputs of the same rows."""
        return -(-p.a // self.groups) * -(-p.d // self.jc) * -(-p.b // self.outputs)

    def part_steps(self, p: Pattern) -> int:
        """Steps of a part."""
        return -(-self.steps(p) // self.parts)

    def part(self, p: Pattern) -> int:
        """Values of l of a part."""
        return p.c if self.parts == 1 else self.part_steps(p) * self.step

    def weight_bytes(self, p: Pattern) -> int:
        """A column's weights in the order of the tensor cores."""
        return self.parts * self.part_bytes(p)

    def part_bytes(self, p: Pattern) -> int:
        """Bytes of the weights of a part."""
        steps = self.planes * self.part_steps(p)
        return steps * self.outputs * _weight_bytes(self.step, self.size)

    def shared_bytes(self, p: Pattern) -> int:
        """Dynamic shared memory of a block."""
        row = (p, self.size, self.groups, self.jc)
        x, y = _row_bytes(*row, self.part(p)), _row_bytes(*row, min(self.outputs, p.b))
        copies = self.stages if self.weights == "streamed" else self.parts
        return copies * self.part_bytes(p) + self.bm * (self.stages * x + y)

    def chunks(self, p: Pattern, values: int) -> int:
        """16-byte chunks of a row of x or y with this many values of l or k, at any address."""
        return _chunks(p, self.size, self.groups, self.jc, values)

    def registers(self, p: Pattern) -> int:
        """Registers a thread, roughly: sums, operands, addresses."""
        return _registers(self.mt * self.jt, self.nt, self.size, self.parts, self.units, self.warps)


def _registers(tiles: int, nt: int, size: int, parts: int, units: int, warps: int) -> int:
    held = 1 if parts == 1 else -(-units // warps)
    return max(held * tiles * nt * 4 + tiles * (16 if size == 4 else 12) + 56, 72)


def _weight_bytes(step: int, size: int) -> int:
    """Bytes of a step's weights for an output."""
    return size if step == 1 else 32


def _chunks(p: Pattern, size: int, groups: int, jc: int, values: int) -> int:
    vector = 16 // size
    runs, run = (1, groups * values * p.d) if jc == p.d else (values, jc)
    return runs * ((run + 2 * (vector - 1)) // vector)


def _row_bytes(p: Pattern, size: int, groups: int, jc: int, values: int) -> int:
    """Bytes of a row in shared memory: an odd number of chunks of 16."""
    return (_chunks(p, size, groups, jc, values) | 1) * 16


@register_family
class GatherMma(TemplateFamily[Config]):
    """Products by tensor cores, x gathered element by element, for any b, c, d and rows.

    Attributes:
        ways: how weights may come to shared memory.
    """

    name = "gather_mma"
    ways: ClassVar[tuple[Weights, ...]] = ("stored",)
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
        for step, (groups, jc) in itertools.product(self.steps(problem), _planes(p, size)):
            row = (p, size, groups, jc)
            steps = -(-p.c // step)
            pieces = [(1, steps, _row_bytes(*row, p.c))]
            for parts in _parts(1 if step == 1 or groups > 1 else steps):
                of_part = -(-steps // parts)
                pieces.append((parts, of_part, _row_bytes(*row, of_part * step)))
            for nt, ns in _widths(-(-p.b // 8)):
                outputs = 8 * nt * ns
                if groups > 1 and outputs < p.b:
                    continue
                y_bytes = _row_bytes(*row, min(outputs, p.b))
                for mt, jt, bm, warps in self._shapes(p, step, groups * jc, ns):
                    shape = (warps, bm, mt, nt, ns, jt, groups, jc)
                    yield from self._with_parts(p, shape, size, step, y_bytes, pieces, device)

    def _shapes(
        self, p: Pattern, step: int, planes: int, ns: int
    ) -> Iterator[tuple[int, int, int, int]]:
        """Tiles of a unit, rows of a block, and warps that all have work."""
        for (mt, jt), bm, warps in itertools.product(
            ((1, 1), (2, 1), (1, 2)), (16, 32, 64, 128), (4, 8, 16)
        ):
            if jt == 2 and (step == 1 or p.d % 2 or planes % 2):
                continue
            if bm % (16 * mt) or (step == 1 and p.b <= _NARROW and (mt, ns) != (2, 1)):
                continue
            units = planes // jt * bm // (16 * mt) * ns
            if units >= warps or (bm == 128 and warps == 4):
                yield mt, jt, bm, warps

    def _with_parts(
        self,
        p: Pattern,
        shape: _Shape,
        size: int,
        step: int,
        y_bytes: int,
        pieces: list[tuple[int, int, int]],
        device: DeviceSpec,
    ) -> Iterator[Config]:
        """Tiles of a shape: more parts of sums are for more blocks at a time."""
        warps, bm, mt, nt, ns, jt, groups, jc = shape
        outputs, planes = 8 * nt * ns, groups * jc
        units = planes // jt * bm // (16 * mt) * ns
        step_bytes = planes * outputs * _weight_bytes(step, size)
        columns = -(-p.a // groups) * -(-p.d // jc) * -(-p.b // outputs)
        for weights in self.ways:
            fewer = 0
            for parts, of_part, x_bytes in pieces:
                streams = weights == "streamed"
                if streams and parts == 1:
                    continue
                shared = of_part * step_bytes * (_STAGES if streams else parts) + RESERVED_SHARED
                shared += bm * (_STAGES * x_bytes + y_bytes)
                blocks = min(device.shared_bytes // shared, _MOST_BLOCKS)
                if blocks <= fewer:
                    continue
                registers = _registers(mt * jt, nt, size, parts, units, warps)
                if registers > _MOST_REGISTERS:
                    break
                in_registers = _REGISTERS // (32 * warps * registers)
                blocks = min(blocks, in_registers)
                # Too few warps do not hide latency: they are used only where no more fit.
                if blocks > fewer and (
                    blocks * warps >= _FEWEST_WARPS or blocks == in_registers or bm == 16
                ):
                    fewer = blocks
                    persistent_ctas = max(1, device.multiprocessors * blocks // columns)
                    yield Config(
                        *shape, parts, _STAGES, blocks, size, step, persistent_ctas, weights
                    )
                    if blocks == min(in_registers, _MOST_BLOCKS):
                        break

    def steps(self, problem: Problem) -> tuple[int, ...]:
        """The numbers of l that may be added at a time: a tensor core's; 1 for short sums."""
        c, is_single = problem.pattern.c, problem.dtype == "float32"
        if is_single and problem.exact:
            return (8,) if c >= _SHORTEST_SPLIT_SUM else (1,)
        by_tensor_cores = 8 if is_single else 16
        return (by_tensor_cores, 1) if c <= by_tensor_cores else (by_tensor_cores,)

    def products(self, problem: Problem, config: Config) -> int:
        """Tensor-core products for one product of two numbers; 0 for ordinary arithmetic."""
        if config.step == 1:
            return 0
        return 3 if problem.dtype == "float32" and problem.exact else 1

    def predicted_us(
        self, problem: Problem, config: Config, batch: int, device: DeviceSpec
    ) -> float:
        p, products = problem.pattern, self.products(problem, config)
        columns, row_tiles = config.columns(p), -(-batch // config.bm)
        persistent_ctas = min(config.persistent_ctas, row_tiles)
        blocks, slots = columns * persistent_ctas, device.multiprocessors * config.blocks
        waves, tiles = (
            -(-blocks // slots),
            -(-row_tiles // persistent_ctas),
        )  # of a multiprocessor, a block
        busy = row_tiles * columns / (waves * tiles * slots)

        outputs, of_b = min(config.outputs, p.b), -(-p.b // config.outputs)
        tile_rows = row_tiles * config.bm
        planes = tile_rows * p.a * -(-p.d // config.jc) * config.jc * of_b  # rows of planes
        put: float = planes * config.outputs
        work = planes / (16 * config.mt * config.jt) * config.ns / _UNITS
        # Values of l and k of one j lie d elements apart, those of a window whole chunks.
        ways = 4 if config.jc < p.d else math.gcd(p.d, 4)
        conflicts = 1 + _CONFLICT * (ways - 1)
        if products:
            work += planes / 128 * config.outputs * config.steps(p) / _STEPS[products]
            gathered: float = planes * config.ns * config.steps(p) * config.step
            if config.jt == 2 or (p.d == 1 and p.c % 2 == 0):
                gathered /= 2
            work += conflicts * gathered / _GATHERED if config.size == 2 else 0.0
        else:
            put = planes * p.b if p.b <= _NARROW else put
            work += put * p.c / _ADDED
        if config.jt == 2 or (p.d == 1 and p.b % 2 == 0 and config.size == 2):
            put /= 2
        work += conflicts * put / _PUT
        parts = config.parts * config.chunks(p, config.part(p))
        work += tile_rows * columns * parts / _CHUNKS_IN
        work += tile_rows * columns * config.chunks(p, outputs) / _CHUNKS_OUT
        if config.jc < p.d and p.d * config.size % 16:
            work += tile_rows * columns * outputs * 2 / _ENDS
        warps = min(config.warps * config.blocks, _MOST_WARPS)
        work *= (1 + _UNHIDDEN / warps) / (1 + _UNHIDDEN / _FITTED_WARPS)
        weights = 0.0
        if config.weights == "streamed":
            work += row_tiles * columns * config.weight_bytes(p) / _COPIED
        memory = batch * (p.in_features + p.out_features) * config.size / _DRAM_BYTES
        streaming = overlapped((memory, work), _OVERLAP) / device.multiprocessors
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
            max_blocks=config.persistent_ctas * columns,
            early=True,
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


def _widths(most: int) -> list[tuple[int, int]]:
    """Output tiles of a unit, and units of a block, of which ``most`` tiles cover all outputs.

    Blocks are as even as they get.
    """
    fewest = -(-most // 32)
    blocks = (fewest * times for times in (1, 2, 3, 4, 6, 8, 16))
    several = {1, *(-(-most // count) for count in blocks)}
    return sorted(
        {(-(-tiles // ns), ns) for tiles in several for ns in (1, 2, 4) if _fit(tiles, ns)}
    )


def _fit(tiles: int, units: int) -> bool:
    """Whether the output tiles fill this number of units."""
    of_unit = -(-tiles // units)
    return of_unit <= 16 and (
        units == 1 or (tiles >= 6 and of_unit >= 3 and of_unit * units - tiles <= 1)
    )


def _planes(p: Pattern, size: int) -> list[tuple[int, int]]:
    """Whole blocks i of a column, and j of each: few of many."""
    wide = 1024 // size  # features of a row that several blocks should have
    several = [
        (groups, p.d)
        for groups in (1, 2, 4, 8, 16, 32)
        if (p.d <= 4 * _WHOLE_J or p.d * p.c * size <= _SHORT)
        and (groups == 1 or (groups <= p.a and groups * p.d * max(p.b, p.c) <= wide))
    ]
    windows = [(1, jc) for jc in (4, 8, 16, 32, 64) if jc * size >= 16 and jc < p.d]
    is_long = p.d * p.c * size > _LONG  # weights of few outputs, of all j, fill the memory
    return several[-3:] + (windows[-3:] if p.d > _WHOLE_J or is_long else [])


def _parts(most: int) -> list[int]:
    """Numbers of parts, at least two, into which a sum of ``most`` steps may be split."""
    several = [parts for parts in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64) if parts <= most]
    return sorted({-(-most // -(-most // parts)) for parts in several})
