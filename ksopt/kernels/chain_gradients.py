"""Both weight gradients of a chain, or of siblings, in one launch: where, and by which kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ksopt.jit import host
from ksopt.kernels import gradient_autotuner, weight_gradients
from ksopt.kernels.families.common.pytorch_cost import bias_gradient_us
from ksopt.kernels.families.gradient_base import GradientProblem, entry_of
from ksopt.kernels.gradient_autotuner import GradientQuestion, Without
from ksopt.kernels.operands import in_aligned_rows
from ksopt.kernels.problem import DeviceSpec
from ksopt.patterns.chain import Pattern
from ksopt.precision import dtype_name

_BY_FACTORS = (0,) * 11  # of `ChainGradients.entry`

Chain = tuple[Pattern, Pattern]
"""The left factor and the right one."""
Gradients = list[Tensor]
"""Of the weights, left to right, sibling after sibling; behind them of the biases if requested."""


@dataclass(frozen=True)
class Factors:
    """The sizes of a chain's two weights that their gradients' operands do not determine.

    Attributes:
        left_a: blocks of the left factor.
        left_d: its d.
        right_a: blocks of the right factor.
        right_d: its d.
    """

    left_a: int
    left_d: int
    right_a: int
    right_d: int

    def chain(self, out: int, left_in: int, right_out: int, features: int) -> Chain:
        """The patterns, of the features of y, of both sides between the factors, and of x."""
        left, right = self.left_a * self.left_d, self.right_a * self.right_d
        return (
            Pattern(self.left_a, out // left, left_in // left, self.left_d),
            Pattern(self.right_a, right_out // right, features // right, self.right_d),
        )


def is_by_kernel(
    chain: Chain,
    dtype: torch.dtype,
    rows: int,
    device: torch.device,
    with_bias: bool,
    siblings: int = 1,
) -> bool:
    """Whether one launch is expected to be faster than one per factor and one for the bias.

    One of siblings must be faster than those of each, too.

    Args:
        chain: the patterns of both factors.
        dtype: of the rows; batch first.
        rows: of all operands.
        device: where.
        with_bias: the gradient of a bias is computed, too.
        siblings: chains of these patterns on the same input.
    """
    spec, name = gradient_autotuner.spec_of(device), dtype_name(dtype)
    if spec is None or rows == 0:
        return False
    problem = GradientProblem("chain_weights", chain, name, with_bias, siblings)
    us = without_us(problem, rows, spec)
    return gradient_autotuner.expected(problem, rows, device, us) is not None


def run(
    operands: Sequence[Tensor],
    of: Factors,
    with_bias: bool,
    without: Callable[..., Gradients],
    by_pytorch: Callable[..., Gradients],
) -> Gradients | None:
    """The weight gradients of all siblings, and those of biases after the products, by a kernel.

    Args:
        operands: of each sibling the gradient of y, [*batch, a1*b1*d1]; of each what is between
            its factors, [*batch, a1*c1*d1]; of each the gradient of that; and x,
            [*batch, a2*c2*d2].
        of: the factors.
        with_bias: sum the rows of y's gradients, too.
        without: (these operands) -> the same by a launch for each factor, or for each sibling,
            which kernels race with.
        by_pytorch: the same by PyTorch alone, in any dtype.

    Returns:
        None where no kernel computes them, or faster.
    """
    x, siblings = operands[-1], len(operands) // 3
    if not x.is_cuda or x.numel() == 0 or operands[0].numel() == 0:
        return None
    chain = of.chain(*(one.shape[-1] for one in operands[::siblings]))
    rows = x.numel() // x.shape[-1]
    problem = GradientProblem("chain_weights", chain, dtype_name(x.dtype), with_bias, siblings)
    spec = gradient_autotuner.spec_of(x.device)
    kernel, is_final = None, True
    if spec is not None:
        shapes = tuple((rows, one.shape[-1]) for one in operands)
        name = "factors" if siblings == 1 else "siblings"
        way = Without(name, without_us(problem, rows, spec), without, by_pytorch)
        question = GradientQuestion(problem, rows, x.device, spec, way, shapes)
        kernel, is_final = gradient_autotuner.kernel_of(question)
    if is_final and host.is_loaded():
        entry = entry_of(kernel, rows, _BY_FACTORS)
        sizes = (of.left_a, of.left_d, of.right_a, of.right_d)
        if entry is not None:
            know = torch.ops.ksopt_host.know_chain_grads
            know(list(operands), *sizes, with_bias, list(entry))
    if kernel is None:
        return None
    gradients: Gradients = kernel(*map(in_aligned_rows, operands))
    return gradients


def without_us(problem: GradientProblem, rows: int, spec: DeviceSpec) -> float:
    """Predicted microseconds without a launch for all: per factor, or per sibling the best way."""
    left, right = problem.factors
    us = by_factors_us((left, right), problem.dtype, rows, spec, problem.with_bias)
    if problem.siblings == 1:
        return us
    best = gradient_autotuner.fastest(replace(problem, siblings=1), rows, spec, us)
    return problem.siblings * (us if best is None else best.predicted_us)


def by_factors_us(chain: Chain, dtype: str, rows: int, spec: DeviceSpec, with_bias: bool) -> float:
    """Predicted microseconds of one launch per factor, in 16 bits, and one for the bias."""
    left, _ = chain
    total = sum(weight_gradients.predicted_us(p, dtype, rows, spec) for p in chain)
    if with_bias and not weight_gradients.is_faster(left, dtype, rows, spec):
        total += bias_gradient_us(left.out_features, rows)
    return total
