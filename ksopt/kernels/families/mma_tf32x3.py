"""The fp32 tensor-core family for batch first (csrc/cuda/mma_tf32x3.cuh)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import astuple, dataclass

from ksopt.kernels import codegen
from ksopt.kernels.families import naive
from ksopt.kernels.families.fold import Fold
from ksopt.kernels.families.fold import fold as fold_of
from ksopt.kernels.launcher import Launcher
from ksopt.kernels.problem import SHARED_LIMIT, Geometry, Problem
from ksopt.patterns.chain import Pattern

DTYPES = ("float32",)

_REGISTERS = 65536  # of a multiprocessor
_LARGEST_INT = 2**31 - 1


def fold(d: int) -> Fold:
    """The fold of ``d``, which is 1, 2, 3, 6 or a multiple of 4."""
    return fold_of(d, 4)


@dataclass(frozen=True)
class Config:
    """Template arguments of ``MmaTf32x3Tile``, in its order and with its meaning."""

    warps_j: int
    warps_m: int
    warps_n: int
    mt: int
    nt: int
    kl: int
    stages: int
    blocks: int
    resident: bool
    max_blocks: int
    """Blocks of the largest launch; not a template argument."""

    @property
    def threads(self) -> int:
        return 32 * self.warps_j * self.warps_m * self.warps_n

    @property
    def rows(self) -> int:
        return self.warps_m * self.mt * 16

    @property
    def outputs(self) -> int:
        return self.warps_n * self.nt * 8

    def columns(self, p: Pattern) -> int:
        """Tiles that together cover all outputs of the same rows."""
        return p.a * (p.d // (self.warps_j * fold(p.d).j)) * (p.b // self.outputs)

    def shared_bytes(self, p: Pattern) -> int:
        """Dynamic shared memory of a block."""
        f = fold(p.d)
        width = self.warps_j * f.j
        spread = self.warps_j if p.d % 4 == 0 else f.run
        stage = row_pitch(self.kl * width // 4, spread)
        whole = row_pitch(-(-p.c // f.unit) * f.unit * width // 4, spread)
        rows = self.stages * stage * (self.rows + (0 if self.resident else self.outputs))
        rows += whole * self.outputs if self.resident else 0
        slices = self.warps_m * self.warps_n * slice_chunks(f, self.warps_j, self.nt, spread)
        return (rows + slices) * 16

    def registers(self, p: Pattern) -> int:
        """Registers a thread, roughly: sums, split operands, parts of sums, addresses."""
        f = fold(p.d)
        sums = self.mt * self.nt * f.j * 4
        operands = self.mt * f.j * f.steps * 8 + f.chunks * 4
        return sums + operands + 16 + 38


def supports(problem: Problem) -> str | None:
    """None if the family computes ``problem``; otherwise the reason why not."""
    p = problem.pattern
    if problem.dtype not in DTYPES:
        return f"{problem.dtype} is not {DTYPES[0]}"
    if problem.batch_last:
        return "batch_last has its own kernels"
    if p.d % 4 != 0 and p.d not in (1, 2, 3, 6):
        return f"d = {p.d} is not 1, 2, 3, 6 or a multiple of 4"
    if p.b % 8 != 0:
        return f"b = {p.b} is not a multiple of 8"
    if p.c * p.d % 4 != 0:
        return f"c*d = {p.c * p.d} is not a multiple of 4, so rows of a group are not aligned"
    if max(p.in_features, p.out_features, p.b * p.c * p.d) > _LARGEST_INT:
        return f"{p} has more elements in a row or a group than 32 bits count"
    return None


def configs(problem: Problem, multiprocessors: int) -> Iterator[Config]:
    """All tiles worth considering, without order."""
    p = problem.pattern
    f = fold(p.d)
    warps_js = [j for j in (1, 2) if p.d % (4 * j) == 0] if p.d % 4 == 0 else [1]
    kls = [kl for kl in (8, 16, 32, 64) if kl % f.unit == 0 and kl <= max(f.unit, p.c)]
    for warps_j, warps_m, warps_n, mt, nt in itertools.product(
        warps_js, (1, 2, 4, 8), (1, 2, 4), (1, 2), (1, 2, 3, 4, 6, 8, 12, 16)
    ):
        if warps_j * warps_m * warps_n not in (4, 8) or p.b % (warps_n * nt * 8):
            continue
        shape = (warps_j, warps_m, warps_n, mt, nt)
        least = Config(*shape, f.unit, 2, 1, False, 0)
        columns, registers = least.columns(p), least.registers(p)
        for kl, stages, blocks, resident in itertools.product(
            kls, (2, 3, 4), (1, 2, 3), (False, True)
        ):
            if registers > min(256, _REGISTERS // (least.threads * blocks)):
                continue
            slots = multiprocessors * blocks
            max_blocks = max(1, slots // columns) * columns if resident else slots
            config = Config(*shape, kl, stages, blocks, resident, max_blocks)
            if config.shared_bytes(p) * blocks <= SHARED_LIMIT:
                yield config


def geometry(problem: Problem, config: Config) -> Geometry:
    """How the kernel is launched."""
    return Geometry(
        threads=config.threads,
        shared_bytes=config.shared_bytes(problem.pattern),
        rows_per_tile=config.rows,
        tiles_per_row_tile=config.columns(problem.pattern),
        max_blocks=config.max_blocks,
    )


def kernel_name(problem: Problem, exact: bool) -> str:
    """The kernel's name, as profilers show it."""
    return codegen.kernel_name("mma_tf32x3", "float32" if exact else "tf32", problem.pattern)


def source(problem: Problem, config: Config, exact: bool = True) -> str:
    """The generated file: one instance of the template.

    Args:
        problem: one that `supports` takes.
        config: one of `configs`.
        exact: FP32 accuracy, by three TF32 products; otherwise one, which is TF32's own accuracy.
    """
    p = problem.pattern
    arguments = ", ".join(str(int(value)) for value in astuple(config)[:-1])
    facts = {"Tile::SHARED_BYTES": config.shared_bytes(p)}
    instance = f"MmaTf32x3Tile<Support, {arguments}, {3 if exact else 1}>"
    tile = codegen.tile("mma_tf32x3", p, instance, facts, "mma_tf32x3")
    return tile + codegen.kernel(kernel_name(problem, exact), "mma_tf32x3_kernel<Support, Tile>")


def launcher(problem: Problem, config: Config, device: int, exact: bool = True) -> Launcher:
    """Compile and load the kernel for ``problem`` on CUDA device ``device``."""
    return naive.with_naive_fallback(
        problem,
        kernel_name(problem, exact),
        source(problem, config, exact),
        geometry(problem, config),
        device,
    )


def row_pitch(chunks: int, spread: int) -> int:
    """``row_pitch`` of mma_tf32x3.cuh."""
    return chunks + ((1 if spread == 2 else 4) - chunks) % 8


def slice_chunks(f: Fold, warps_j: int, nt: int, spread: int) -> int:
    """16-byte chunks of the buffer through which a warp's results leave."""
    preferred = (4, 2, 1) if f.j == 1 else (2, 1) if f.j < 4 else (1,)
    slice_n = next(n for n in preferred if nt % n == 0)
    return 16 * row_pitch(slice_n * 2 * warps_j * f.j, spread)
