"""Input gradients of trained chains in one launch: where, and by which tile."""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

from ksopt import settings
from ksopt.errors import KsoptError
from ksopt.jit import host
from ksopt.kernels import registry
from ksopt.kernels.backends.base import backend_of
from ksopt.kernels.candidate import Candidate
from ksopt.kernels.families import input_grad_tile
from ksopt.kernels.families.input_grad_tile import Config, Shape
from ksopt.kernels.families.input_grad_wgmma16 import LAUNCH, InputGradient
from ksopt.kernels.operands import in_aligned_rows
from ksopt.kernels.problem import DeviceSpec, Problem
from ksopt.patterns.chain import Pattern
from ksopt.precision import dtype_name

# A launch that packs a weight, or puts it in order: products of 64 rows took 3.7 to 5.0 us more for
# each factor than predicted without it, on an H100 (docs/development/training.md).
_PREPARING_US = 4.0
_A_LAUNCH_A_FACTOR = dict.fromkeys(LAUNCH, 0)
_log = logging.getLogger("ksopt")


def is_by_kernel(s: Shape, dtype: torch.dtype, rows: int, device: torch.device) -> bool:
    """Whether one launch is predicted to be faster than one per factor.

    Args:
        s: the chain.
        dtype: of the gradient and the weights; batch first.
        rows: of the gradient.
        device: where.
    """
    return tile_of(s, dtype, rows, device) is not None


def packed_for(left: Tensor, right: Tensor, rows: int) -> Tensor | None:
    """The weights packed as `run` reads them for this many rows; None where no kernel does."""
    s = Shape(Pattern(*left.shape), Pattern(*right.shape))
    tile = tile_of(s, left.dtype, rows, left.device)
    kernel = None if tile is None else _loaded(s, tile, dtype_name(left.dtype), left.get_device())
    return None if kernel is None else kernel.pack(left, right)


def run(
    grad: Tensor, left: Tensor, right: Tensor, packed: Tensor | None = None
) -> tuple[Tensor, Tensor] | None:
    """The gradients of a chain's input and of the values between its factors, by a kernel.

    Args:
        grad: [*batch, b1*d1]; left, right: [1,b1,c1,d1] and [a2,b2,c2,1], on one device.
        packed: both weights, as `packed_for` returns them for as many rows, or None.

    Returns:
        [*batch, a2*c2] and [*batch, a2*b2]; None where no kernel computes them faster.
    """
    if grad.numel() == 0 or not grad.dtype == left.dtype == right.dtype:
        return None
    s = Shape(Pattern(*left.shape), Pattern(*right.shape))
    rows = grad.numel() // grad.shape[-1]
    tile = tile_of(s, grad.dtype, rows, grad.device)
    kernel = None if tile is None else _loaded(s, tile, dtype_name(grad.dtype), grad.get_device())
    if host.is_loaded():
        launch = _A_LAUNCH_A_FACTOR if kernel is None else kernel.launches(rows)
        torch.ops.ksopt_host.know_input_grad(grad, left, right, **launch)
    if kernel is None:
        return None
    if packed is not None and packed.numel() != kernel.tile.packed_elements(s):
        packed = None
    to, between = kernel(in_aligned_rows(grad), left, right, packed)
    return (to.view(*grad.shape[:-1], -1), between.view(*grad.shape[:-1], -1))


def tile_of(s: Shape, dtype: torch.dtype, rows: int, device: torch.device) -> Config | None:
    """The tile that `run` takes; arguments as for `is_by_kernel`."""
    spec = _spec(device)
    return None if spec is None or rows == 0 else faster_tile(s, dtype_name(dtype), rows, spec)


def _spec(device: torch.device) -> DeviceSpec | None:
    """The spec that kernels must fit; None where no kernel may be used."""
    if device.type != "cuda" or settings.tuning() == "off":
        return None
    return backend_of("cuda").spec(device)


@functools.lru_cache(maxsize=4096)
def faster_tile(s: Shape, dtype: str, rows: int, spec: DeviceSpec) -> Config | None:
    """The best tile; None where no tile computes the chain, or none is predicted to be faster."""
    if input_grad_tile.unsupported_reason(s, dtype, spec) is not None:
        return None
    tile = input_grad_tile.best(s, rows, spec)[0]
    us = input_grad_tile.predicted_us(s, tile, rows, spec)
    return tile if us < factors_us(s, dtype, rows, spec) else None


def factors_us(s: Shape, dtype: str, rows: int, spec: DeviceSpec) -> float:
    """Microseconds predicted of one launch per factor, and of what prepares their weights.

    The time of one launch for both includes packing. Here each weight is transposed: a kernel reads
    it after a launch that puts its elements in order or packs them.
    """
    # The factors that the gradient is multiplied by.
    transposed = (Pattern(p.a, p.c, p.b, p.d) for p in (s.left, s.right))
    problems = (Problem.of_factor(p, dtype, False) for p in transposed)
    return sum(min(map(_prepared_us, registry.best_predicted(one, rows, spec))) for one in problems)


def _prepared_us(candidate: Candidate) -> float:
    """Microseconds predicted of a product by a transposed weight that changes."""
    prepares = candidate.needs_order or candidate.prepares_weight
    return candidate.predicted_us + (_PREPARING_US if prepares else 0.0)


@functools.lru_cache(maxsize=1024)
def _loaded(s: Shape, tile: Config, dtype: str, device: int) -> InputGradient | None:
    try:
        return InputGradient(s, tile, dtype, device)
    except KsoptError as error:
        _log.warning("ksopt: input gradients of %s are left to one launch per factor: %s", s, error)
        return None
