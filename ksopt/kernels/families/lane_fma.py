"""The family for short sums of many j, in ordinary arithmetic (csrc/cuda/lane_fma.cuh)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import astuple, dataclass

from ksopt.kernels import codegen
from ksopt.kernels.families.base import ANY_TYPE, TemplateFamily, register_family
from ksopt.kernels.families.cost_terms import overlapped
from ksopt.kernels.launcher import MakeLauncher
from ksopt.kernels.problem import DeviceSpec, Geometry, Problem
from ksopt.patterns.chain import Pattern

_THREADS = 256
_MAX_BLOCKS = 2**31 - 1
_LARGEST_INT = 2**31 - 1
_REGISTERS, _MOST_SUMS = 65536, 64
_SHORTEST_RUN = 16  # bytes of the j of one k: runs of fewer share sectors with their neighbors
_LONGEST_SUM = 128
# Multiply-adds for each element of x and y. Tensor cores are faster above this many.
_MOST_WORK = 40.0

# The cost model's constants, of one multiprocessor in a microsecond, before any fit: the
# arithmetic's own rates.
_INSTRUCTIONS = 4_200.0
_DRAM_BYTES = 32_300.0
_L1_ACCESSES = 1_300.0
_LAUNCH_US = 3.7
_OVERLAP = 3.0


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
        if work > _MOST_WORK:
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
        row_tiles = -(-batch // c.tile_rows)
        blocks = row_tiles * p.a * c.windows(p)
        warps = blocks * c.threads / 32
        chunks = -(-p.b // c.outputs)
        loads = (c.rows + c.outputs) * p.c * chunks
        # 16-bit values are converted one by one, addresses are computed once for several l.
        converted = loads * c.width if size == 2 else 0
        added = c.rows * p.b * p.c * c.width
        stored = c.rows * p.b
        work = warps * (1.5 * loads + converted + added + 3 * stored + 60) / _INSTRUCTIONS
        accesses = warps * (loads + stored) * max(1, c.width * size // 4) / _L1_ACCESSES
        memory = batch * (p.in_features + p.out_features) * size / _DRAM_BYTES
        registers = min(255, 2 * c.rows * (c.outputs + 1) * c.width + 4 * c.rows + 48)
        resident = device.multiprocessors * max(1, _REGISTERS // (registers * c.threads))
        busy = blocks / (-(-blocks // resident) * resident)
        filled = min(1.0, blocks / device.multiprocessors)
        streaming = overlapped((memory / filled, (work + accesses) / max(busy, 0.3)), _OVERLAP)
        return streaming / device.multiprocessors / max(filled, 1e-3) ** 0.5 + _LAUNCH_US

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
