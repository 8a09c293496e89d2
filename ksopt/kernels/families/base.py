"""The kernel families beside the general one: their tiles for a problem, best predicted first."""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ksopt.jit import driver
from ksopt.kernels.families import (
    batch_last_mma16,
    batch_last_mma_tf32x3,
    batch_last_wgmma16,
    batch_last_wgmma_tf32x3,
    decode_fma,
    decode_mma16,
    mma16,
    mma_tf32x3,
    mma_tf32x3_cost,
    transpose_bmm,
    wgmma16,
    wgmma16_streamed,
    wgmma_tf32x3,
)
from ksopt.kernels.problem import Problem
from ksopt.patterns.chain import Pattern

TILES = 10
"""How many tiles, of all families together, are compiled and timed for a problem."""

_TILES_OF_ONE = 4
_FAR = 3.0  # a family whose best tile is predicted to take this many times the best has no chance
_SHORTEST_EXACT_SUM = 32


@dataclass(frozen=True)
class Machine:
    """What a kernel has to fit into.

    Attributes:
        capability: compute capability, such as (9, 0).
        multiprocessors: of the device.
        shared_bytes: shared memory of a multiprocessor; a block takes 1 KiB beside its own.
    """

    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int

    @classmethod
    def of_device(cls, device: int) -> Machine:
        """The machine that is CUDA device ``device``.

        Raises:
            UnavailableError: the CUDA driver's bindings are missing.
        """
        found = torch.cuda.get_device_properties(device)
        return cls(
            (found.major, found.minor),
            found.multi_processor_count,
            driver.shared_bytes(device),
        )


Cost = Callable[..., float]
"""(pattern, config, batch, multiprocessors) -> predicted microseconds; fp32: and ``exact``."""


@dataclass(frozen=True)
class Family:
    """A module of kernels, and when they can be used.

    Attributes:
        module: has ``supports(problem)``, ``configs(problem, multiprocessors)`` whose elements are
            frozen dataclasses with ``shared_bytes(pattern)`` (and ``blocks`` on a multiprocessor,
            and the ``capability`` of this tile, where they are not 1 and the family's), and
            ``launcher(problem, config, device)``, which takes ``exact`` too if it computes fp32.
            Its ``source(problem, config)`` is all that this compiles, or it has
            ``sources(problem, config)``.
        capability: the least compute capability that has its instructions.
        only: whether no other capability has them: sm_90a code runs on 9.0 alone.
        packs_from_d: the least d of patterns whose weight is prepared before the kernel is launched
            (through weight_cache.py); None if no weight is.
        splits: whether exact fp32 products are three TF32 ones: short sums are then less exact.
        most_rows: the largest batch that it is for; None without a limit.
        cost: predicts a tile's time; None takes the module's own ``predicted_us``.
    """

    module: ModuleType
    capability: tuple[int, int]
    only: bool = False
    packs_from_d: int | None = None
    splits: bool = False
    most_rows: int | None = None
    cost: Cost | None = None

    @property
    def name(self) -> str:
        """The module's own name."""
        return self.module.__name__.rpartition(".")[2]

    def prepares(self, p: Pattern) -> bool:
        """Whether the weight of pattern ``p`` is prepared before the kernel is launched."""
        return self.packs_from_d is not None and p.d >= self.packs_from_d

    def refusal(self, problem: Problem, machine: Machine) -> str | None:
        """None if the family computes ``problem`` on ``machine``; otherwise why not."""
        least = ".".join(map(str, self.capability))
        here = ".".join(map(str, machine.capability))
        if self.only and machine.capability != self.capability:
            return f"it needs compute capability {least}, and the device has {here}"
        if machine.capability < self.capability:
            return f"it needs compute capability {least} or newer, and the device has {here}"
        c = problem.pattern.c
        if self.splits and problem.exact and c < _SHORTEST_EXACT_SUM:
            # Three TF32 products are then further from float64 than cuBLAS (docs/performance.md).
            return f"sums of c = {c} < {_SHORTEST_EXACT_SUM} values are less exact than cuBLAS's"
        reason: str | None = self.module.supports(problem)
        return reason

    def predicted_us(self, problem: Problem, config: Any, batch: int, machine: Machine) -> float:
        """Predicted time of a tile in microseconds."""
        cost: Cost = self.cost or self.module.predicted_us
        return cost(problem.pattern, config, batch, machine.multiprocessors, **_precision(problem))


def _precision(problem: Problem) -> dict[str, bool]:
    """The argument that modules of fp32 kernels take beside the problem."""
    return {"exact": problem.exact} if problem.dtype == "float32" else {}


