"""The family for short sums of many j, in ordinary arithmetic (csrc/cuda/lane_fma.cuh)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import astuple, dataclass

from ksopt.kernels import codegen
from ksopt.kernels.families.base import ANY_TYPE, TemplateFamily, register_family
from ksopt.kernels.families.common.cost_terms import overlapped
from ksopt.kernels.launcher import MakeLauncher
from ksopt.kernels.problem import DeviceSpec, Geometry, Problem
from ksopt.patterns.chain import Pattern

_THREADS = 256
_MAX_BLOCKS = 2**31 - 1
_LARGEST_INT = 2**31 - 1
_MOST_SUMS = 64  # of a thread
_REGISTERS, _MOST_BLOCKS = 65536, 8  # of a multiprocessor
_SHORTEST_RUN = 64  # bytes of the j of one k: shorter runs share sectors with their neighbors
_LONGEST_SUM = 128
_MOST_WORK = 20.0  # multiply-adds for each element of x and y: with more, tensor cores are faster
_SHORT_SUM = 32  # in exact fp32 tensor cores add no shorter ones

# The cost model's constants, of one multiprocessor in a microsecond. Fitted to 278 tiles of 29
# problems (bfloat16 and float32, one H200): the fastest of a problem's three best predicted tiles
# takes 1.06 times as long as its fastest tile (geometric mean).
_INSTRUCTIONS = 3_530.0
_LOAD, _STORE, _TILE = 2.3, 0.5, 20  # instructions of a load with its conversion, a store, a tile
_UNHIDDEN = 4.4  # latency that other warps hide: see `predicted_us`
_DRAM_BYTES = 26_000.0
_SCATTER = 0.26  # rows of a thread lie apart: memory's rate falls with this power of their number
_LAUNCH_US = 5.0
_OVERLAP = 1.35


@dataclass(frozen=True)
class Config:
    """Template arguments of ``LaneFmaTile``, in its order and with its meaning."""

    threads: int
    slots: int
    rows: int
    outputs: int
    width: int

    @property
    def blocks(self) -> int:
        """Blocks that must fit on a multiprocessor."""
        return 1

    @property
    def groups(self) -> int:
        """Threads of a block that have the same j."""
        return self.threads // self.slots

    @property
    def tile_rows(self) -> int:
        """Rows of a block."""
        return self.groups * self.rows

    @property
    def registers(self) -> int:
        """Registers a thread, roughly: sums, values of x and weights, addresses."""
        values = int(3.4 * (self.rows + self.outputs) * self.width)
        return min(255, self.rows * self.outputs * self.width + values + 4 * self.rows + 40)

    def windows(self, p: Pattern) -> int:
        """Blocks that together cover all j of an i."""
        return -(-(p.d // self.width) // self.slots)

    def shared_bytes(self, p: Pattern) -> int:
        """No shared memory."""
        return 0


@register_family
class LaneFma(TemplateFamily[Config]):
    """Multiply-adds with neighboring j in neighboring threads."""

    name = "lane_fma"
    template = "lane_fma.cuh"
    dtypes = ANY_TYPE
    layout = "batch_first"

    def unsupported_shape(self, problem: Problem, device: DeviceSpec) -> str | None:
        p, size = problem.pattern, _element_bytes(problem)
        if p.d * size < _SHORTEST_RUN:
            return f"d = {p.d}: runs of {p.d * size} bytes are shorter than {_SHORTEST_RUN}"
        if p.c > _LONGEST_SUM:
            return f"sums of c = {p.c} > {_LONGEST_SUM} values are for tensor cores"
        work = p.b * p.c / (p.b + p.c)
        is_short = problem.dtype == "float32" and problem.exact and p.c < _SHORT_SUM
        if work > _MOST_WORK and not is_short:
            return f"{work:.0f} multiply-adds for each element moved are for tensor cores"
        if max(p.in_features, p.out_features, p.nnz) > _LARGEST_INT:
            return f"{p} has more elements in a row or a weight than 32 bits count"
        return None

    def configs(self, problem: Problem, device: DeviceSpec) -> Iterator[Config]:
        p = problem.pattern
        for width in (2, 1) if p.d % 2 == 0 else (1,):
            places = p.d // width
            slots = {-(-places // -(-places // most)) for most in (_THREADS, 64)}
            for slot, rows, outputs in itertools.product(
                sorted(slots), (1, 2, 4, 8), (1, 2, 3, 4, 6, 8, 12, 16)
            ):
                if outputs <= p.b and rows * outputs * width <= _MOST_SUMS:
                    yield Config(_THREADS, slot, rows, outputs, width)

    def predicted_us(
        self, problem: Problem, config: Config, batch: int, device: DeviceSpec
    ) -> float:
        p, size, c = problem.pattern, _element_bytes(problem), config
        blocks = -(-batch // c.tile_rows) * p.a * c.windows(p)
        loads = (c.rows * -(-p.b // c.outputs) + p.b) * p.c
        added = c.rows * p.b * p.c * c.width
        instructions = _LOAD * loads + added + _STORE * c.rows * p.b + _TILE
        resident = max(1, min(_REGISTERS // (c.registers * c.threads), _MOST_BLOCKS))
        warps = c.threads / 32
        work = blocks * warps * instructions / _INSTRUCTIONS
        work *= 1 + _UNHIDDEN / (resident * warps)
        memory = batch * (p.in_features + p.out_features) * size / _DRAM_BYTES
        memory *= c.rows**_SCATTER
        slots = device.multiprocessors * resident
        busy = blocks / (-(-blocks // slots) * slots)
        if blocks < slots:  # of one wave each multiprocessor has some blocks before any has all
            busy = max(busy, 0.5) if blocks >= device.multiprocessors else 0.2
        streaming = overlapped((memory, work / busy), _OVERLAP)
        return streaming / device.multiprocessors + _LAUNCH_US

    def geometry(self, problem: Problem, config: Config) -> Geometry:
        return Geometry(
            threads=config.threads,
            shared_bytes=0,
            rows_per_tile=config.tile_rows,
            tiles_per_row_tile=problem.pattern.a * config.windows(problem.pattern),
            max_blocks=_MAX_BLOCKS,
            early=True,
        )

    def source(self, problem: Problem, config: Config) -> str:
        p, dtype = problem.pattern, self.dtypes[problem.dtype]
        arguments = ", ".join(map(str, astuple(config)))
        facts = {
            "Tile::TILE_ROWS": config.tile_rows,
            "Tile::TILES_PER_ROW_TILE": p.a * config.windows(p),
        }
        instance = f"LaneFmaTile<{dtype}, Support, {arguments}>"
        tile = codegen.tile(self.template, p, instance, facts, self.name)
        call = "lane_fma_kernel<Tile>"
        return tile + codegen.kernel(self.kernel_name(problem), call, bounds="Tile::THREADS")

    def fallback(self, problem: Problem, config: Config, device_index: int) -> MakeLauncher | None:
        return None


def _element_bytes(problem: Problem) -> int:
    return 4 if problem.dtype == "float32" else 2
