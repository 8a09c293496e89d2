"""Gradients of the input of trained chains in one launch: where, and by which tile.

The weights may be packed for it in the forward pass, in the one order that is known there: that of
the tiles of families/common/input_grad_tile.py. Other kernels pack them themselves, if they do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ksopt.epilogue import Activation
from ksopt.jit import host
from ksopt.kernels import gradient_autotuner, registry
from ksopt.kernels.candidate import Candidate
from ksopt.kernels.families.common.chain_rows import aligned
from ksopt.kernels.families.common.input_grad_tile import Config, Shape
from ksopt.kernels.families.common.pytorch_cost import elementwise_us
from ksopt.kernels.families.gradient_base import GradientProblem, TakesPacked, entry_of
from ksopt.kernels.gradient_autotuner import GradientCandidate, GradientQuestion, Without
from ksopt.kernels.operands import in_aligned_rows
from ksopt.kernels.problem import DeviceSpec, Problem
from ksopt.patterns.chain import Pattern
from ksopt.precision import dtype_name

# A launch that packs a weight, or puts it in order: products of 64 rows took 3.7 to 5.0 us more for
# each factor than predicted without it, on an H100 (docs/development/training.md).
_PREPARING_US = 4.0
_SEVERAL_LAUNCHES = (0,) * 9  # of `InputGradient.entry`

Gradients = tuple[Tensor, Tensor]
"""Those of the chains' input, and of the values between their factors. Where the input is an
activation, the first one is the gradient of what is activated."""
Way = Callable[..., Gradients]
"""(a gradient of each sibling, their weights, with an activation what is below) -> both."""


def is_by_kernel(s: Shape, dtype: torch.dtype, rows: int, device: torch.device) -> bool:
    """Whether one launch is expected to be faster than several.

    Args:
        s: the chains.
        dtype: of the gradients and the weights; batch first.
        rows: of the gradients.
        device: where.
    """
    spec, name = gradient_autotuner.spec_of(device), dtype_name(dtype)
    if spec is None or rows == 0:
        return False
    us = apart_us(s, name, rows, spec)
    return gradient_autotuner.expected(_problem(s, name), rows, device, us) is not None


def packed_for(weights: Sequence[Tensor], rows: int) -> Tensor | None:
    """The weights packed as `run` reads them for this many rows; None where no kernel does."""
    s, name = shape_of(weights), dtype_name(weights[0].dtype)
    launch = _launch_of(s, weights[0].dtype, rows, weights[0].device)
    if launch is None:
        return None
    kernel = gradient_autotuner.loaded(_problem(s, name), launch, weights[0].get_device())
    return kernel.pack(weights) if isinstance(kernel, TakesPacked) else None


def shape_of(weights: Sequence[Tensor], activation: Activation = "none") -> Shape:
    """The chains of weights, left to right, sibling after sibling.

    With an activation there is one, and the weight of the factor below follows.
    """
    return shape_of_factors([Pattern(*one.shape) for one in weights], activation)


def shape_of_factors(factors: Sequence[Pattern], activation: Activation) -> Shape:
    """The `shape_of` weights of these patterns."""
    left, right, *others = factors
    if activation == "none":
        return Shape(left, right, len(factors) // 2)
    return Shape(left, right, 1, activation, others[0])


def run(
    grads: Sequence[Tensor],
    weights: Sequence[Tensor],
    packed: Tensor | None,
    apart: Way,
    by_pytorch: Way,
    below: Tensor | None = None,
    bias: Tensor | None = None,
    activation: Activation = "none",
) -> Gradients | None:
    """The gradients of chains' input and of the values between their factors, by a kernel.

    Args:
        grads: [*batch, b1*d1] of each sibling.
        weights: [1,b1,c1,d1] and [a2,b2,c2,1] of each sibling, on the device of ``grads``; with an
            activation also [1,b0,c0,d0] of the factor whose product it is of.
        packed: the weights, as `packed_for` returns them for as many rows, or None. A kernel that
            takes none, or as many elements of them, reads ``weights``.
        apart: (grads, weights) -> the same by the launches that the kernel races with: those of
            each sibling, of one chain one per factor.
        by_pytorch: the same by PyTorch alone, in any dtype.
        below: [*batch, c0*d0]: what that factor read, where the chain reads an activation.
        bias: [a2*c2], what was added to its product, or None.
        activation: of the sum, which is computed again.

    Returns:
        [*batch, a2*c2], and [*batch, a2*b2], of siblings [siblings, *batch, a2*b2]; None where no
        kernel computes them faster.
    """
    first = grads[0]
    read = (*grads, *weights, below, bias)
    if first.numel() == 0 or any(one is not None and one.dtype != first.dtype for one in read):
        return None
    s, name = shape_of(weights, activation), dtype_name(first.dtype)
    rows, spec = first.numel() // first.shape[-1], gradient_autotuner.spec_of(first.device)
    kernel: Any = None
    is_final = True
    if spec is not None:
        without = Without("factors", apart_us(s, name, rows, spec), apart, by_pytorch)
        shapes: tuple[Any, ...] = (
            ((rows, first.shape[-1]),) * s.siblings,
            tuple(tuple(weight.shape) for weight in weights),
            *(() if below is None else ((rows, s.features_below),)),
        )
        question = GradientQuestion(_problem(s, name), rows, first.device, spec, without, shapes)
        kernel, is_final = gradient_autotuner.kernel_of(question)
    if is_final and host.is_loaded():
        entry = entry_of(kernel, rows, _SEVERAL_LAUNCHES)
        if entry is not None:
            know = torch.ops.ksopt_host.know_input_grad
            know(list(grads), list(weights), activation, *entry)
    if kernel is None:
        return None
    behind: list[Tensor | None] = []
    if below is not None:
        behind.append(in_aligned_rows(below.contiguous()).view(rows, -1))
        behind.append(None if bias is None else aligned(bias.contiguous()))
    if (
        packed is not None
        and isinstance(kernel, TakesPacked)
        and packed.numel() == kernel.packed_elements
    ):
        kernel = functools.partial(kernel, packed=packed)
    to, between = kernel([in_aligned_rows(one) for one in grads], weights, *behind)
    planes, batch = between.shape[:-2], first.shape[:-1]
    return to.view(*batch, -1), between.view(*planes, *batch, -1)


def tile_of(s: Shape, dtype: torch.dtype, rows: int, device: torch.device) -> Config | None:
    """The tile that weights are packed for, if `run` takes it; arguments as for `is_by_kernel`.

    It is the best predicted, and None where no kernel is predicted to be faster, or the kernel is
    of a family that has other tiles.
    """
    launch = _launch_of(s, dtype, rows, device)
    tile = None if launch is None else launch.launch
    return tile if isinstance(tile, Config) else None


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
    return gradient_autotuner.fastest(problem, rows, spec, apart_us(s, dtype, rows, spec))


def _problem(s: Shape, dtype: str) -> GradientProblem:
    factors = (s.left, s.right, *(() if s.below is None else (s.below,)))
    return GradientProblem(
        "chain_input", factors, dtype, siblings=s.siblings, activation=s.activation
    )


def apart_us(s: Shape, dtype: str, rows: int, spec: DeviceSpec) -> float:
    """Microseconds predicted of several launches for what one computes.

    Of one chain they are one per factor; of siblings the fastest of each, and the additions of
    their results; behind an activation the fastest without it, the product of the factor below,
    and a kernel of Inductor's.
    """
    if s.below is not None:
        plain = replace(s, activation="none", below=None)
        launch, us = faster(plain, dtype, rows, spec), apart_us(plain, dtype, rows, spec)
        size = getattr(torch, dtype).itemsize * rows * s.right.in_features
        us = us if launch is None else launch.predicted_us
        us += _product_us(s.below, dtype, rows, spec)
        return us + elementwise_us(3 * size, spec.multiprocessors)  # two are read, one written
    if s.siblings == 1:
        return factors_us(s, dtype, rows, spec)
    one = replace(s, siblings=1)
    us = factors_us(one, dtype, rows, spec)
    launch = faster(one, dtype, rows, spec)
    us = us if launch is None else launch.predicted_us
    size = getattr(torch, dtype).itemsize * rows * s.right.in_features
    adding_us = elementwise_us(3 * size, spec.multiprocessors)
    return s.siblings * us + (s.siblings - 1) * adding_us


def factors_us(s: Shape, dtype: str, rows: int, spec: DeviceSpec) -> float:
    """Microseconds predicted of one launch per factor of a chain, and of preparing their weights.

    The time of one launch for both includes packing. Here each weight is transposed: a kernel reads
    it after a launch that puts its elements in order or packs them.
    """
    # The factors that the gradient is multiplied by.
    transposed = (Pattern(p.a, p.c, p.b, p.d) for p in (s.left, s.right))
    return sum(_product_us(p, dtype, rows, spec) for p in transposed)


def _product_us(p: Pattern, dtype: str, rows: int, spec: DeviceSpec) -> float:
    problem = Problem.of_factor(p, dtype, False)
    return min(map(_prepared_us, registry.best_predicted(problem, rows, spec)))


def _prepared_us(candidate: Candidate) -> float:
    """Microseconds predicted of a product by a transposed weight that changes."""
    prepares = candidate.needs_order or candidate.prepares_weight
    return candidate.predicted_us + (_PREPARING_US if prepares else 0.0)
