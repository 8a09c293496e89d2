"""The 16-bit family for batch last on Hopper's tensor cores (csrc/cuda/batch_last16_wgmma.cuh)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace

import torch

from ksopt.kernels import batch_last16
from ksopt.kernels.batch_last16 import DTYPES, PackingLauncher, fits, steps_of
from ksopt.kernels.launch import Launcher, prepare
from ksopt.kernels.problem import Geometry, Problem
from ksopt.pattern import Pattern


@dataclass(frozen=True)
class Config:
    """Template arguments of ``BatchLast16WgmmaTile``, in its order and with its meaning."""

    warpgroups: int
    mt: int
    rows: int
    """Columns of x and y, which are rows of the batch, in a tile: BM."""
    kl: int
    stages: int
    blocks: int
    packed: bool
    """Whether the launcher lays the weight out as [a, d, b, c] first."""
    groups: int
    """Groups of blocks that share the work, in the largest launch; not a template argument."""

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups

    @property
    def outputs(self) -> int:
        return self.warpgroups * self.mt * 64

    def output_tiles(self, p: Pattern) -> int:
        """Blocks of a group: together they cover all outputs of their (i, j)."""
        return -(-p.b // self.outputs)

    def shared_bytes(self, p: Pattern) -> int:
        """Dynamic shared memory of a block."""
        ring = self.stages * self.kl * self.rows * 2
        weights = steps_of(p) * 2 * self.outputs * 16
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
    steps = steps_of(p)
    outputs64 = -(-p.b // 64)
    for warpgroups, mt, rows in itertools.product((1, 2, 3, 4, 6), (1, 2, 3), (64, 128, 192, 256)):
        outputs = warpgroups * mt
        tiles = -(-outputs64 // outputs)
        # Outputs that do not exist are computed too: few of them, or none where b is small.
        if (tiles * outputs - outputs64) * 4 > outputs64 or 128 * warpgroups % (rows // 8):
            continue
        for kl, stages, blocks in itertools.product((1, 2, 3, 4, 6, 8), (3, 4, 5, 6, 8), (1, 2, 3)):
            if steps % kl:
                continue
            groups = max(1, multiprocessors * blocks // tiles)
            config = Config(warpgroups, mt, rows, kl * 16, stages, blocks, True, groups)
            if fits(config.shared_bytes(p), config.registers(), config.threads, blocks):
                yield config
                if p.d > 1:  # with d = 1 the canonical weight is packed already
                    yield replace(config, packed=False)


def geometry(problem: Problem, config: Config) -> Geometry:
    """How the kernel is launched."""
    p = problem.pattern
    tiles = config.output_tiles(p)
    return Geometry(
        threads=config.threads,
        shared_bytes=config.shared_bytes(p),
        rows_per_tile=config.rows,
        tiles_per_row_tile=p.a * p.d * tiles,
        max_blocks=config.groups * tiles,
    )


def kernel_name(problem: Problem) -> str:
    """The kernel's name, as profilers show it."""
    shape = "_".join(map(str, problem.pattern.weight_shape))
    return f"ksopt_batch_last16_wgmma_{problem.dtype}_{shape}"


def source(problem: Problem, config: Config) -> str:
    """The generated file: one instance of the template."""
    p = problem.pattern
    arguments = ", ".join(str(value).lower() for value in astuple(config)[:-1])
    return (
        '#include "batch_last16_wgmma.cuh"\n'
        f"using Support = Pattern<{p.a}, {p.b}, {p.c}, {p.d}>;\n"
        f"using Tile = BatchLast16WgmmaTile<Support, {arguments}>;\n"
        f"static_assert(Tile::SHARED_BYTES == {config.shared_bytes(p)}, "
        '"csrc and kernels/batch_last16_wgmma.py disagree");\n'
        'extern "C" __global__ void __launch_bounds__(Tile::THREADS, Tile::BLOCKS)\n'
        f"{kernel_name(problem)}(const __grid_constant__ Arguments arguments) {{\n"
        f"  batch_last16_wgmma_kernel<{DTYPES[problem.dtype]}, Support, Tile>(arguments);\n"
        "}\n"
    )


def launcher(problem: Problem, config: Config, device: int) -> Launcher:
    """Compile and load the kernels for ``problem`` on CUDA device ``device``.

    Operands whose rows do not start at multiples of 16 bytes go to the older tensor cores.
    """
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    older = batch_last16.default_config(problem, multiprocessors)
    older = replace(older, packed=config.packed)
    shifted = prepare(
        problem,
        batch_last16.kernel_name(problem),
        batch_last16.source(problem, older, shifted=True),
        batch_last16.geometry(problem, older),
        device,
    )
    launch = prepare(
        problem,
        kernel_name(problem),
        source(problem, config),
        geometry(problem, config),
        device,
        fallback=shifted,
    )
    return PackingLauncher(launch) if config.packed else launch
