"""The 16-bit tensor-core family for batch last (csrc/cuda/batch_last16.cuh)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace

from torch import Tensor

from ksopt.kernels.launch import Launcher, prepare
from ksopt.kernels.problem import Geometry, Problem
from ksopt.pattern import Pattern

DTYPES = {"float16": "Float16", "bfloat16": "BFloat16"}

SHARED_LIMIT = 227 * 1024
"""Dynamic shared memory of a block on sm_90, in bytes."""

_REGISTERS = 65536  # of a multiprocessor
_BLOCK_OVERHEAD_BYTES = 1024  # shared memory that the system takes for each block


@dataclass(frozen=True)
class Config:
    """Template arguments of ``BatchLast16Tile``, in its order and with its meaning."""

    warps_k: int
    warps_m: int
    mt: int
    nt: int
    kl: int
    stages: int
    blocks: int
    packed: bool
    """Whether the launcher lays the weight out as [a, d, b, c] first."""
    groups: int
    """Groups of blocks that share the work, in the largest launch; not a template argument."""

    @property
    def threads(self) -> int:
        return 32 * self.warps_k * self.warps_m

    @property
    def rows(self) -> int:
        """Columns of x and y, which are rows of the batch, in a tile."""
        return self.warps_m * self.nt * 8

    @property
    def outputs(self) -> int:
        return self.warps_k * self.mt * 16

    def output_tiles(self, p: Pattern) -> int:
        """Blocks of a group: together they cover all outputs of their (i, j)."""
        return -(-p.b // self.outputs)

    def shared_bytes(self, p: Pattern) -> int:
        """Dynamic shared memory of a block."""
        weights = self.outputs // 16 * steps_of(p) * 512
        ring = self.stages * self.kl * (self.rows // 8 + 1) * 16
        results = self.threads // 32 * 16 * (self.nt + 1) * 16
        return weights + ring + results

    def registers(self) -> int:
        """Registers a thread, roughly: sums, operands, and what addresses take."""
        return self.mt * self.nt * 4 + self.nt * 2 + 4 + 44


def supports(problem: Problem) -> str | None:
    """None if the family computes ``problem``; otherwise the reason why not."""
    if problem.dtype not in DTYPES:
        return f"{problem.dtype} is not one of {', '.join(DTYPES)}"
    if not problem.batch_last:
        return "batch_first has its own kernels"
    if next(configs(problem, 132), None) is None:
        return f"the weights of 16 outputs (c = {problem.pattern.c}) do not fit in shared memory"
    return None


def configs(problem: Problem, multiprocessors: int) -> Iterator[Config]:
    """All tiles worth considering, without order."""
    p = problem.pattern
    steps = steps_of(p)
    outputs16 = -(-p.b // 16)
    for warps_k, warps_m, mt, nt in itertools.product(
        (1, 2, 3, 4, 6, 8), (1, 2, 4, 8), (1, 2, 3, 4, 6), (4, 8, 16)
    ):
        outputs = warps_k * mt
        tiles = -(-outputs16 // outputs)
        # Outputs that do not exist are computed too: few of them, or none where b is small.
        if not 4 <= warps_k * warps_m <= 12 or (tiles * outputs - outputs16) * 8 > outputs16:
            continue
        for kl, stages, blocks in itertools.product(
            (1, 2, 3, 4, 6, 8, 12), (3, 4, 6, 8), (1, 2, 3, 4)
        ):
            # Where no stage of several steps divides c, stages of one step do.
            if steps % kl:
                continue
            groups = max(1, multiprocessors * blocks // tiles)
            config = Config(warps_k, warps_m, mt, nt, kl * 16, stages, blocks, True, groups)
            if fits(config.shared_bytes(p), config.registers(), config.threads, blocks):
                yield config
                if p.d > 1:  # with d = 1 the canonical weight is packed already
                    yield replace(config, packed=False)


def predicted_us(p: Pattern, config: Config, batch: int, multiprocessors: int) -> float:
    """Predicted time of a tile, so that only the best few need to be compiled and measured.

    Args:
        p: the pattern.
        config: the tile.
        batch: rows of x.
        multiprocessors: of the device.

    Returns:
        Microseconds.
    """
    x_bytes, y_bytes = 2 * batch * p.in_features, 2 * batch * p.out_features
    x_reads = config.output_tiles(p)
    steps = batch / 8 * p.a * p.d * x_reads * config.outputs / 16 * steps_of(p)
    step_bytes = 512 / config.nt + 256 / config.mt  # fragments of the weight and of x
    warps = config.threads // 32 * config.blocks
    in_flight = (config.stages - 1) * config.kl * config.rows * 2 * config.blocks
    streaming = max(
        (x_bytes + y_bytes) / 32_300,
        (x_bytes * x_reads + y_bytes) / 29_500,
        x_bytes * x_reads / (in_flight / 1.3),
        (steps * step_bytes + x_bytes * x_reads + 2 * y_bytes) / (169_000 * min(1.0, warps / 8)),
        steps / 530,
    )
    return streaming / multiprocessors


def default_config(problem: Problem, multiprocessors: int) -> Config:
    """The tile that is predicted to be the fastest for large batches."""
    return min(
        configs(problem, multiprocessors),
        key=lambda config: predicted_us(problem.pattern, config, 2**15, multiprocessors),
    )


def fits(shared_bytes: int, registers: int, threads: int, blocks: int) -> bool:
    """Whether so many blocks fit on a multiprocessor of sm_90."""
    shared = (shared_bytes + _BLOCK_OVERHEAD_BYTES) * blocks
    return shared <= SHARED_LIMIT + _BLOCK_OVERHEAD_BYTES and registers <= min(
        255, _REGISTERS // (threads * blocks)
    )


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
    return f"ksopt_batch_last16_{problem.dtype}_{shape}"


def source(problem: Problem, config: Config, shifted: bool = False) -> str:
    """The generated file: one instance of the template.

    Args:
        problem: what is computed.
        config: the tile.
        shifted: whether rows of x and y may start anywhere, and columns of x lie apart.
    """
    p = problem.pattern
    arguments = ", ".join(str(value).lower() for value in (*astuple(config)[:-1], shifted))
    return (
        '#include "batch_last16.cuh"\n'
        f"using Support = Pattern<{p.a}, {p.b}, {p.c}, {p.d}>;\n"
        f"using Tile = BatchLast16Tile<Support, {arguments}>;\n"
        f"static_assert(Tile::SHARED_BYTES == {config.shared_bytes(p)}, "
        '"csrc and kernels/batch_last16.py disagree");\n'
        'extern "C" __global__ void __launch_bounds__(Tile::THREADS, Tile::BLOCKS)\n'
        f"{kernel_name(problem)}(const __grid_constant__ Arguments arguments) {{\n"
        f"  batch_last16_kernel<{DTYPES[problem.dtype]}, Support, Tile>(arguments);\n"
        "}\n"
    )


def launcher(problem: Problem, config: Config, device: int) -> Launcher:
    """Compile and load the kernels for ``problem`` on CUDA device ``device``.

    There are two: one for rows of x and y that start at multiples of 16 bytes, one for all else.
    """
    name, shape = kernel_name(problem), geometry(problem, config)
    shifted = prepare(problem, name, source(problem, config, shifted=True), shape, device)
    launch = prepare(problem, name, source(problem, config), shape, device, fallback=shifted)
    return PackingLauncher(launch) if config.packed else launch


class PackingLauncher(Launcher):
    """Lays the weight out as [a, d, b, c] before each launch: no copy where d = 1."""

    def __init__(self, launch: Launcher) -> None:
        super().__init__(launch.problem, launch.geometry, launch.kernel, launch.fallback)
        self._launch = launch

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._launch(x, weight.permute(0, 3, 1, 2).contiguous())


def steps_of(p: Pattern) -> int:
    """Tensor-core steps over l."""
    return -(-p.c // 16)