FAMILIES: tuple[Family, ...] = (
    Family(mma16, capability=(8, 0)),
    Family(wgmma16, capability=(9, 0), only=True),
    Family(wgmma16_streamed, capability=(9, 0), only=True, packs_from_d=2),
    Family(decode_mma16, capability=(8, 0), most_rows=decode_mma16.MAX_BATCH),
    Family(decode_fma, capability=(8, 0), most_rows=decode_fma.MAX_BATCH),
    Family(mma_tf32x3, capability=(8, 0), splits=True, cost=mma_tf32x3_cost.predicted_us),
    Family(wgmma_tf32x3, capability=(9, 0), only=True, packs_from_d=1, splits=True),
    Family(transpose_bmm, capability=(8, 0), packs_from_d=2),
    Family(batch_last_mma16, capability=(8, 0), packs_from_d=2),
    Family(batch_last_wgmma16, capability=(9, 0), only=True, packs_from_d=2),
    Family(batch_last_mma_tf32x3, capability=(8, 0), packs_from_d=2, splits=True),
    Family(batch_last_wgmma_tf32x3, capability=(9, 0), only=True, packs_from_d=1, splits=True),
)


@dataclass(frozen=True)
class Tile:
    """One way of one family to compute a problem."""

    family: Family
    problem: Problem
    config: Any  # the family's own
    predicted_us: float

    def sources(self) -> list[str]:
        """The generated files of all that `launcher` compiles."""
        module, precision = self.family.module, _precision(self.problem)
        if hasattr(module, "sources"):  # several kernels
            return list(module.sources(self.problem, self.config, **precision))
        exact = precision if self.family.splits else {}
        return [str(module.source(self.problem, self.config, **exact))]

    def launcher(self, device: int) -> Callable[..., Tensor]:
        """Compile and load what it needs on CUDA device ``device``: (x, weight) -> y."""
        launcher: Callable[..., Tensor] = self.family.module.launcher(
            self.problem, self.config, device, **_precision(self.problem)
        )
        return launcher


def ranked_tiles(family: Family, problem: Problem, batch: int, machine: Machine) -> list[Tile]:
    """The family's tiles that fit into the machine, by predicted time; none where it cannot.

    Args:
        family: one of ``FAMILIES``.
        problem: what is to be computed.
        batch: rows of x.
        machine: the device.
    """
    too_many = family.most_rows is not None and batch > family.most_rows
    if too_many or family.refusal(problem, machine) is not None:
        return []
    tiles = (
        Tile(family, problem, config, family.predicted_us(problem, config, batch, machine))
        for config in _fitting(family, problem, machine)
    )
    return sorted((tile for tile in tiles if tile.predicted_us < math.inf), key=_predicted)


@functools.lru_cache(maxsize=64)  # the same for every batch; hundreds of tiles a family
def _fitting(family: Family, problem: Problem, machine: Machine) -> tuple[Any, ...]:
    every = family.module.configs(problem, machine.multiprocessors)
    return tuple(config for config in every if _fits(config, problem, machine))


def _fits(config: Any, problem: Problem, machine: Machine) -> bool:
    shared = (config.shared_bytes(problem.pattern) + 1024) * getattr(config, "blocks", 1)
    least: tuple[int, int] = getattr(config, "capability", (0, 0))
    return shared <= machine.shared_bytes and least <= machine.capability


def best_tiles(problem: Problem, batch: int, machine: Machine, most: int = TILES) -> list[Tile]:
    """The tiles worth compiling, best predicted first.

    The best of every family that is predicted to come near the best of all, for no cost model is
    exact; then the next best of whatever family, a few of each.

    Args:
        problem: what is to be computed.
        batch: rows of x.
        machine: the device.
        most: how many at most; 1 gives the best predicted of all.
    """
    ranked = [ranked_tiles(family, problem, batch, machine)[:_TILES_OF_ONE] for family in FAMILIES]
    limit = _FAR * min((tiles[0].predicted_us for tiles in ranked if tiles), default=0.0)
    near = [[tile for tile in tiles if tile.predicted_us <= limit] for tiles in ranked]
    leaders = sorted((tiles[0] for tiles in near if tiles), key=_predicted)[:most]
    rest = heapq.nsmallest(
        most - len(leaders), (tile for tiles in near for tile in tiles[1:]), key=_predicted
    )
    return sorted([*leaders, *rest], key=_predicted)


def _predicted(tile: Tile) -> float:
    return tile.predicted_us
