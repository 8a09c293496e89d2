"""From tensors to the fastest known way to multiply them. Forward only; called by ksopt.ops."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from ksopt.errors import UnavailableError
from ksopt.kernels import cpu, general
from ksopt.kernels.problem import Problem
from ksopt.pattern import Pattern


def run(x: Tensor, weight: Tensor, batch_last: bool) -> Tensor:
    """Compute y = x K^T.

    Args:
        x: (*batch, N), or (N, *batch) when ``batch_last``; CPU or CUDA, any strides.
        weight: (a, b, c, d), of the same dtype and device.
        batch_last: the layout.

    Returns:
        A new contiguous tensor (*batch, M), or (M, *batch) when ``batch_last``.

    Raises:
        CompilationError: a kernel does not compile, which is a fault of ksopt.
    """
    if not x.is_cuda:
        return cpu.run(x, weight, batch_last)
    runnable = _cuda_runnable(tuple(weight.shape), x.dtype, batch_last, x.get_device())
    return runnable(x, weight)


@functools.cache
def _cuda_runnable(
    weight_shape: tuple[int, int, int, int], dtype: torch.dtype, batch_last: bool, device: int
) -> Callable[[Tensor, Tensor], Tensor]:
    """The choice for one problem on one device, made once for the process."""
    problem = Problem(Pattern(*weight_shape), str(dtype).removeprefix("torch."), batch_last)
    if general.supports(problem) is not None:  # float64: exactness matters more than speed
        return functools.partial(_pytorch, batch_last)
    try:
        return general.launcher(problem, device)
    except UnavailableError as error:
        _warn_without_kernels(str(error))
        return functools.partial(_pytorch, batch_last)


def _pytorch(batch_last: bool, x: Tensor, weight: Tensor) -> Tensor:
    """PyTorch's own way, with the weight laid out anew on each call."""
    return cpu.multiply_by_bmm(x, weight, batch_last)


@functools.cache
def _warn_without_kernels(reason: str) -> None:
    warnings.warn(
        f"ksopt: its CUDA kernels cannot be used, so PyTorch's slower path is taken. {reason}",
        RuntimeWarning,
        stacklevel=2,
    )
