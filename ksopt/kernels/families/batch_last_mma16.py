"""The 16-bit tensor-core family for batch last (csrc/cuda/batch_last_mma16.cuh)."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from ksopt.kernels import codegen
from ksopt.kernels.families import batch_last
from ksopt.kernels.families.batch_last import Config, PackingLauncher
from ksopt.kernels.launcher import Launcher, prepare
from ksopt.kernels.problem import Geometry, Problem
from ksopt.patterns.chain import Pattern

DTYPES = {"float16": "Float16", "bfloat16": "BFloat16"}

_STEPS_US = 560.0  # m16n8k16 products of a multiprocessor in a microsecond
_EXTRA = 0.5  # and what a warp's loads of operands cost, in products


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
    return batch_last.configs(problem.pattern, 2, multiprocessors)


def predicted_us(p: Pattern, config: Config, batch: int, multiprocessors: int) -> float:
    """Predicted time of a tile in microseconds, for ``batch`` rows."""
    return batch_last.predicted_of(p, config, batch, multiprocessors, _STEPS_US, _EXTRA)


def default_config(problem: Problem, multiprocessors: int) -> Config:
    """The tile that is predicted to be the fastest for large batches."""
    return min(
        configs(problem, multiprocessors),
        key=lambda config: predicted_us(problem.pattern, config, 2**15, multiprocessors),
    )


def geometry(problem: Problem, config: Config) -> Geometry:
    """How the kernel is launched."""
    p, c = problem.pattern, config
    return batch_last.geometry(p, c.threads, c.shared_bytes(p), c.rows, c.outputs, c.groups)


def kernel_name(problem: Problem) -> str:
    """The kernel's name, as profilers show it."""
    return codegen.kernel_name("batch_last_mma16", problem.dtype, problem.pattern)


def source(problem: Problem, config: Config, shifted: bool = False) -> str:
    """The generated file: one instance of the template.

    Args:
        problem: what is computed.
        config: the tile.
        shifted: whether rows of x and y may start anywhere, and columns of x lie apart.
    """
    p = problem.pattern
    arguments = ", ".join(map(str, (*config.template, str(shifted).lower())))
    facts = {"Tile::SHARED_BYTES": config.shared_bytes(p)}
    call = f"batch_last_mma16_kernel<{DTYPES[problem.dtype]}, Support, Tile>"
    instance = f"BatchLastMma16Tile<Support, {arguments}>"
    tile = codegen.tile("batch_last_mma16", p, instance, facts, "batch_last")
    return tile + codegen.kernel(kernel_name(problem), call)


def shifted_launcher(problem: Problem, config: Config, device: int) -> Launcher:
    """The kernel for any strides and alignment, for a weight that is packed already."""
    code = source(problem, config, shifted=True)
    return prepare(problem, kernel_name(problem), code, geometry(problem, config), device)


def launcher(problem: Problem, config: Config, device: int) -> Launcher:
    """Compile and load the kernels for ``problem`` on CUDA device ``device``.

    There are two: one for rows of x and y that start at multiples of 16 bytes, one for all else.
    """
    launch = prepare(
        problem,
        kernel_name(problem),
        source(problem, config),
        geometry(problem, config),
        device,
        fallback=functools.partial(shifted_launcher, problem, config, device),
    )
    return PackingLauncher(launch)
