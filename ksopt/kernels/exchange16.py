"""16-bit factors with large b c in one pass over clusters (csrc/cuda/exchange16.cuh, sm_90).

The blocks of a cluster transpose x on its way to each other's shared memory and y on its way out:
x and y are moved once, where `ksopt.kernels.permuted` moves both three times.

Not among the families that are chosen from: nothing of it has run on a GPU yet.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ksopt.kernels import general, packed
from ksopt.kernels.exchange16_cost import predicted_us as predicted_us
from ksopt.kernels.lanes16 import DTYPES
from ksopt.kernels.launch import Launcher, prepare
from ksopt.kernels.problem import SHARED_LIMIT, Geometry, Problem
from ksopt.pattern import Pattern

J = 2
"""Neighbours of j that a block has."""

_OUTPUTS = (64, 96, 128, 192)  # for which wgmma16_rows.cuh has an instruction
_LOADER_THREADS, _LOADER_REGISTERS = 128, 56
_REGISTERS = 65536  # of a multiprocessor
_MOST_STAGES = 6
_RAW_STAGES = (2, 3, 4)
_SPARE_REGISTERS = 32  # beside sums; with fewer ptxas lets products wait for each other
_MOST_PADDING = 1.25  # outputs and l that are computed, over those that exist


@dataclass(frozen=True)
class Config:
    """Template arguments of ``Exchange16Tile``, in its order and with its meaning."""

    cluster: int
    groups: int
    mt: int
    nt: int
    kl: int
    stages: int
    raw: int
    slice: int
    clusters: int
    """Clusters of the largest launch; not a template argument."""

    @property
    def rows(self) -> int:
        return 64 * self.groups * self.mt

    @property
    def outputs(self) -> int:
        return 8 * self.nt

    @property
    def threads(self) -> int:
        """Threads a block, with the warpgroup that loads."""
        return _LOADER_THREADS + 128 * self.groups

    @property
    def stage_bytes(self) -> int:
        """Operands of a stage, of both j."""
        return J * (self.rows + self.outputs) * self.kl * 2

    @property
    def raw_bytes(self) -> int:
        """A block's share of a stage's rows of x, a gap after each 8 l."""
        of_l = J * self.cluster * 2
        return self.rows // self.cluster * (self.kl // 8) * (8 * of_l + max(16, of_l))

    @property
    def slice_bytes(self) -> int:
        """A slice of rounded sums: words of two j, rows a little apart."""
        return self.rows * (self.slice * 4 + 32)

    def parts(self, p: Pattern) -> int:
        """Stages of a tile."""
        return -(-p.c // self.kl)

    def output_tiles(self, p: Pattern) -> int:
        return -(-p.b // self.outputs)

    def tiles_of_rows(self, p: Pattern) -> int:
        """Tiles of a cluster that together cover all outputs of the same rows."""
        return p.a * self.output_tiles(p) * (p.d // (J * self.cluster))

    def shared_bytes(self, p: Pattern) -> int:
        """Dynamic shared memory of a block."""
        barriers = (2 * self.stages + 2) * 8
        loads = self.stages * self.stage_bytes + self.raw * self.raw_bytes
        return loads + self.slice_bytes + barriers

    def registers(self) -> int:
        """Registers of a thread that multiplies, roughly: the sums of both j are most of them."""
        return self.mt * self.outputs + _SPARE_REGISTERS

    @property
    def register_limit(self) -> int:
        """``MULTIPLIER_REGISTERS`` of exchange16.cuh."""
        at_start = min(248, _REGISTERS // self.threads // 8 * 8) * self.threads
        left = at_start - _LOADER_REGISTERS * _LOADER_THREADS
        return min(240, left // (128 * self.groups) // 8 * 8)


def supports(problem: Problem) -> str | None:
    """None if the family computes ``problem`` (on sm_90); otherwise the reason why not."""
    p = problem.pattern
    if problem.dtype not in DTYPES:
        return f"{problem.dtype} is not one of {', '.join(DTYPES)}"
    if problem.batch_last:
        return "batch_last has its own kernels"
    if p.d != 4 and p.d % 8 != 0:
        return f"d = {p.d} is neither 4 nor a multiple of 8"
    for name, value in (("b", p.b), ("c", p.c)):
        if value % 8 != 0:
            return f"{name} = {value} is not a multiple of 8"
    return None


def cluster_of(d: int) -> int:
    """Blocks of a cluster: so many that their j fill sectors of 32 bytes, where d allows it."""
    return 8 if d % 16 == 0 else 4 if d % 8 == 0 else 2


def configs(problem: Problem, multiprocessors: int) -> Iterator[Config]:
    """All tiles worth considering, without order: each with as many stages as fit."""
    p = problem.pattern
    cluster = cluster_of(p.d)
    for groups, mt, outputs, kl, raw in itertools.product(
        (1, 2, 3), (1, 2), _OUTPUTS, (32, 64), _RAW_STAGES
    ):
        first = Config(cluster, groups, mt, outputs // 8, kl, 0, raw, outputs, 0)
        if first.registers() > first.register_limit or not _worth_padding(p, first):
            continue
        for share in (1, 2, 4):
            if outputs % (32 * share):
                continue
            config = replace(first, slice=outputs // share)
            left = SHARED_LIMIT - config.shared_bytes(p)
            stages = min(_MOST_STAGES, left // (config.stage_bytes + 16))
            if stages < 2:
                continue
            for clusters in _clusters(cluster, multiprocessors):
                yield replace(config, stages=stages, clusters=clusters)


def _worth_padding(p: Pattern, config: Config) -> bool:
    """Whether few outputs and l are computed that do not exist, or as few as with any tile."""
    outputs = config.output_tiles(p) * config.outputs
    length = config.parts(p) * config.kl
    fewest = min(-(-p.b // n) * n for n in _OUTPUTS)
    shortest = -(-p.c // 32) * 32
    return outputs <= max(fewest, _MOST_PADDING * p.b) and length <= max(
        shortest, _MOST_PADDING * p.c
    )


def _clusters(cluster: int, multiprocessors: int) -> tuple[int, ...]:
    """Clusters of the largest launch.

    A cluster lives within a part of the device whose size is not known here: of clusters of 8 one
    or two fewer may fit than there are multiprocessors for, and one too many takes a second turn.
    """
    most = max(1, multiprocessors // cluster)
    return tuple({max(1, most - fewer) for fewer in ((0, 1, 2) if cluster == 8 else (0,))})


def geometry(problem: Problem, config: Config) -> Geometry:
    """How the kernel is launched."""
    p = problem.pattern
    return Geometry(
        threads=config.threads,
        shared_bytes=config.shared_bytes(p),
        rows_per_tile=config.rows,
        tiles_per_row_tile=config.tiles_of_rows(p) * config.cluster,
        max_blocks=config.clusters * config.cluster,
    )


def kernel_name(problem: Problem) -> str:
    """The kernel's name, as profilers show it."""
    shape = "_".join(map(str, problem.pattern.weight_shape))
    return f"ksopt_exchange16_{problem.dtype}_{shape}"


