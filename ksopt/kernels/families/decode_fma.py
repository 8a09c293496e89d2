"""The family for a few rows of x in ordinary arithmetic (csrc/cuda/decode_fma.cuh)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass

from ksopt.kernels import codegen
from ksopt.kernels.families import naive
from ksopt.kernels.families.naive import DTYPES
from ksopt.kernels.launcher import Launcher
from ksopt.kernels.problem import SHARED_LIMIT, Geometry, Problem
from ksopt.patterns.chain import Pattern

MAX_BATCH = 64
"""More rows than this are computed rightly, but other families are the ones to try."""

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


def supports(problem: Problem) -> str | None:
    """None if the family computes ``problem``; otherwise the reason why not."""
    p = problem.pattern
    if problem.dtype not in DTYPES:
        return f"{problem.dtype} is not one of {', '.join(DTYPES)}"
    if problem.batch_last:
        return "batch_last has its own kernels"
    vector = 4 if problem.dtype == "float32" else 8
    if p.c * p.d % vector != 0:
        return (
            f"c*d = {p.c * p.d} is no multiple of {vector}, so rows of the weight are not aligned"
        )
    if p.out_features % vector != 0:
        return f"{p.out_features} outputs are no multiple of {vector}, so rows of y are not aligned"
    if next(configs(problem, 132), None) is None:
        return f"a sum over c = {p.c} does not fit in shared memory, or d = {p.d} in a block"
    return None


def configs(problem: Problem, multiprocessors: int) -> Iterator[Config]:
    """All tiles worth considering, without order."""
    p, vector = problem.pattern, 4 if problem.dtype == "float32" else 8
    whole, chunks = p.d % vector == 0, period(p, vector)
    periods = _periods(p, vector)
    for jw in {w for w in (chunks, 1, 2, 4, 8, 16, 32) if chunks % w == 0}:
        # A window of less than 64 bytes wastes what a sector or line brings beside it.
        if jw != chunks and (not whole or jw < 4 or jw * 2 > chunks):
            continue
        for lt, kt, kr, m, units in itertools.product(
            (1, 2, 4, 8, 16, 32, 64, 128, 256), (1, 2, 4, 8), (1, 2, 4), (1, 2, 4, 8, 16), (1, 2, 4)
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
    p: Pattern, config: Config, batch: int, multiprocessors: int, exact: bool = True
) -> float:
    """Predicted time of a tile, so that only the best few need to be compiled and measured.

    Args:
        p: the pattern.
        config: the tile.
        batch: rows of x.
        multiprocessors: of the device.
        exact: taken because fp32 families take it; the arithmetic is always fp32.

    Returns:
        Microseconds; infinity for more than ``MAX_BATCH`` rows.
    """
    if batch > MAX_BATCH:
        return math.inf
    size = 16 // config.vector
    share = -(-(-(-batch // config.m) * config.columns(p)) // multiprocessors)
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
        + max(size * p.nnz / _DRAM_BYTES_US, share * (config.outputs + rows) * row / _L2_BYTES_US)
        + max(flops / _FMA_US, copied / _SHARED_BYTES_US)
        + summed / _SHARED_BYTES_US
    )


def geometry(problem: Problem, config: Config) -> Geometry:
    """How the kernel is launched."""
    return Geometry(
        threads=config.threads,
        shared_bytes=config.shared_bytes(problem.pattern),
        rows_per_tile=config.m,
        tiles_per_row_tile=config.columns(problem.pattern),
        max_blocks=_MAX_BLOCKS,
        early=True,
    )


def kernel_name(problem: Problem) -> str:
    """The kernel's name, as profilers show it."""
    return codegen.kernel_name("decode_fma", problem.dtype, problem.pattern)


def source(problem: Problem, config: Config) -> str:
    """The generated file: one instance of the template."""
    p, dtype = problem.pattern, DTYPES[problem.dtype]
    arguments = ", ".join(map(str, astuple(config)[:-1]))
    facts = {"Tile::SHARED_BYTES": config.shared_bytes(p)}
    instance = f"DecodeFmaTile<{dtype}, Support, {arguments}>"
    call = f"decode_fma_kernel<{dtype}, Support, Tile>"
    tile = codegen.tile("decode_fma", p, instance, facts, "decode_fma")
    return tile + codegen.kernel(kernel_name(problem), call, bounds="Tile::THREADS")


def launcher(problem: Problem, config: Config, device: int, exact: bool = True) -> Launcher:
    """Compile and load the kernel for ``problem`` on CUDA device ``device``."""
    return naive.with_naive_fallback(
        problem,
        kernel_name(problem),
        source(problem, config),
        geometry(problem, config),
        device,
    )
