"""The code shared by the batch-last families of warp-level products (mma instructions)."""

from __future__ import annotations

import abc
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ksopt.kernels.families.base import TemplateFamily
from ksopt.kernels.families.common import batch_last
from ksopt.kernels.families.common.batch_last import PackingLauncher
from ksopt.kernels.launcher import Launcher, MakeLauncher, prepare
from ksopt.kernels.problem import DeviceSpec, Geometry, Problem
from ksopt.patterns.chain import Pattern

_LARGE_BATCH = 2**15  # for which the tile of a fallback is chosen


@dataclass(frozen=True)
class Config:
    """Template arguments of ``BatchLastMma16Tile`` and ``BatchLastMmaTf32x3Tile``, explained."""

    warps_k: int
    warps_m: int
    mt: int
    nt: int
    kl: int
    stages: int
    blocks: int
    groups: int
    """Groups of blocks that share the work, in the largest launch; not a template argument."""
    element_bytes: int
    """2 or 4; not a template argument."""

    @property
    def template(self) -> tuple[int, ...]:
        """The template arguments that all kernels have, in order."""
        return (
            *(self.warps_k, self.warps_m, self.mt, self.nt),
            *(self.kl, self.stages, self.blocks),
        )

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

    def shared_bytes(self, p: Pattern) -> int:
        """Dynamic shared memory of a block."""
        weights = self.outputs // 16 * batch_last.steps_of(p, self.element_bytes) * 512
        pitch = self.rows * self.element_bytes + 8 * self.element_bytes
        results = 16 * (self.nt * 8 * self.element_bytes + 16)
        return weights + self.stages * self.kl * pitch + self.threads // 32 * results

    def registers(self) -> int:
        """Registers a thread, roughly: sums, operands, and what addresses take."""
        if self.element_bytes == 2:
            return self.mt * self.nt * 4 + self.nt * 2 + 48
        return self.mt * self.nt * 6 + self.nt * 4 + 60  # operands are split in two


class BatchLastMmaFamily(TemplateFamily[Config]):
    """Kernels for rows of x and y that begin at multiples of 16 bytes, and "shifted" ones.

    A shifted kernel takes rows that begin anywhere, and columns of x that lie apart.

    Attributes:
        element_bytes: of the family's dtypes.
    """

    layout = "batch_last"
    packs_from_d = 2
    element_bytes: ClassVar[int]

    @abc.abstractmethod
    def rate(self, problem: Problem) -> tuple[float, float]:
        """The throughput of the tensor cores.

        Returns:
            Steps (16 x 8 results) of a multiprocessor in a microsecond; and what preparing the
            operands of a warp's steps costs, in steps.
        """

    @abc.abstractmethod
    def source(self, problem: Problem, config: Config, shifted: bool = False) -> str:
        """The generated file of the kernel, or of the shifted one."""

    def unsupported_shape(self, problem: Problem, device: DeviceSpec) -> str | None:
        if next(self.configs(problem, device), None) is None:
            c = problem.pattern.c
            return f"the weights of 16 outputs (c = {c}) do not fit in shared memory"
        return None

    def configs(self, problem: Problem, device: DeviceSpec) -> Iterator[Config]:
        p, element_bytes = problem.pattern, self.element_bytes
        step = 32 // element_bytes
        steps = batch_last.steps_of(p, element_bytes)
        outputs16 = -(-p.b // 16)
        for warps_k, warps_m, mt, nt in itertools.product(
            (1, 2, 3, 4, 6, 8), (1, 2, 4, 8), (1, 2, 3, 4, 6), (4, 8, 16)
        ):
            outputs = warps_k * mt
            tiles = -(-outputs16 // outputs)
            # Outputs that do not exist are computed too: few of them, or none where b is small.
            if not 4 <= warps_k * warps_m <= 12 or (tiles * outputs - outputs16) * 8 > outputs16:
                continue
            # The threads of a block share the chunks of a row evenly.
            if 32 * warps_k * 16 % (nt * 8 * element_bytes):
                continue
            least = Config(warps_k, warps_m, mt, nt, step, 3, 1, 1, element_bytes)
            residents = [
                n
                for n in (1, 2, 3, 4)
                if batch_last.fit_registers(least.registers(), least.threads, n)
            ]
            # Where no stage of several steps divides c, stages of one step do.
            kls = [kl for kl in (1, 2, 3, 4, 6, 8, 12) if steps % kl == 0]
            for kl, stages, blocks in itertools.product(kls, (3, 4, 6, 8), residents):
                groups = max(1, device.multiprocessors * blocks // tiles)
                config = Config(
                    warps_k, warps_m, mt, nt, kl * step, stages, blocks, groups, element_bytes
                )
                if batch_last.fits(
                    config.shared_bytes(p), config.registers(), config.threads, blocks
                ):
                    yield config

    def predicted_us(
        self, problem: Problem, config: Config, batch: int, device: DeviceSpec
    ) -> float:
        p, size = problem.pattern, config.element_bytes
        steps_us, extra = self.rate(problem)
        warps = config.threads // 32 * config.blocks
        step_us = (1 + extra / (config.mt * config.nt)) / steps_us / min(1.0, (warps / 8) ** 0.4)
        steps = batch_last.steps_of(p, size) * config.rows / 8 * config.outputs / 16
        return batch_last.predicted_us(
            p,
            batch_last.Load(
                element_bytes=size,
                rows=config.rows,
                outputs=config.outputs,
                groups=config.groups,
                blocks=config.blocks,
                rings=config.blocks,
                warps=warps,
                stages_per_tile=batch_last.steps_of(p, size) * (32 // size) // config.kl,
                in_flight=(config.stages - 1) * config.kl * config.rows * size * config.blocks,
                # Fragments of the weight and of x.
                operand_bytes=steps * (512 / config.nt + 256 / config.mt),
                tensor_us=steps * step_us,
            ),
            batch,
            device.multiprocessors,
        )

    def geometry(self, problem: Problem, config: Config) -> Geometry:
        p, c = problem.pattern, config
        return batch_last.geometry(p, c.threads, c.shared_bytes(p), c.rows, c.outputs, c.groups)

    def launcher(self, problem: Problem, config: Config, device_index: int) -> PackingLauncher:
        return PackingLauncher(super().launcher(problem, config, device_index))

    def fallback(self, problem: Problem, config: Config, device_index: int) -> MakeLauncher | None:
        return functools.partial(self.shifted_launcher, problem, config, device_index)

    def shifted_launcher(self, problem: Problem, config: Config, device_index: int) -> Launcher:
        """Compile and load the shifted kernel, for a weight that is packed already."""
        return prepare(
            problem,
            self.kernel_name(problem),
            self.source(problem, config, shifted=True),
            self.geometry(problem, config),
            device_index,
        )

    def default_shifted_launcher(self, problem: Problem, device_index: int) -> Launcher:
        """The shifted kernel with the tile that is predicted to be the fastest."""
        device = DeviceSpec.of_device(device_index)
        return self.shifted_launcher(problem, self.default_config(problem, device), device_index)

    def default_config(self, problem: Problem, device: DeviceSpec) -> Config:
        """The tile that is predicted to be the fastest for large batches."""

        def us(config: Config) -> float:
            return self.predicted_us(problem, config, _LARGE_BATCH, device)

        return min(self.configs(problem, device), key=us)