def source(problem: Problem, config: Config) -> str:
    """The generated file: one instance of the template."""
    p = problem.pattern
    arguments = ", ".join(map(str, astuple(config)[:-1]))
    agree = '"csrc and kernels/exchange16.py disagree"'
    return (
        '#include "exchange16.cuh"\n'
        f"using Support = Pattern<{p.a}, {p.b}, {p.c}, {p.d}>;\n"
        f"using Tile = Exchange16Tile<Support, {arguments}>;\n"
        f"static_assert(Tile::SHARED_BYTES == {config.shared_bytes(p)}, {agree});\n"
        f"static_assert(Tile::MULTIPLIER_REGISTERS == {config.register_limit}, {agree});\n"
        f'extern "C" __global__ void __cluster_dims__({config.cluster}, 1, 1) '
        "__launch_bounds__(Tile::THREADS, 1)\n"
        f"{kernel_name(problem)}(const __grid_constant__ Arguments arguments) {{\n"
        f"  exchange16_kernel<{DTYPES[problem.dtype]}, Support, Tile>(arguments);\n"
        "}\n"
    )


def pack(weight: Tensor, outputs: int, kl: int) -> Tensor:
    """The weight (a, b, c, d) in the order in which the kernel's stages read it.

    Args:
        weight: (a, b, c, d), 16-bit, any strides; d is even.
        outputs: of a tile.
        kl: l of a stage.

    Returns:
        (1, 1, 1, elements): [i][pair of j][tile of outputs][stage][j of the pair][output][l], zeros
        where b or c end within a tile or a stage; the 16-byte chunks of an output's l are permuted
        as ``swizzled_chunk`` of wgmma16_rows.cuh says.
    """
    a, b, c, d = weight.shape
    tiles, parts = -(-b // outputs), -(-c // kl)
    padded = weight.new_zeros(a, d, tiles * outputs, parts * kl)
    padded[:, :, :b, :c] = weight.permute(0, 3, 1, 2)
    chunks = padded.view(a, d // J, J, tiles, outputs, parts, kl // 8, 8)
    chunks = chunks.permute(0, 1, 3, 5, 2, 4, 6, 7)
    row = torch.arange(outputs, device=weight.device)[:, None]
    # Which chunk lies at a place: xor undoes itself.
    which = torch.arange(kl // 8, device=weight.device) ^ (row % 8 if kl == 64 else row // 2 % 4)
    return chunks[..., row, which, :].reshape(1, 1, 1, -1)


class ExchangeLauncher(Launcher):
    """(x, weight) -> y, and the same with a weight that is packed already."""

    def __init__(self, config: Config, multiply: Launcher, otherwise: Launcher) -> None:
        super().__init__(multiply.problem, multiply.geometry, multiply.kernel, otherwise)
        self._pack = partial(pack, outputs=config.outputs, kl=config.kl)
        # Tiles with the same order of packed weights can share them.
        self._form = f"exchange16 {config.outputs} {config.kl}"
        self._multiply = multiply
        self._otherwise = otherwise

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        if not self.takes(x):
            return self._otherwise(x, weight)
        return self.multiply(x, packed.prepared(weight, self._form, self.pack))

    def takes(self, x: Tensor) -> bool:
        """Whether rows of x begin at multiples of 16 bytes, as they are or made contiguous."""
        *outer, last = x.stride()
        return last == 1 and x.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in outer)

    def pack(self, weight: Tensor) -> Tensor:
        """The weight (a, b, c, d) in the order in which this tile reads it."""
        return self._pack(weight)

    def multiply(self, x: Tensor, packed: Tensor) -> Tensor:
        """y of x (*batch, N), whose rows are aligned to 16 bytes, and what `pack` returned."""
        return self._multiply(x, packed)


def launcher(problem: Problem, config: Config, device: int) -> ExchangeLauncher:
    """Compile and load the kernel for ``problem`` on CUDA device ``device`` (sm_90)."""
    return ExchangeLauncher(
        config,
        prepare(
            problem,
            kernel_name(problem),
            source(problem, config),
            geometry(problem, config),
            device,
        ),
        general.launcher(problem, device),
    )
