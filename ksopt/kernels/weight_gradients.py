"""Weight gradients by ksopt's kernels: where, and by which launch."""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

from ksopt import settings
from ksopt.errors import KsoptError
from ksopt.jit import host
from ksopt.kernels.backends.base import backend_of
from ksopt.kernels.families import weight_grad_mma16, weight_grad_wgmma16
from ksopt.kernels.families.pytorch_cost import weight_gradient_us
from ksopt.kernels.families.weight_grad import Launch, Tile, WeightGradient, launches
from ksopt.kernels.operands import in_aligned_rows
from ksopt.kernels.problem import DeviceSpec
from ksopt.patterns.chain import Pattern
from ksopt.precision import dtype_name

_BY_TORCH = (0,) * 9  # of `WeightGradient.entry`
_log = logging.getLogger("ksopt")


def is_by_kernel(p: Pattern, dtype: torch.dtype, rows: int, device: torch.device) -> bool:
    """Whether a kernel is predicted to be faster than ``torch.bmm`` between copies.

    Args:
        p: the factor's pattern.
        dtype: of the gradient and x; batch first.
        rows: of both.
        device: where.
    """
    if device.type != "cuda" or rows == 0 or settings.tuning() == "off":
        return False
    spec = backend_of("cuda").spec(device)
    return spec is not None and is_faster(p, dtype_name(dtype), rows, spec)


def run(
    grad: Tensor, x: Tensor, a: int, d: int, batch_last: bool, with_bias: bool = False
) -> tuple[Tensor, Tensor | None] | None:
    """The weight gradient, and the gradient of a bias after the product, by a kernel.

    Args:
        grad: [*batch, a*b*d]; x: [*batch, a*c*d], on one device.
        with_bias: sum the rows of ``grad``, too.

    Returns:
        The gradient and that sum, or None for it; None where no kernel computes it, or faster.
    """
    if not x.is_cuda or batch_last or x.numel() == 0:
        return None
    p = Pattern(a, grad.shape[-1] // (a * d), x.shape[-1] // (a * d), d)
    rows = x.numel() // x.shape[-1]
    kernel = None
    if is_by_kernel(p, x.dtype, rows, x.device):
        kernel = _loaded(p, dtype_name(x.dtype), rows, x.get_device(), with_bias)
    if host.is_loaded():
        launch = _BY_TORCH if kernel is None else kernel.entry
        torch.ops.ksopt_host.know_weight_grad(grad, x, a, d, with_bias, *launch)
    return None if kernel is None else kernel(in_aligned_rows(grad), in_aligned_rows(x))


@functools.lru_cache(maxsize=4096)
def is_faster(p: Pattern, dtype: str, rows: int, spec: DeviceSpec) -> bool:
    """Whether a kernel is predicted to be faster than PyTorch."""
    if p.a == p.d == 1:
        return False  # one matrix, whose sums over rows cuBLAS splits itself
    launch = best(p, dtype, rows, spec)
    return launch is not None and launch.predicted_us(p, rows, spec) < weight_gradient_us(p, rows)


@functools.lru_cache(maxsize=4096)
def best(p: Pattern, dtype: str, rows: int, spec: DeviceSpec) -> Launch | None:
    """The launch with the least predicted time; None where no kernel computes the gradient."""
    candidates = several(p, dtype, rows, spec)
    return min(candidates, key=lambda one: one.predicted_us(p, rows, spec), default=None)


def several(p: Pattern, dtype: str, rows: int, spec: DeviceSpec) -> list[Launch]:
    """The launches of all kernels that compute the gradient."""
    tiles: list[Tile] = []
    if weight_grad_wgmma16.unsupported(p, dtype, spec) is None:
        tiles += weight_grad_wgmma16.configs()
    if weight_grad_mma16.unsupported(p, dtype, spec) is None:
        tiles += weight_grad_mma16.configs(p)
    return [one for tile in tiles for one in launches(tile, p, rows, spec)]


def predicted_us(p: Pattern, dtype: str, rows: int, spec: DeviceSpec) -> float:
    """Predicted microseconds of the faster implementation."""
    launch = best(p, dtype, rows, spec)
    if launch is not None and is_faster(p, dtype, rows, spec):
        return launch.predicted_us(p, rows, spec)
    return weight_gradient_us(p, rows)


@functools.lru_cache(maxsize=1024)
def _loaded(
    p: Pattern, dtype: str, rows: int, device: int, with_bias: bool
) -> WeightGradient | None:
    spec = backend_of("cuda").spec(torch.device("cuda", device))
    launch = None if spec is None else best(p, dtype, rows, spec)
    assert launch is not None
    try:
        return WeightGradient(p, dtype, launch, device, with_bias)
    except KsoptError as error:
        _log.warning("ksopt: weight gradients of %s are left to PyTorch: %s", p, error)
        return None
