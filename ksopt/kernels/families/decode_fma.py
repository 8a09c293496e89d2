"""The family for a few rows of x in ordinary arithmetic (csrc/cuda/decode_fma.cuh)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass

from ksopt.kernels import codegen
from ksopt.kernels.families.base import ANY_TYPE, TemplateFamily, register_family
from ksopt.kernels.problem import SHARED_LIMIT, DeviceSpec, Geometry, Problem
from ksopt.patterns.chain import Pattern

MAX_BATCH = 64
"""More rows than this are computed correctly, but other families are faster."""

_MAX_THREADS = 512
_MAX_BLOCKS = 2**30  # never reached: its outputs would not fit into any device's memory

# The cost model's constants, before any fit: what the tensor-core family's fit gave, and the
# arithmetic's own rates.
_LAUNCH_US = 1.1
_DRAM_BYTES_US = 3_500_000.0
_L2_BYTES_US = 70_000.0  # into one multiprocessor
_ROUND_US = 0.2
_FMA_US = 150_000.0  # multiply-adds of a multiprocessor
_SHARED_BYTES_US = 100_000.0


@dataclass(frozen=True)
class Config:
    """Template arguments of ``DecodeFmaTile``, in its order and with its meaning."""

    jw: int
    lt: int
    kt: int
    kr: int
    m: int
    units: int

    vector: int
    """Elements of a 16-byte chunk; follows from the dtype, not a template argument."""

    @property
    def blocks(self) -> int:
        """Blocks that must fit on a multiprocessor."""
        return 1

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.jw * self.lt * self.kt

    @property
    def outputs(self) -> int:
        """Values of k that a block owns."""
        return self.kt * self.kr

    def columns(self, p: Pattern) -> int:
        """Blocks that together cover all outputs of the same rows."""
        return p.a * (period(p, self.vector) // self.jw) * -(-p.b // self.outputs)

    def places(self, p: Pattern) -> int:
        """Sums of the threads with one share of l, for one row and output."""
        return p.d if self.vector % p.d == 0 else self.jw * self.vector

    def shared_bytes(self, p: Pattern) -> int:
        """Dynamic shared memory of a block."""
        x = self.m * _periods(p, self.vector) * self.jw * 16
        return max(x, self.lt * self.m * self.outputs * self.places(p) * 4)

    def registers(self, p: Pattern) -> int:
        """Registers a thread, roughly: sums, weights, and what addresses take."""
        sums = self.m * self.kr * min(self.places(p), self.vector)
        return sums + self.units * self.kr * 4 + self.vector + 40


def period(p: Pattern, vector: int) -> int:
    """Chunks of ``vector`` elements after which j starts again."""
    return p.d // math.gcd(p.d, vector)


def _periods(p: Pattern, vector: int) -> int:
    """Periods in a row of the weight."""
    return p.c * p.d // vector // period(p, vector)


@register_family
class DecodeFma(TemplateFamily[Config]):
    """Multiply-adds for a few rows of x."""

    name = "decode_fma"
    template = "decode_fma.cuh"
    dtypes = ANY_TYPE
    layout = "batch_first"
    max_batch = MAX_BATCH
    takes_epilogues = True
    takes_float32_results = True

    def unsupported_shape(self, problem: Problem, device: DeviceSpec) -> str | None:
        p = problem.pattern
        vector = 4 if problem.dtype == "float32" else 8
        if p.c * p.d % vector != 0:
            words = f"c*d = {p.c * p.d} is no multiple of {vector}"
            return f"{words}, so rows of the weight are not aligned"
        if next(self.configs(problem, device), None) is None:
            return f"a sum over c = {p.c} does not fit in shared memory, or d = {p.d} in a block"
        return None

    def configs(self, problem: Problem, device: DeviceSpec) -> Iterator[Config]:
        p, vector = problem.pattern, 4 if problem.dtype == "float32" else 8
        whole, chunks = p.d % vector == 0, period(p, vector)
        periods = _periods(p, vector)
        for jw in {w for w in (chunks, 1, 2, 4, 8, 16, 32) if chunks % w == 0}:
            # A window of less than 64 bytes wastes what a sector or line brings beside it.
            if jw != chunks and (not whole or jw < 4 or jw * 2 > chunks):
                continue
            for lt, kt, kr, m, units in itertools.product(
                (1, 2, 4, 8, 16, 32, 64, 128, 256),
                (1, 2, 4, 8),
                (1, 2, 4),
                (1, 2, 4, 8, 16),
                (1, 2, 4),
            ):
                config = Config(jw, lt, kt, kr, m, units, vector)
                if config.threads % 32 or not 64 <= config.threads <= _MAX_THREADS:
                    continue
                if kt * kr >= p.b + kr or lt * units >= periods + units * min(lt, 32):
                    continue
                if config.registers(p) > 128 or config.shared_bytes(p) > SHARED_LIMIT:
                    continue
                yield config

    def predicted_us(
        self, problem: Problem, config: Config, batch: int, device: DeviceSpec
    ) -> float:
        p = problem.pattern
        if batch > MAX_BATCH:
            return math.inf
        size = 16 // config.vector
        share = -(-(-(-batch // config.m) * config.columns(p)) // device.multiprocessors)
        rows = min(batch, config.m)
        row = _periods(p, config.vector) * config.jw * 16  # bytes of the window
        rounds = -(-_periods(p, config.vector) // (config.lt * config.units))
        resident = max(1, min(65536 // (config.registers(p) * config.threads), share))
        flops = share * rows * config.outputs * row / size
        copied = share * rows * row * (1 + config.outputs / config.kr)
        summed = 2 * share * rows * config.outputs * config.places(p) * 4 * config.lt
        return (
            _LAUNCH_US
            + -(-share // resident) * rounds * _ROUND_US
            + max(
                size * p.nnz / _DRAM_BYTES_US, share * (config.outputs + rows) * row / _L2_BYTES_US
            )
            + max(flops / _FMA_US, copied / _SHARED_BYTES_US)
            + summed / _SHARED_BYTES_US
        )

    def geometry(self, problem: Problem, config: Config) -> Geometry:
        return Geometry(
            threads=config.threads,
            shared_bytes=config.shared_bytes(problem.pattern),
            rows_per_tile=config.m,
            tiles_per_row_tile=config.columns(problem.pattern),
            max_blocks=_MAX_BLOCKS,
            early=True,
        )

    def source(self, problem: Problem, config: Config) -> str:
        p, dtype = problem.pattern, self.dtypes[problem.dtype]
        arguments = ", ".join(map(str, astuple(config)[:-1]))
        facts = {"Tile::SHARED_BYTES": config.shared_bytes(p)}
        instance = f"DecodeFmaTile<{dtype}, Support, {arguments}>"
        call = f"decode_fma_kernel<{dtype}, Support, Tile>"
        tile = codegen.tile(self.template, p, instance, facts, self.name)
        name, after = self.kernel_name(problem), problem.epilogue
        return tile + codegen.kernel(name, call, bounds="Tile::THREADS", after=after)
