"""The general family (csrc/cuda/naive.cuh): right for every problem, every other's fallback."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from ksopt.kernels.launcher import Launcher, prepare
from ksopt.kernels.problem import Geometry, Problem

DTYPES = {"float32": "float", "float16": "Float16", "bfloat16": "BFloat16"}
"""The element types that the kernels take, and what device code calls them."""

_MAX_BLOCKS = 2**31 - 1  # the grid's limit in its first dimension

# Of one multiprocessor, in a microsecond.
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


def supports(problem: Problem) -> str | None:
    """None if the family computes ``problem``; otherwise the reason why not."""
    if problem.dtype not in DTYPES:
        return f"{problem.dtype} is not one of {', '.join(DTYPES)}"
    return None


def default_config(problem: Problem) -> NaiveConfig:
    """The tile for ``problem``: no larger than its b and c make use of."""
    outputs = min(64, max(16, _next_power_of_two(problem.pattern.b)))
    step = min(16, max(4, _next_power_of_two(problem.pattern.c)))
    return NaiveConfig(rows=64, outputs=outputs, step=step)


def geometry(problem: Problem, config: NaiveConfig) -> Geometry:
    """How the kernel is launched."""
    p = problem.pattern
    return Geometry(
        threads=config.threads,
        shared_bytes=0,
        rows_per_tile=config.rows,
        tiles_per_row_tile=p.a * -(-p.b // config.outputs) * p.d,
        max_blocks=_MAX_BLOCKS,
    )


def kernel_name(problem: Problem) -> str:
    """The kernel's name, as profilers show it."""
    layout = "batch_last" if problem.batch_last else "batch_first"
    shape = "_".join(map(str, problem.pattern.weight_shape))
    return f"ksopt_general_{problem.dtype}_{layout}_{shape}"


def source(problem: Problem, config: NaiveConfig) -> str:
    """The generated file: one instance of the template."""
    p = problem.pattern
    last = "true" if problem.batch_last else "false"
    return (
        '#include "naive.cuh"\n'
        f"using Support = Pattern<{p.a}, {p.b}, {p.c}, {p.d}>;\n"
        f"using Tile = GeneralTile<{config.rows}, {config.outputs}, {config.step}>;\n"
        'extern "C" __global__ void __launch_bounds__(Tile::THREADS)\n'
        f"{kernel_name(problem)}(const Arguments arguments) {{\n"
        f"  naive_kernel<{DTYPES[problem.dtype]}, Support, Tile, {last}>(arguments);\n"
        "}\n"
    )


def predicted_us(problem: Problem, batch: int, multiprocessors: int) -> float:
    """Predicted time in microseconds.

    Fitted to the times of 673 patterns (bfloat16, batch_first, 8,192 rows, one H200): the middle
    four fifths of them lie within 0.88 and 1.14 times what is predicted.
    """
    p, tile = problem.pattern, default_config(problem)
    size = 4 if problem.dtype == "float32" else 2
    filled = math.ceil(p.b / tile.outputs) * tile.outputs * math.ceil(p.c / tile.step) * tile.step
    computed = 2 * p.a * p.d * batch * filled / _FLOPS
    # Neighbours in a sum lie d elements apart (batch last: side by side, in neighbouring threads),
    # so sectors come in again and again, the more often the larger d.
    apart = 1 if problem.batch_last else min(p.d, _MOST_APART)
    moved = size * batch * (p.in_features + p.out_features) * apart**_AGAIN / _BYTES
    row_tiles = math.ceil(batch / tile.rows)
    tiles = row_tiles * p.a * p.d * math.ceil(p.b / tile.outputs) * _TILE_US
    return float(math.hypot(computed, moved, tiles)) / multiprocessors + _LAUNCH_US


def launcher(problem: Problem, device: int) -> Launcher:
    """Compile and load the kernel for ``problem`` on CUDA device ``device``."""
    config = default_config(problem)
    code = source(problem, config)
    return prepare(problem, kernel_name(problem), code, geometry(problem, config), device)


def with_naive_fallback(
    problem: Problem, name: str, source: str, geometry: Geometry, device: int
) -> Launcher:
    """`prepare` for kernels of aligned operands: all others go to the general kernel."""
    fallback = functools.partial(launcher, problem, device)
    return prepare(problem, name, source, geometry, device, fallback)


def _next_power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()
