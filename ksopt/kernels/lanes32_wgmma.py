"""The fp32 family for batch first on Hopper's tensor cores (csrc/cuda/lanes32_wgmma.cuh)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace

from ksopt.kernels import general, lanes32
from ksopt.kernels.fold import Fold
from ksopt.kernels.lanes32 import fold, row_pitch, slice_chunks
from ksopt.kernels.launch import Launcher, prepare
from ksopt.kernels.problem import SHARED_LIMIT, Geometry, Problem
from ksopt.pattern import Pattern


@dataclass(frozen=True)
class Config:
    """Template arguments of ``Lanes32WgmmaTile``, in its order and with its meaning."""

    warpgroups_j: int
    warpgroups_m: int
    nt: int
    kl: int
    stages: int
    resident: bool
    pending: int
    max_blocks: int
    """Blocks of the largest launch; not a template argument."""

    @property
    def threads(self) -> int:
        """Threads a block, with the warpgroup that loads."""
        return 128 * (1 + self.warpgroups_j * self.warpgroups_m)

    @property
    def rows(self) -> int:
        return self.warpgroups_m * 64

    @property
    def outputs(self) -> int:
        return self.nt * 8

    def columns(self, p: Pattern) -> int:
        """Tiles that together cover all outputs of the same rows."""
        return p.a * (p.d // (self.warpgroups_j * fold(p.d).j)) * (p.b // self.outputs)

    def shared_bytes(self, p: Pattern, exact: bool = True) -> int:
        """Dynamic shared memory of a block."""
        f = fold(p.d)
        width = self.warpgroups_j * f.j
        spread = self.warpgroups_j if p.d % 4 == 0 else f.run
        chunks = self.kl * width // 4
        stage = self.rows * row_pitch(chunks, spread)
        layers = -(-p.c // f.unit) * f.length if self.resident else self.kl // 4
        weights = layers * width * (2 if exact else 1) * self.outputs
        if not self.resident:
            stage += self.outputs * (chunks | 1) + weights
        slices = 4 * self.warpgroups_m * slice_chunks(f, self.warpgroups_j, self.nt, spread)
        barriers = 8
        total = barriers + (weights if self.resident else 0) + self.stages * stage + slices
        return total * 16

    def registers(self, p: Pattern) -> int:
        """Registers a thread, roughly: sums, parts of them, operands, addresses."""
        f = fold(p.d)
        sums = self.nt * f.j * 4 + (self.pending + 1) * self.nt * 4
        return sums + f.chunks * 8 + 8 * (self.pending + 1) + 8


def supports(problem: Problem) -> str | None:
    """None if the family computes ``problem`` (on sm_90); otherwise the reason why not."""
    return lanes32.supports(problem)


def configs(problem: Problem, multiprocessors: int) -> Iterator[Config]:
    """All tiles worth considering, without order."""
    p = problem.pattern
    f = fold(p.d)
    warpgroups_js = [j for j in (1, 2) if p.d % (4 * j) == 0] if p.d % 4 == 0 else [1]
    for warpgroups_j, warpgroups_m, nt in itertools.product(
        warpgroups_js, (1, 2, 3), (1, 2, 3, 4, 6, 8, 12, 16)
    ):
        if warpgroups_j * warpgroups_m not in (2, 3) or p.b % (nt * 8):
            continue
        for kl, stages, resident, pending in itertools.product(
            (8, 16, 32, 64), (3, 4, 5, 6), (False, True), (0, 1)
        ):
            if kl % f.unit or kl > max(f.unit, p.c):
                continue
            config = Config(warpgroups_j, warpgroups_m, nt, kl, stages, resident, pending, 0)
            columns = config.columns(p)
            walkers = max(1, multiprocessors // columns)
            config = replace(config, max_blocks=walkers * columns if resident else multiprocessors)
            fits = config.registers(p) <= _registers(f, warpgroups_j * warpgroups_m)
            if fits and config.shared_bytes(p) <= SHARED_LIMIT:
                yield config


def geometry(problem: Problem, config: Config, exact: bool = True) -> Geometry:
    """How the kernel is launched."""
    return Geometry(
        threads=config.threads,
        shared_bytes=config.shared_bytes(problem.pattern, exact),
        rows_per_tile=config.rows,
        tiles_per_row_tile=config.columns(problem.pattern),
        max_blocks=config.max_blocks,
    )


def kernel_name(problem: Problem, exact: bool) -> str:
    """The kernel's name, as profilers show it."""
    shape = "_".join(map(str, problem.pattern.weight_shape))
    return f"ksopt_lanes32_wgmma_{'float32' if exact else 'tf32'}_{shape}"


def source(problem: Problem, config: Config, exact: bool = True) -> str:
    """The generated file: one instance of the template.

    Args:
        problem: one that `supports` takes.
        config: one of `configs`.
        exact: FP32 accuracy, by three TF32 products; otherwise one, which is TF32's own accuracy.
    """
    p = problem.pattern
    arguments = ", ".join(str(int(value)) for value in astuple(config)[:-1])
    return (
        '#include "lanes32_wgmma.cuh"\n'
        f"using Support = Pattern<{p.a}, {p.b}, {p.c}, {p.d}>;\n"
        f"using Tile = Lanes32WgmmaTile<Support, {arguments}, {3 if exact else 1}>;\n"
        f"static_assert(Tile::SHARED_BYTES == {config.shared_bytes(p, exact)}, "
        '"csrc and kernels/lanes32_wgmma.py disagree");\n'
        'extern "C" __global__ void __launch_bounds__(Tile::THREADS, 1)\n'
        f"{kernel_name(problem, exact)}(const __grid_constant__ Arguments arguments) {{\n"
        "  lanes32_wgmma_kernel<Support, Tile>(arguments);\n"
        "}\n"
    )


def launcher(problem: Problem, config: Config, device: int, exact: bool = True) -> Launcher:
    """Compile and load the kernel for ``problem`` on CUDA device ``device`` (sm_90)."""
    return prepare(
        problem,
        kernel_name(problem, exact),
        source(problem, config, exact),
        geometry(problem, config, exact),
        device,
        fallback=general.launcher(problem, device),
    )


def _registers(f: Fold, multipliers: int) -> int:
    """``MULTIPLIER_REGISTERS`` of lanes32_wgmma.cuh."""
    if multipliers == 3:
        return (512 - (80 if f.run == 3 else 56)) // 3
    return (504 - (88 if f.run == 3 else 40)) // 2
