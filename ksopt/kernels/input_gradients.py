"""Input gradients of trained chains in one launch: where, and by which tile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ksopt.jit import host
from ksopt.kernels import gradient_autotuner, registry
from ksopt.kernels.candidate import Candidate
from ksopt.kernels.families.gradient_base import GradientProblem
from ksopt.kernels.families.input_grad_tile import Config, Shape
from ksopt.kernels.families.input_grad_wgmma16 import LAUNCH
from ksopt.kernels.gradient_autotuner import GradientCandidate, GradientQuestion, Without
from ksopt.kernels.operands import in_aligned_rows
from ksopt.kernels.problem import DeviceSpec, Problem
from ksopt.patterns.chain import Pattern
from ksopt.precision import dtype_name

# A launch that packs a weight, or puts it in order: products of 64 rows took 3.7 to 5.0 us more for
# each factor than predicted without it, on an H100 (docs/development/training.md).
_PREPARING_US = 4.0
_A_LAUNCH_A_FACTOR = dict.fromkeys(LAUNCH, 0)

Gradients = tuple[Tensor, Tensor]
"""Those of a chain's input, and of the values between its factors."""


def is_by_kernel(s: Shape, dtype: torch.dtype, rows: int, device: torch.device) -> bool:
    """Whether one launch is expected to be faster than one per factor.

    Args:
        s: the chain.
        dtype: of the gradient and the weights; batch first.
        rows: of the gradient.
        device: where.
    """
    spec, name = gradient_autotuner.spec_of(device), dtype_name(dtype)
    if spec is None or rows == 0:
        return False
    us = factors_us(s, name, rows, spec)
    return gradient_autotuner.expected(_problem(s, name), rows, device, us) is not None


def packed_for(left: Tensor, right: Tensor, rows: int) -> Tensor | None:
    """The weights packed as `run` reads them for this many rows; None where no kernel does."""
    s, name = Shape(Pattern(*left.shape), Pattern(*right.shape)), dtype_name(left.dtype)
    launch = _launch_of(s, left.dtype, rows, left.device)
    if launch is None:
        return None
    kernel = gradient_autotuner.loaded(_problem(s, name), launch, left.get_device())
    packed: Tensor | None = None if kernel is None else kernel.pack(left, right)
    return packed


def run(
    grad: Tensor,
    left: Tensor,
    right: Tensor,
    packed: Tensor | None,
    by_factors: Callable[[Tensor, Tensor, Tensor], Gradients],
    by_pytorch: Callable[[Tensor, Tensor, Tensor], Gradients],
) -> Gradients | None:
    """The gradients of a chain's input and of the values between its factors, by a kernel.

    Args:
        grad: [*batch, b1*d1]; left, right: [1,b1,c1,d1] and [a2,b2,c2,1], on one device.
        packed: both weights, as `packed_for` returns them for as many rows, or None.
        by_factors: (grad, left, right) -> the same by a launch per factor, which the kernel races
            with.
        by_pytorch: the same by PyTorch alone, in any dtype.

    Returns:
        [*batch, a2*c2] and [*batch, a2*b2]; None where no kernel computes them faster.
    """
    if grad.numel() == 0 or not grad.dtype == left.dtype == right.dtype:
        return None
    s, name = Shape(Pattern(*left.shape), Pattern(*right.shape)), dtype_name(grad.dtype)
    rows, spec = grad.numel() // grad.shape[-1], gradient_autotuner.spec_of(grad.device)
    kernel: Any = None
    is_final = True
    if spec is not None:
        without = Without("factors", factors_us(s, name, rows, spec), by_factors, by_pytorch)
        shapes = ((rows, grad.shape[-1]), tuple(left.shape), tuple(right.shape))
        question = GradientQuestion(_problem(s, name), rows, grad.device, spec, without, shapes)
        kernel, is_final = gradient_autotuner.kernel_of(question)
    if is_final and host.is_loaded():
        launch = _A_LAUNCH_A_FACTOR if kernel is None else kernel.launches(rows)
        torch.ops.ksopt_host.know_input_grad(grad, left, right, **launch)
    if kernel is None:
        return None
    if packed is not None and packed.numel() != kernel.tile.packed_elements(s):
        packed = None
    to, between = kernel(in_aligned_rows(grad), left, right, packed)
    return (to.view(*grad.shape[:-1], -1), between.view(*grad.shape[:-1], -1))


def tile_of(s: Shape, dtype: torch.dtype, rows: int, device: torch.device) -> Config | None:
    """The tile that `run` takes, if it takes a kernel; arguments as for `is_by_kernel`.

    It is the best predicted, and None where no kernel is predicted to be faster.
    """
    launch = _launch_of(s, dtype, rows, device)
    return None if launch is None else launch.launch


def _launch_of(
    s: Shape, dtype: torch.dtype, rows: int, device: torch.device
) -> GradientCandidate | None:
    spec = gradient_autotuner.spec_of(device)
    return None if spec is None or rows == 0 else faster(s, dtype_name(dtype), rows, spec)


@functools.lru_cache(maxsize=4096)
def faster(s: Shape, dtype: str, rows: int, spec: DeviceSpec) -> GradientCandidate | None:
    """The best launch; None where no kernel computes the chain, or is predicted to be faster."""
    problem = _problem(s, dtype)
    if not gradient_autotuner.ranked(problem, rows, spec):
        return None
    return gradient_autotuner.fastest(problem, rows, spec, factors_us(s, dtype, rows, spec))


def _problem(s: Shape, dtype: str) -> GradientProblem:
    return GradientProblem("chain_input", (s.left, s.right), dtype)


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
