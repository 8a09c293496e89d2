"""The 16-bit family for batch last on Hopper's tensor cores (csrc/cuda/batch_last_wgmma16.cuh)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import astuple, dataclass

from ksopt.kernels import codegen
from ksopt.kernels.families.base import HALF, TemplateFamily, register_family
from ksopt.kernels.families.batch_last_mma16 import BatchLastMma16
from ksopt.kernels.families.common import batch_last
from ksopt.kernels.families.common.batch_last import Load, PackingLauncher, fits, steps_of
from ksopt.kernels.launcher import MakeLauncher
from ksopt.kernels.problem import DeviceSpec, Geometry, Problem
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


@register_family
class BatchLastWgmma16(TemplateFamily[Config]):
    """Products by warpgroup instructions, each block with its weights in shared memory."""

    name = "batch_last_wgmma16"
    template = "batch_last_wgmma16.cuh"
    dtypes = HALF
    layout = "batch_last"
    capability = (9, 0)
    capability_only = True
    packs_from_d = 2

    def unsupported_shape(self, problem: Problem, device: DeviceSpec) -> str | None:
        if next(self.configs(problem, device), None) is None:
            return (
                f"the weights of 64 outputs (c = {problem.pattern.c}) do not fit in shared memory"
            )
        return None

    def configs(self, problem: Problem, device: DeviceSpec) -> Iterator[Config]:
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
                groups = max(1, device.multiprocessors * blocks // tiles)
                config = Config(teams, warpgroups, mt, rows, kl * 16, stages, blocks, groups)
                if fits(config.shared_bytes(p), config.registers(), config.threads, blocks):
                    yield config

    def predicted_us(
        self, problem: Problem, config: Config, batch: int, device: DeviceSpec
    ) -> float:
        p = problem.pattern
        c = config
        products = steps_of(p, 2) * c.outputs // 64  # of 64 x rows results
        rings = c.teams * c.blocks
        load = Load(
            element_bytes=2,
            rows=c.rows,
            outputs=c.outputs,
            groups=c.groups,
            blocks=c.blocks,
            rings=rings,
            warps=c.threads // 32 * c.blocks,
            stages_per_tile=steps_of(p, 2) * 16 // c.kl,
            in_flight=(c.stages - 2) * c.kl * c.rows * 2 * rings,
            operand_bytes=products * (64 + c.rows) * 32,
            tensor_us=products * c.rows / _COLUMNS_US,
        )
        return batch_last.predicted_us(p, load, batch, device.multiprocessors)

    def geometry(self, problem: Problem, config: Config) -> Geometry:
        p, c = problem.pattern, config
        return batch_last.geometry(p, c.threads, c.shared_bytes(p), c.rows, c.outputs, c.groups)

    def source(self, problem: Problem, config: Config) -> str:
        p = problem.pattern
        arguments = ", ".join(map(str, astuple(config)[:-1]))
        facts = {"Tile::SHARED_BYTES": config.shared_bytes(p)}
        call = f"batch_last_wgmma16_kernel<{self.dtypes[problem.dtype]}, Support, Tile>"
        instance = f"BatchLastWgmma16Tile<Support, {arguments}>"
        tile = codegen.tile(self.template, p, instance, facts, self.name)
        return tile + codegen.kernel(self.kernel_name(problem), call)

    def launcher(self, problem: Problem, config: Config, device_index: int) -> PackingLauncher:
        return PackingLauncher(super().launcher(problem, config, device_index))

    def fallback(self, problem: Problem, config: Config, device_index: int) -> MakeLauncher | None:
        # The older tensor cores take rows that do not begin at multiples of 16 bytes.
        return functools.partial(BatchLastMma16().default_shifted_launcher, problem, device_index)
