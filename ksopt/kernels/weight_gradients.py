"""Weight gradients of factors by ksopt's kernels: where, and by which launch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ksopt.jit import host
from ksopt.kernels import gradient_autotuner
from ksopt.kernels.families.common.pytorch_cost import bias_gradient_us, weight_gradient_us
from ksopt.kernels.families.common.weight_grad import Launch
from ksopt.kernels.families.gradient_base import GradientProblem, entry_of, gradient_families
from ksopt.kernels.gradient_autotuner import GradientQuestion, Without
from ksopt.kernels.operands import in_aligned_rows
from ksopt.kernels.problem import DeviceSpec
from ksopt.patterns.chain import Pattern
from ksopt.precision import dtype_name

_BY_TORCH = (0,) * 9  # of `WeightGradient.entry`

Gradients = tuple[Tensor, Tensor | None]
"""The weight's gradient, and that of a bias if requested."""


def is_by_kernel(p: Pattern, dtype: torch.dtype, rows: int, device: torch.device) -> bool:
    """Whether a kernel is expected to be faster than ``torch.bmm`` between copies.

    Args:
        p: the factor's pattern.
        dtype: of the gradient and x; batch first.
        rows: of both.
        device: where.
    """
    if _is_one_matrix(p):
        return False
    problem = _problem(p, dtype_name(dtype), with_bias=False)
    us = weight_gradient_us(p, rows, problem.dtype)
    return gradient_autotuner.expected(problem, rows, device, us) is not None


def run(
    grad: Tensor,
    x: Tensor,
    a: int,
    d: int,
    with_bias: bool,
    by_pytorch: Callable[[Tensor, Tensor], Gradients],
) -> Gradients | None:
    """The weight gradient, and the gradient of a bias after the product, by a kernel.

    Args:
        grad: [*batch, a*b*d]; x: [*batch, a*c*d], on one device.
        with_bias: sum the rows of ``grad``, too.
        by_pytorch: (grad, x) -> the same by PyTorch, which kernels race with.

    Returns:
        None where no kernel computes it, or faster.
    """
    if not x.is_cuda or x.numel() == 0:
        return None
    p = Pattern(a, grad.shape[-1] // (a * d), x.shape[-1] // (a * d), d)
    rows = x.numel() // x.shape[-1]
    spec = gradient_autotuner.spec_of(x.device)
    kernel, is_final = None, True
    if spec is not None and not _is_one_matrix(p):
        problem = _problem(p, dtype_name(x.dtype), with_bias)
        us = weight_gradient_us(p, rows, problem.dtype)
        us += bias_gradient_us(p.out_features, rows) if with_bias else 0.0
        shapes = ((rows, p.out_features), (rows, p.in_features))
        without = Without("pytorch", us, by_pytorch, by_pytorch)
        question = GradientQuestion(problem, rows, x.device, spec, without, shapes)
        kernel, is_final = gradient_autotuner.kernel_of(question)
    if is_final and host.is_loaded():
        entry = entry_of(kernel, rows, _BY_TORCH)
        if entry is not None:
            torch.ops.ksopt_host.know_weight_grad(grad, x, a, d, with_bias, *entry)
    if kernel is None:
        return None
    gradients: Gradients = kernel(in_aligned_rows(grad), in_aligned_rows(x))
    return gradients


def is_faster(p: Pattern, dtype: str, rows: int, spec: DeviceSpec) -> bool:
    """Whether a kernel is predicted to be faster than PyTorch."""
    if _is_one_matrix(p):
        return False
    us = weight_gradient_us(p, rows, dtype)
    return gradient_autotuner.fastest(_problem(p, dtype), rows, spec, us) is not None


def best(p: Pattern, dtype: str, rows: int, spec: DeviceSpec) -> Launch | None:
    """The launch with the least predicted time; None where no kernel computes the gradient."""
    several = gradient_autotuner.ranked(_problem(p, dtype), rows, spec)
    return several[0].launch if several else None


def launches(p: Pattern, dtype: str, rows: int, spec: DeviceSpec) -> list[Launch]:
    """The launches of all families that compute the gradient."""
    problem = _problem(p, dtype)
    return [
        launch
        for family in gradient_families("weight")
        if family.unsupported_reason(problem, spec) is None
        for launch in family.launches(problem, rows, spec)
    ]


def predicted_us(p: Pattern, dtype: str, rows: int, spec: DeviceSpec) -> float:
    """Predicted microseconds of the faster implementation."""
    us = weight_gradient_us(p, rows, dtype)
    if _is_one_matrix(p):
        return us
    kernel = gradient_autotuner.fastest(_problem(p, dtype), rows, spec, us)
    return us if kernel is None else kernel.predicted_us


def _problem(p: Pattern, dtype: str, with_bias: bool = False) -> GradientProblem:
    return GradientProblem("weight", (p,), dtype, with_bias)


def _is_one_matrix(p: Pattern) -> bool:
    """Whether the factor is one matrix, whose sums over rows cuBLAS splits itself."""
    return p.a == p.d == 1
