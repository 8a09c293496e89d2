"""The fp32 tensor-core family for batch last (csrc/cuda/batch_last_mma_tf32x3.cuh)."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from ksopt.kernels import codegen
from ksopt.kernels.families import batch_last
from ksopt.kernels.families.batch_last import Config, PackingLauncher
from ksopt.kernels.launcher import Launcher, prepare
from ksopt.kernels.problem import Geometry, Problem
from ksopt.patterns.chain import Pattern

DTYPES = ("float32",)

_STEPS_US = {True: 215.0, False: 430.0}  # of a multiprocessor, exact or not
_EXTRA = 3.0  # what a warp's loads and splits of operands cost, in steps


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
    return batch_last.configs(problem.pattern, 4, multiprocessors)


def predicted_us(
    p: Pattern, config: Config, batch: int, multiprocessors: int, exact: bool = True
) -> float:
    """Predicted time of a tile in microseconds, for ``batch`` rows."""
    return batch_last.predicted_of(p, config, batch, multiprocessors, _STEPS_US[exact], _EXTRA)


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


def kernel_name(problem: Problem, exact: bool = True) -> str:
    """The kernel's name, as profilers show it."""
    return codegen.kernel_name(
        "batch_last_mma_tf32x3", "fp32" if exact else "tf32", problem.pattern
    )


def source(problem: Problem, config: Config, exact: bool = True, shifted: bool = False) -> str:
    """The generated file: one instance of the template.

    Args:
        problem: what is computed.
        config: the tile.
        exact: FP32 accuracy, by three TF32 products; otherwise one, which is TF32's own accuracy.
        shifted: whether rows of x and y may start anywhere, and columns of x lie apart.
    """
    p = problem.pattern
    arguments = ", ".join(map(str, (*config.template, 3 if exact else 1, str(shifted).lower())))
    facts = {"Tile::SHARED_BYTES": config.shared_bytes(p)}
    instance = f"BatchLastMmaTf32x3Tile<Support, {arguments}>"
    tile = codegen.tile("batch_last_mma_tf32x3", p, instance, facts, "batch_last")
    call = "batch_last_mma_tf32x3_kernel<Support, Tile>"
    return tile + codegen.kernel(kernel_name(problem, exact), call)


def launcher(problem: Problem, config: Config, device: int, exact: bool = True) -> Launcher:
    """Compile and load the kernels for ``problem`` on CUDA device ``device``.

    There are two: one for rows of x and y that start at multiples of 16 bytes, one for all else.
    """
    code = source(problem, config, exact)
    name, shape = kernel_name(problem, exact), geometry(problem, config)
    shifted = functools.partial(_shifted, problem, config, device, exact)
    return PackingLauncher(prepare(problem, name, code, shape, device, fallback=shifted))


def shifted_launcher(
    problem: Problem, config: Config, device: int, exact: bool = True
) -> PackingLauncher:
    """Compile and load the kernel that takes rows at any address; it packs the weight itself."""
    return PackingLauncher(_shifted(problem, config, device, exact))


def _shifted(problem: Problem, config: Config, device: int, exact: bool) -> Launcher:
    return prepare(
        problem,
        kernel_name(problem, exact),
        source(problem, config, exact, shifted=True),
        geometry(problem, config),
        device,
    )
