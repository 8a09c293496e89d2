"""The fp32 family for batch last on Hopper's tensor cores (batch_last_wgmma_tf32x3.cuh)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace

import torch
from torch import Tensor

from ksopt.kernels import codegen, packing_launcher
from ksopt.kernels.families import batch_last, batch_last_mma_tf32x3
from ksopt.kernels.families.batch_last import output_tiles
from ksopt.kernels.families.batch_last_mma_tf32x3 import DTYPES
from ksopt.kernels.families.batch_last_wgmma_tf32x3_cost import predicted_us as predicted_us
from ksopt.kernels.launcher import prepare
from ksopt.kernels.packing_launcher import PackedLauncher
from ksopt.kernels.problem import SHARED_LIMIT, Geometry, Problem
from ksopt.patterns.chain import Pattern

_OUTPUT_TILES = (1, 2, 3, 4, 6, 8, 12, 16)  # for which wgmma_tf32.cuh has an instruction
_FEWEST_OUTPUT_TILES = 6  # of a warpgroup, where b has more: products of fewer are never faster
_SHAPES = ((1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1))  # warpgroups: of outputs, of columns
_BARRIER_BYTES = 128
_LOADER_THREADS, _LOADER_REGISTERS = 128, 24
_REGISTERS = 65536  # of a multiprocessor
_MOST_STAGES = 8
_STAGE_BYTES = (4096, 65536)  # the least and most of a stage that are worth a barrier
_LONG_SUM = 128
"""From so many l on, exact products may leave sums of 16 and not only 8 to the tensor cores:
cuBLAS's own error is larger there (docs/performance/fp32.md)."""


