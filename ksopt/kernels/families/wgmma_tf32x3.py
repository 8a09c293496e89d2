"""The fp32 family for batch first on Hopper's tensor cores (csrc/cuda/wgmma_tf32x3.cuh)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace

from ksopt.kernels import codegen, packing_launcher
from ksopt.kernels.families import mma_tf32x3, naive
from ksopt.kernels.families.fold import Fold
from ksopt.kernels.families.mma_tf32x3 import fold, row_pitch, slice_chunks
from ksopt.kernels.families.wgmma_tf32x3_cost import predicted_us as predicted_us
from ksopt.kernels.launcher import prepare
from ksopt.kernels.packing_launcher import PackedLauncher
from ksopt.kernels.problem import SHARED_LIMIT, Geometry, Problem
from ksopt.patterns.chain import Pattern

_BARRIER_BYTES = 256
_STAGES = (8, 6, 4, 3, 2)
_LONG_SUM = 128
"""From so many l on, exact products may leave sums of 16 and not only 8 to the tensor cores:
cuBLAS's own error is larger there (docs/performance.md)."""


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
        return p.a * (p.d // (self.warpgroups_j * fold(p.d).j)) * (p.b // self.outputs)

    def turn(self, f: Fold) -> int:
        """Values of l that a warp multiplies at a time."""
        return f.unit * max(1, self.chain // f.steps)

    def column_layers(self, p: Pattern) -> int:
        """Layers of four l in the packed weights of a column, with zeros at the end."""
        f = fold(p.d)
        whole = self.turn(f) if self.resident else self.kl
        return -(-p.c // whole) * whole // 4

    def layer_bytes(self, p: Pattern, exact: bool = True) -> int:
        """Packed weights of four l of a column."""
        return self.warpgroups_j * fold(p.d).j * (2 if exact else 1) * self.outputs * 16

    def packed_elements(self, p: Pattern, exact: bool = True) -> int:
        """Elements of the packed weight."""
        return self.columns(p) * self.column_layers(p) * self.layer_bytes(p, exact) // 4

    def shared_bytes(self, p: Pattern, exact: bool = True) -> int:
        """Dynamic shared memory of a block."""
        f = fold(p.d)
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
        f = fold(p.d)
        sums = self.nt * f.j * 4 + (self.pending + 1) * self.nt * 4
        operands = f.chunks * 8 * max(1, self.chain // f.steps)
        return sums + operands + 8 * self.chain * (self.pending + 1) + 8


def supports(problem: Problem) -> str | None:
    """None if the family computes ``problem`` (on sm_90); otherwise the reason why not."""
    return mma_tf32x3.supports(problem)


def configs(problem: Problem, multiprocessors: int) -> Iterator[Config]:
    """All tiles worth considering, without order: each with as many stages as fit."""
    p = problem.pattern
    f = fold(p.d)
    chains = (1, 2) if p.c >= _LONG_SUM else (1,)
    for (group_j, group_m, teams), nt, kl, resident, chain, pending in itertools.product(
        _shapes(p.d), (1, 2, 3, 4, 6, 8, 12, 16), (8, 16, 32, 64), (False, True), chains, (0, 1)
    ):
        config = Config(group_j, group_m, teams, nt, kl, 0, resident, chain, pending, 0)
        turn = config.turn(f)
        if p.b % (nt * 8) or kl % turn or kl > max(turn, p.c):
            continue
        if config.registers(p) > _registers(config):
            continue
        columns = config.columns(p)
        walkers = max(1, multiprocessors // columns)
        most = walkers * columns if resident else multiprocessors
        deepest = (replace(config, stages=stages, max_blocks=most) for stages in _STAGES)
        fitting = (config for config in deepest if config.shared_bytes(p) <= SHARED_LIMIT)
        yield from itertools.islice(fitting, 1)


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
    return codegen.kernel_name("wgmma_tf32x3", "float32" if exact else "tf32", problem.pattern)


def source(problem: Problem, config: Config, exact: bool = True) -> str:
    """The generated file: one instance of the template.

    Args:
        problem: one that `supports` takes.
        config: one of `configs`.
        exact: FP32 accuracy, by three TF32 products; otherwise one, which is TF32's own accuracy.
    """
    call = "wgmma_tf32x3_kernel<Support, Tile>"
    kernel = codegen.kernel(kernel_name(problem, exact), call, bounds="Tile::THREADS, 1")
    return _tile(problem, config, exact) + kernel


def pack_problem(problem: Problem, config: Config, exact: bool = True) -> Problem:
    """Packing as the launcher sees it: the weight is x's only row, what is packed is y's."""
    return packing_launcher.problem_of(problem, config.packed_elements(problem.pattern, exact))


def pack_geometry(problem: Problem, config: Config, exact: bool = True) -> Geometry:
    """How the kernel that packs weights is launched."""
    p, f = problem.pattern, fold(problem.pattern.d)
    # A thread writes the matrices' places of one output, of all halves, j and l of its chunks.
    written = (2 if exact else 1) * f.j * f.run_l * 4
    return packing_launcher.geometry_of(-(-config.packed_elements(p, exact) // written))


def pack_name(problem: Problem, exact: bool) -> str:
    """The name of the kernel that packs weights, as profilers show it."""
    return codegen.kernel_name("mma_tf32x3_pack", "float32" if exact else "tf32", problem.pattern)


def pack_source(problem: Problem, config: Config, exact: bool = True) -> str:
    """The generated file of the kernel that packs weights for the tile."""
    name, call = pack_name(problem, exact), "mma_tf32x3_pack_kernel<Support, Tile>"
    kernel = codegen.kernel(name, call, bounds=str(packing_launcher.THREADS))
    return _tile(problem, config, exact) + kernel


def sources(problem: Problem, config: Config, exact: bool = True) -> list[str]:
    """The generated files of all that `launcher` compiles at once."""
    return [pack_source(problem, config, exact), source(problem, config, exact)]


def launcher(problem: Problem, config: Config, device: int, exact: bool = True) -> PackedLauncher:
    """Compile and load the kernels for ``problem`` on CUDA device ``device`` (sm_90)."""
    # Tiles with the same order of packed weights can share them.
    layers = config.column_layers(problem.pattern)
    form = f"wgmma_tf32x3 {config.warpgroups_j} {config.nt} {layers} {exact}"
    return PackedLauncher(
        form,
        prepare(
            pack_problem(problem, config, exact),
            pack_name(problem, exact),
            pack_source(problem, config, exact),
            pack_geometry(problem, config, exact),
            device,
        ),
        prepare(
            problem,
            kernel_name(problem, exact),
            source(problem, config, exact),
            geometry(problem, config, exact),
            device,
        ),
        functools.partial(naive.launcher, problem, device),
    )


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


def _tile(problem: Problem, config: Config, exact: bool) -> str:
    p = problem.pattern
    arguments = ", ".join(str(int(value)) for value in astuple(config)[:-1])
    facts = {
        "Tile::SHARED_BYTES": config.shared_bytes(p, exact),
        "Tile::COLUMNS * Tile::COLUMN_BYTES": 4 * config.packed_elements(p, exact),
    }
    instance = f"WgmmaTf32x3Tile<Support, {arguments}, {3 if exact else 1}>"
    return codegen.tile("wgmma_tf32x3", p, instance, facts, "wgmma_tf32x3")


def _registers(config: Config) -> int:
    """``MULTIPLIER_REGISTERS`` of wgmma_tf32x3.cuh."""
    if config.multipliers == 3:
        return (512 - (32 if config.warpgroups_j == 1 else 56)) // 3
    return (504 - 56) // 2
