"""The 16-bit family for batch last on Hopper's tensor cores (csrc/cuda/batch_last_wgmma16.cuh)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import astuple, dataclass

import torch

from ksopt.kernels import codegen
from ksopt.kernels.families import batch_last, batch_last_mma16
from ksopt.kernels.families.batch_last import Load, PackingLauncher, fits, steps_of
from ksopt.kernels.families.batch_last_mma16 import DTYPES
from ksopt.kernels.launcher import Launcher, prepare
from ksopt.kernels.problem import Geometry, Problem
from ksopt.patterns.chain import Pattern

_COLUMNS_US = 2_320.0  # columns of products with 64 x 16 weights, in a microsecond


@dataclass(frozen=True)
class Config:
    """Template arguments of ``BatchLastWgmma16Tile``, in its order and with its meaning."""

    teams: int
    warpgroups: int
    mt: int
    rows: int
    """Columns of x and y, which are rows of the batch, in a tile: BM."""
    kl: int
    stages: int
    blocks: int
    groups: int
    """Groups of blocks that share the work, in the largest launch; not a template argument."""

    @property
    def threads(self) -> int:
        return 128 * self.teams * self.warpgroups

    @property
    def outputs(self) -> int:
        return self.warpgroups * self.mt * 64

    def shared_bytes(self, p: Pattern) -> int:
        """Dynamic shared memory of a block."""
        ring = self.teams * self.stages * self.kl * self.rows * 2
        weights = steps_of(p, 2) * 2 * self.outputs * 16
        return ring + weights + self.threads // 32 * 16 * 9 * 16

    def registers(self) -> int:
        """Registers a thread, roughly: sums and what addresses take."""
        return self.mt * self.rows // 2 + 64


def supports(problem: Problem) -> str | None:
    """None if the family computes ``problem`` (on sm_90); otherwise the reason why not."""
    if problem.dtype not in DTYPES:
        return f"{problem.dtype} is not one of {', '.join(DTYPES)}"
    if not problem.batch_last:
        return "batch_first has its own kernels"
    if next(configs(problem, 132), None) is None:
        return f"the weights of 64 outputs (c = {problem.pattern.c}) do not fit in shared memory"
    return None


def configs(problem: Problem, multiprocessors: int) -> Iterator[Config]:
    """All tiles worth considering, without order."""
    p = problem.pattern
    steps = steps_of(p, 2)
    outputs64 = -(-p.b // 64)
    for teams, warpgroups, mt, rows in itertools.product(
        (1, 2, 3, 4), (1, 2, 3, 4, 6), (1, 2, 3, 4, 6), (64, 128, 192, 256)
    ):
        outputs = warpgroups * mt
        tiles = -(-outputs64 // outputs)
        # Outputs that do not exist are computed too: few of them, or none where b is small.
        if (tiles * outputs - outputs64) * 4 > outputs64 or 128 * warpgroups % (rows // 8):
            continue
        kls = [kl for kl in (1, 2, 3, 4, 6, 8) if steps % kl == 0]
        for kl, stages, blocks in itertools.product(kls, (3, 4, 5, 6, 8), (1, 2, 3)):
            groups = max(1, multiprocessors * blocks // tiles)
            config = Config(teams, warpgroups, mt, rows, kl * 16, stages, blocks, groups)
            if fits(config.shared_bytes(p), config.registers(), config.threads, blocks):
                yield config


def predicted_us(p: Pattern, config: Config, batch: int, multiprocessors: int) -> float:
    """Predicted time of a tile in microseconds, for ``batch`` rows."""
    c = config
    products = steps_of(p, 2) * c.outputs // 64  # of 64 x rows results
    walkers = c.teams * c.blocks
    load = Load(
        element_bytes=2,
        rows=c.rows,
        outputs=c.outputs,
        groups=c.groups,
        blocks=c.blocks,
        walkers=walkers,
        warps=c.threads // 32 * c.blocks,
        stages_per_tile=steps_of(p, 2) * 16 // c.kl,
        in_flight=(c.stages - 2) * c.kl * c.rows * 2 * walkers,
        operand_bytes=products * (64 + c.rows) * 32,
        tensor_us=products * c.rows / _COLUMNS_US,
    )
    return batch_last.predicted_us(p, load, batch, multiprocessors)


def geometry(problem: Problem, config: Config) -> Geometry:
    """How the kernel is launched."""
    p, c = problem.pattern, config
    return batch_last.geometry(p, c.threads, c.shared_bytes(p), c.rows, c.outputs, c.groups)


def kernel_name(problem: Problem) -> str:
    """The kernel's name, as profilers show it."""
    return codegen.kernel_name("batch_last_wgmma16", problem.dtype, problem.pattern)


def source(problem: Problem, config: Config) -> str:
    """The generated file: one instance of the template."""
    p = problem.pattern
    arguments = ", ".join(map(str, astuple(config)[:-1]))
    facts = {"Tile::SHARED_BYTES": config.shared_bytes(p)}
    call = f"batch_last_wgmma16_kernel<{DTYPES[problem.dtype]}, Support, Tile>"
    instance = f"BatchLastWgmma16Tile<Support, {arguments}>"
    tile = codegen.tile("batch_last_wgmma16", p, instance, facts, "batch_last_wgmma16")
    return tile + codegen.kernel(kernel_name(problem), call)


def launcher(problem: Problem, config: Config, device: int) -> Launcher:
    """Compile and load the kernels for ``problem`` on CUDA device ``device``.

    Operands whose rows do not start at multiples of 16 bytes go to the older tensor cores.
    """
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    older = batch_last_mma16.default_config(problem, multiprocessors)
    launch = prepare(
        problem,
        kernel_name(problem),
        source(problem, config),
        geometry(problem, config),
        device,
        fallback=functools.partial(batch_last_mma16.shifted_launcher, problem, older, device),
    )
    return PackingLauncher(launch)
