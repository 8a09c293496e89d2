"""The general family (csrc/cuda/naive.cuh): supports every problem, and is the others' fallback."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ksopt.kernels.families.base import ANY_TYPE, TemplateFamily, register_family
from ksopt.kernels.launcher import Launcher, MakeLauncher
from ksopt.kernels.problem import DeviceSpec, Geometry, Problem
from ksopt.patterns.chain import Pattern

_MAX_BLOCKS = 2**31 - 1  # the grid's limit in its first dimension

# The cost model's constants, of one multiprocessor in a microsecond. Fitted to the times of 673
# patterns (bfloat16, batch_first, 8,192 rows, one H200): the middle four fifths of them lie within
# 0.88 and 1.14 times the prediction.
_FLOPS = 0.132e6
_BYTES = 14_500.0
_TILE_US = 0.143  # whatever little a block has to do
_MOST_APART, _AGAIN = 64, 0.55
_LAUNCH_US = 9.8


@dataclass(frozen=True)
class NaiveConfig:
    """A block's tile.

    Attributes:
        rows: batch rows.
        outputs: values of k, the row inside a block of K.
        step: values of l, the summation index, that are staged at a time.
    """

    rows: int
    outputs: int
    step: int

    @property
    def threads(self) -> int:
        """Threads a block: each computes a 4 x 4 square."""
        return self.rows * self.outputs // 16

    @property
    def blocks(self) -> int:
        """Blocks that must run on a multiprocessor at a time."""
        return 1

    def shared_bytes(self, p: Pattern) -> int:
        """No dynamic shared memory."""
        return 0


@register_family
class Naive(TemplateFamily[NaiveConfig]):
    """One tile for every problem."""

    name = "naive"
    template = "naive.cuh"
    dtypes = ANY_TYPE
    capability = (0, 0)
    is_fallback = True

    def configs(self, problem: Problem, device: DeviceSpec) -> Iterator[NaiveConfig]:
        yield self.default_config(problem)

    def default_config(self, problem: Problem) -> NaiveConfig:
        """The tile for ``problem``, no larger than its b and c."""
        outputs = min(64, max(16, _next_power_of_two(problem.pattern.b)))
        step = min(16, max(4, _next_power_of_two(problem.pattern.c)))
        return NaiveConfig(rows=64, outputs=outputs, step=step)

    def predicted_us(
        self, problem: Problem, config: NaiveConfig, batch: int, device: DeviceSpec
    ) -> float:
        p = problem.pattern
        size = 4 if problem.dtype == "float32" else 2
        output_tiles = math.ceil(p.b / config.outputs)
        filled = output_tiles * config.outputs * math.ceil(p.c / config.step) * config.step
        computed = 2 * p.a * p.d * batch * filled / _FLOPS
        # Neighbours in a sum lie d elements apart (batch last: side by side, in neighbouring
        # threads), so sectors come in again and again, the more often the larger d.
        apart = 1 if problem.batch_last else min(p.d, _MOST_APART)
        moved = size * batch * (p.in_features + p.out_features) * apart**_AGAIN / _BYTES
        row_tiles = math.ceil(batch / config.rows)
        tiles = row_tiles * p.a * p.d * output_tiles * _TILE_US
        return float(math.hypot(computed, moved, tiles)) / device.multiprocessors + _LAUNCH_US

    def geometry(self, problem: Problem, config: NaiveConfig) -> Geometry:
        """The launch geometry of the kernel."""
        p = problem.pattern
        return Geometry(
            threads=config.threads,
            shared_bytes=0,
            rows_per_tile=config.rows,
            tiles_per_row_tile=p.a * -(-p.b // config.outputs) * p.d,
            max_blocks=_MAX_BLOCKS,
        )

    def arithmetic(self, problem: Problem) -> str:
        return f"{problem.dtype}_{problem.layout}"

    def source(self, problem: Problem, config: NaiveConfig) -> str:
        """The generated file: one instance of the template."""
        p = problem.pattern
        last = "true" if problem.batch_last else "false"
        return (
            f'#include "{self.template}"\n'
            f"using Support = Pattern<{p.a}, {p.b}, {p.c}, {p.d}>;\n"
            f"using Tile = GeneralTile<{config.rows}, {config.outputs}, {config.step}>;\n"
            'extern "C" __global__ void __launch_bounds__(Tile::THREADS)\n'
            f"{self.kernel_name(problem)}(const Arguments arguments) {{\n"
            f"  naive_kernel<{self.dtypes[problem.dtype]}, Support, Tile, {last}>(arguments);\n"
            "}\n"
        )

    def fallback(
        self, problem: Problem, config: NaiveConfig, device_index: int
    ) -> MakeLauncher | None:
        return None


def launcher(problem: Problem, device_index: int) -> Launcher:
    """Compile and load the kernel for ``problem``: the fallback of the other families."""
    naive = Naive()
    return naive.launcher(problem, naive.default_config(problem), device_index)


def _next_power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()
