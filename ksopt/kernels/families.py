"""The kernel families beside the general one: their tiles for a problem, best predicted first."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from ksopt.jit import driver
from ksopt.kernels import lanes16
from ksopt.kernels.launch import Launcher
from ksopt.kernels.problem import Problem


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


@dataclass(frozen=True)
class Family:
    """A module of kernels (``supports``, ``configs``, ``predicted_us``, ``source``, ``launcher``).

    Attributes:
        module: the family.
        capability: the least compute capability that has its instructions.
    """

    module: ModuleType
    capability: tuple[int, int]

    @property
    def name(self) -> str:
        """The module's own name."""
        return self.module.__name__.rpartition(".")[2]


FAMILIES = (Family(lanes16, capability=(8, 0)),)


@dataclass(frozen=True)
class Tile:
    """One way of one family to compute a problem."""

    family: Family
    problem: Problem
    config: Any  # the family's own
    predicted_us: float

    def source(self) -> str:
        """The kernel's source."""
        return str(self.family.module.source(self.problem, self.config))

    def launcher(self, device: int) -> Launcher:
        """Compile and load the kernel on CUDA device ``device``."""
        launcher: Launcher = self.family.module.launcher(self.problem, self.config, device)
        return launcher


def ranked_tiles(family: Family, problem: Problem, batch: int, machine: Machine) -> list[Tile]:
    """The family's tiles that fit into the machine, by predicted time; none where it cannot.

    Args:
        family: one of ``FAMILIES``.
        problem: what is to be computed.
        batch: rows of x.
        machine: the device.
    """
    if machine.capability < family.capability or family.module.supports(problem) is not None:
        return []
    p, count = problem.pattern, machine.multiprocessors
    tiles = [
        Tile(family, problem, config, family.module.predicted_us(p, config, batch, count))
        for config in family.module.configs(problem, count)
        if (config.shared_bytes(p) + 1024) * config.blocks <= machine.shared_bytes
    ]
    return sorted(tiles, key=lambda tile: tile.predicted_us)