@dataclass(frozen=True)
class Config:
    """Template arguments of ``BatchLastWgmmaTf32x3Tile``, in its order and with its meaning."""

    groups_n: int
    groups_m: int
    mt: int
    nt: int
    kl: int
    stages: int
    resident: bool
    chain: int
    pending: int
    groups: int
    """Groups of blocks that share the work, in the largest launch; not a template argument."""

    @property
    def blocks(self) -> int:
        """Blocks that fit on a multiprocessor."""
        return 1

    @property
    def multipliers(self) -> int:
        """Warpgroups that multiply."""
        return self.groups_n * self.groups_m

    @property
    def threads(self) -> int:
        """Threads a block, with the warpgroup that loads."""
        return _LOADER_THREADS + 128 * self.multipliers

    @property
    def rows(self) -> int:
        """Columns of x and y, which are rows of the batch, in a tile: BM."""
        return 64 * self.groups_m * self.mt

    @property
    def outputs(self) -> int:
        return 8 * self.groups_n * self.nt

    def stages_per_tile(self, p: Pattern) -> int:
        return -(-p.c // self.kl)

    def layer_bytes(self, exact: bool = True) -> int:
        """Packed weights of four l of a column."""
        return (2 if exact else 1) * self.outputs * 16

    def column_bytes(self, p: Pattern, exact: bool = True) -> int:
        """Packed weights of a column and a block's outputs, with zeros at the end."""
        return self.stages_per_tile(p) * self.kl // 4 * self.layer_bytes(exact)

    def packed_elements(self, p: Pattern, exact: bool = True) -> int:
        """Elements of the packed weight."""
        return p.a * p.d * output_tiles(p, self.outputs) * self.column_bytes(p, exact) // 4

    def stage_bytes(self, exact: bool = True) -> int:
        """A stage: rows of x, and if streamed, layers of the weights."""
        weights = 0 if self.resident else self.kl // 4 * self.layer_bytes(exact)
        return self.kl * (self.rows + 8) * 4 + weights

    def shared_bytes(self, p: Pattern, exact: bool = True) -> int:
        """Dynamic shared memory of a block."""
        weights = self.column_bytes(p, exact) if self.resident else 0
        return _BARRIER_BYTES + weights + self.stages * self.stage_bytes(exact)

    def registers(self) -> int:
        """Registers a thread, roughly: sums, parts of them, operands, addresses."""
        parts = (self.pending + 1) * (self.nt * 4 + self.chain * 8)
        return self.mt * self.nt * 4 + parts + self.chain * 4 * self.mt + 12

    @property
    def register_limit(self) -> int:
        """``MULTIPLIER_REGISTERS`` of batch_last_wgmma_tf32x3.cuh."""
        at_start = _REGISTERS // self.threads // 8 * 8 * self.threads
        left = at_start - _LOADER_REGISTERS * _LOADER_THREADS
        return min(240, left // (128 * self.multipliers) // 8 * 8)


def supports(problem: Problem) -> str | None:
    """None if the family computes ``problem`` (on sm_90); otherwise the reason why not."""
    if problem.dtype not in DTYPES:
        return f"{problem.dtype} is not one of {', '.join(DTYPES)}"
    if not problem.batch_last:
        return "batch_first has its own kernels"
    return batch_last_mma_tf32x3.supports(problem)  # which takes rows that are not aligned


def configs(problem: Problem, multiprocessors: int) -> Iterator[Config]:
    """All tiles worth considering, without order: each with as many stages as fit."""
    p = problem.pattern
    outputs8 = -(-p.b // 8)
    chains = (1, 2) if p.c >= _LONG_SUM else (1,)
    for (groups_n, groups_m), mt, nt, chain, pending in itertools.product(
        _SHAPES, (1, 2), _OUTPUT_TILES, chains, (0, 1)
    ):
        tiles = output_tiles(p, 8 * groups_n * nt)
        # Outputs that do not exist are computed too: few of them, or none where b is small.
        if (tiles * groups_n * nt - outputs8) * 4 > outputs8:
            continue
        if nt < _FEWEST_OUTPUT_TILES and tiles > 1:
            continue
        whole = 8 * chain  # l that are multiplied at a time
        groups = max(1, multiprocessors // tiles)
        lengths = (16, 24, 32, 48, 64) if -(-p.c // whole) * whole % 16 == 0 else (8, 24)
        for kl, resident in itertools.product(lengths, (False, True)):
            if kl % whole or -(-p.c // kl) * kl != -(-p.c // whole) * whole:
                continue
            config = Config(*(groups_n, groups_m, mt, nt, kl, 0, resident, chain, pending, groups))
            if config.registers() > config.register_limit or not _compiles(p, config):
                continue
            config = replace(config, stages=_stages(p, config))
            if config.stages >= 2 and _worth_a_stage(config):
                yield config


def _stages(p: Pattern, config: Config) -> int:
    """As many as fit: the more of x is under way, the faster it comes."""
    return min(_MOST_STAGES, (SHARED_LIMIT - config.shared_bytes(p)) // config.stage_bytes())


def _compiles(p: Pattern, config: Config) -> bool:
    """Whether all products survive: of other tiles ptxas 13.0 drops some, and nobody is told."""
    return config.mt == 1 or config.pending == 1 or config.stages_per_tile(p) > 1


def _worth_a_stage(config: Config) -> bool:
    least, most = _STAGE_BYTES
    return config.kl == 8 or least <= config.stage_bytes() <= most


def geometry(problem: Problem, config: Config, exact: bool = True) -> Geometry:
    """How the kernel is launched."""
    p, c = problem.pattern, config
    shared = c.shared_bytes(p, exact)
    return batch_last.geometry(p, c.threads, shared, c.rows, c.outputs, c.groups)


def kernel_name(problem: Problem, exact: bool = True) -> str:
    """The kernel's name, as profilers show it."""
    return codegen.kernel_name(
        "batch_last_wgmma_tf32x3", "fp32" if exact else "tf32", problem.pattern
    )


def source(problem: Problem, config: Config, exact: bool = True) -> str:
    """The generated file: one instance of the template.

    Args:
        problem: one that `supports` takes.
        config: one of `configs`.
        exact: FP32 accuracy, by three TF32 products; otherwise one, which is TF32's own accuracy.
    """
    call = "batch_last_wgmma_tf32x3_kernel<Support, Tile>"
    kernel = codegen.kernel(kernel_name(problem, exact), call, bounds="Tile::THREADS, 1")
    return _tile(problem, config, exact) + kernel


def pack_problem(problem: Problem, config: Config, exact: bool = True) -> Problem:
    """Packing as the launcher sees it: the weight is x's only row, what is packed is y's."""
    return packing_launcher.problem_of(problem, config.packed_elements(problem.pattern, exact))


def pack_geometry(problem: Problem, config: Config, exact: bool = True) -> Geometry:
    """How the kernel that packs weights is launched."""
    # A thread writes four l of one output, of all halves.
    tasks = config.packed_elements(problem.pattern, exact) // (8 if exact else 4)
    return packing_launcher.geometry_of(tasks)


def pack_name(problem: Problem, exact: bool = True) -> str:
    """The name of the kernel that packs weights, as profilers show it."""
    return codegen.kernel_name(
        "batch_last_mma_tf32x3_pack", "fp32" if exact else "tf32", problem.pattern
    )


def pack_source(problem: Problem, config: Config, exact: bool = True) -> str:
    """The generated file of the kernel that packs weights for the tile."""
    name, call = pack_name(problem, exact), "batch_last_mma_tf32x3_pack_kernel<Support, Tile>"
    kernel = codegen.kernel(name, call, bounds=str(packing_launcher.THREADS))
    return _tile(problem, config, exact) + kernel


class ColumnsLauncher(PackedLauncher):
    """(x, weight) -> y, and the same with a weight that is packed already."""

    def takes(self, x: Tensor) -> bool:
        """Whether rows of x and y begin at multiples of 16 bytes; the batch may have many dims."""
        feature, *batch = x.stride()
        rows = 1
        for size, stride in zip(reversed(x.shape[1:]), reversed(batch), strict=True):
            if size != 1 and stride != rows:
                return False
            rows *= size
        return rows % 4 == 0 and feature % 4 == 0 and x.data_ptr() % 16 == 0


def sources(problem: Problem, config: Config, exact: bool = True) -> list[str]:
    """The generated files of all that `launcher` compiles at once."""
    return [pack_source(problem, config, exact), source(problem, config, exact)]


def launcher(problem: Problem, config: Config, device: int, exact: bool = True) -> ColumnsLauncher:
    """Compile and load the kernels for ``problem`` on CUDA device ``device`` (sm_90).

    Rows of x and y that do not start at multiples of 16 bytes go to the older tensor cores.
    """
    p = problem.pattern
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    older = batch_last_mma_tf32x3.default_config(problem, multiprocessors)
    # Tiles with the same order of packed weights can share them.
    layers = config.stages_per_tile(p) * config.kl // 4
    return ColumnsLauncher(
        f"batch_last_wgmma_tf32x3 {config.outputs} {layers} {exact}",
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
        functools.partial(batch_last_mma_tf32x3.shifted_launcher, problem, older, device, exact),
    )


def _tile(problem: Problem, config: Config, exact: bool) -> str:
    p = problem.pattern
    arguments = ", ".join(str(int(value)) for value in astuple(config)[:-1])
    facts = {
        "Tile::SHARED_BYTES": config.shared_bytes(p, exact),
        "Tile::MULTIPLIER_REGISTERS": config.register_limit,
        "int64(Tile::COLUMNS) * Tile::OUTPUT_TILES * Tile::COLUMN_BYTES": 4
        * config.packed_elements(p, exact),
    }
    instance = f"BatchLastWgmmaTf32x3Tile<Support, {arguments}, {3 if exact else 1}>"
    return codegen.tile("batch_last_wgmma_tf32x3", p, instance, facts, "batch_last_wgmma_tf32x3")
