"""Trained chains of two factors in compiled graphs, and their one launch: ``ks_chain_keeping``.

They are one chain, or siblings: chains of the same patterns on one input. The forward pass stores
the values between the two factors, so that the backward pass computes no product again. As one
launch it also stores the weights as the kernel of the input's gradient reads them, so that both
passes pack them in one launch; that is no public operator. Where a launch per factor is faster, the
bias is an addition of torch's, which a compiler fuses with what follows. The backward pass takes
the kernels that compute several gradients where they are faster.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ksopt.epilogue import with_epilogue
from ksopt.kernels import trained_chain, weight_cache, weight_scopes
from ksopt.ops import chain_gradients, implementation, input_gradient, weight_gradient
from ksopt.ops.autograd import in_rows
from ksopt.ops.input_gradient import each, ks_chain_input_grad
from ksopt.ops.schemas import (
    LIBRARY,
    implement,
    ks_mm,
    ks_mm_repacked,
    ks_mm_weight_bias_grad_inner,
    ks_mm_weight_grad,
)

Three = tuple[Tensor, Tensor, Tensor]
Backward = Callable[..., tuple[Tensor | None, ...]]


def _kernel(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    siblings: int = 1,
    activation: str = "none",
    packed: int = 0,
) -> Three:
    """y, the values between and packed weights, for calls that the host library does not know."""
    for weight in weights:
        weight_cache.forget(weight)
    with torch._C._AutoDispatchBelowADInplaceOrView():
        result = trained_chain.run(x, weights, bias, siblings, activation, packed)
    if result is not None:
        return result
    y, between = _by_factors(implementation.repacked, x, weights)
    y = with_epilogue(y if bias is None else y.add_(bias), activation=activation)
    return y, between, trained_chain.packed_of_grad(x, weights, packed)


def _by_factors(
    product: Callable[[Tensor, Tensor], Tensor], x: Tensor, weights: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """The products of all siblings, side by side, and the values between the factors."""
    between = [product(x, right) for right in weights[1::2]]
    parts = [product(one, left) for one, left in zip(between, weights[::2], strict=True)]
    if len(parts) == 1:
        return parts[0], between[0]
    return torch.cat(parts, -1), torch.stack(between)


def _fake(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    siblings: int = 1,
    activation: str = "none",
    packed: int = 0,
) -> Three:
    return *_by_factors(implementation.fake, x, weights), x.new_empty(packed)


LIBRARY.define(
    "ks_chain_keeping(Tensor x, Tensor[] weights, Tensor? bias, int siblings=1, "
    "str activation='none', int packed=0) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
implement("ks_chain_keeping", _kernel)
torch.library.register_fake("ksopt::ks_chain_keeping", _fake, lib=LIBRARY)
ks_chain_keeping = torch.ops.ksopt.ks_chain_keeping.default


def without_autocast(backward: Backward) -> Backward:
    @functools.wraps(backward)
    def computed(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with torch._C._DisableAutocast():
            return backward(ctx, *grads)

    return computed


class _TrainedChains(torch.autograd.Function):
    """(x, siblings, siblings of a launch, *weights, *biases) -> y of each sibling, and others.

    Each y is a result of its own: so their gradients need not be put side by side.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, siblings: int, of_launch: int, *operands: Tensor
    ) -> tuple[Tensor, ...]:
        weights, biases = operands[: 2 * siblings], operands[2 * siblings :]
        ctx.siblings = siblings
        ctx.set_materialize_grads(False)  # what has no reader has no gradient
        if of_launch == 0:
            between = [ks_mm_repacked(x, right) for right in weights[1::2]]
            parts = [ks_mm_repacked(*one) for one in zip(between, weights[::2], strict=True)]
            if biases:
                parts = [y + bias for y, bias in zip(parts, biases, strict=True)]
            ctx.mark_non_differentiable(*between)
            ctx.save_for_backward(x, None, *between, *weights)
            return *parts, *between
        elements = 0
        if ctx.needs_input_grad[0] and of_launch == siblings:
            elements = input_gradient.packed_elements(x, weights)
        parts, between = [], []
        for at in range(0, siblings, of_launch):
            own, its = weights[2 * at : 2 * (at + of_launch)], biases[at : at + of_launch]
            bias = None if not its else its[0] if of_launch == 1 else torch.cat(its)
            y, values, packed = ks_chain_keeping(x, own, bias, of_launch, packed=elements)
            if of_launch == 1:
                parts.append(y)
                between.append(values)
                continue
            features = y.shape[-1] // of_launch
            parts += [y.narrow(-1, one * features, features) for one in range(of_launch)]
            between += [values.select(0, one) for one in range(of_launch)]
        ctx.mark_non_differentiable(*between, packed)
        ctx.save_for_backward(x, packed, *between, *weights)
        return *parts, *between, packed

    @staticmethod
    @without_autocast  # which compilers trace the backward pass with, where the forward pass was
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        siblings: int = ctx.siblings
        x, packed, *saved = ctx.saved_tensors
        of_x, _, _, *needed = ctx.needs_input_grad
        gradients: list[Tensor | None] = [None] * len(needed)
        used = [at for at, grad in enumerate(grads[:siblings]) if grad is not None]
        if not used:
            return None, None, None, *gradients
        own = [in_rows(grads[at]) for at in used]
        between, weights = [saved[at] for at in used], []
        for at in used:
            weights += saved[siblings + 2 * at :][:2]
        if torch.is_grad_enabled():  # gradients of gradients: through x and right, too
            between = [ks_mm(x, right) for right in weights[1::2]]
        needs = [Needed.of(needed, siblings, at) for at in used]
        known = packed if len(used) == siblings else None
        grad_x, grad_between = input_grads(own, weights, of_x, known)
        of_all = weight_and_bias_grads(own, between, grad_between, x, weights, needs)
        for at, (of_left, of_right, of_bias) in zip(used, of_all, strict=True):
            gradients[2 * at : 2 * at + 2] = of_left, of_right
            if of_bias is not None:
                gradients[2 * siblings + at] = of_bias
        return grad_x, None, None, *gradients


@dataclass(frozen=True)
class Needed:
    """Which gradients of a sibling autograd needs."""

    left: bool
    right: bool
    bias: bool

    @classmethod
    def of(cls, needed: Sequence[bool], siblings: int, at: int) -> Needed:
        """One sibling's part of the flags of all weights, which those of biases follow, if any."""
        left, right = needed[2 * at : 2 * at + 2]
        return cls(left, right, any(needed[2 * siblings + at :][:1]))


def weight_and_bias_grads(
    grads: Sequence[Tensor],
    between: Sequence[Tensor],
    grad_between: Sequence[Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    needs: Sequence[Needed],
) -> list[tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """The gradients of both weights and of the bias of each sibling, where they are needed.

    Args:
        grads, between, grad_between, needs: of each sibling.
        x: of all; weights: sibling after sibling.
    """
    with_bias, of_launch = any(one.bias for one in needs), 0
    if all(one.left and one.right for one in needs):
        of_launch = _siblings_of_launch(x, weights, with_bias)
    of_all: Sequence[tuple[Tensor | None, Tensor | None, Tensor | None]]
    if of_launch > 0:
        of_all = _weight_grads(grads, between, grad_between, x, weights, with_bias, of_launch)
    else:
        of_all = [
            _apart(*one)
            for one in zip(
                *(grads, between, grad_between, [x] * len(grads)),
                *(weights[::2], weights[1::2], needs),
                strict=True,
            )
        ]
    return [
        (
            of_left,
            of_right,
            (weight_gradient.bias_grad(grad) if bias is None else bias) if its.bias else None,
        )
        for grad, its, (of_left, of_right, bias) in zip(grads, needs, of_all, strict=True)
    ]


def _apart(
    grad: Tensor,
    between: Tensor,
    grad_between: Tensor,
    x: Tensor,
    left: Tensor,
    right: Tensor,
    needs: Needed,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradient of each factor by itself, and the bias's where the left one's kernel has it."""
    of_left, of_bias = _left_grads(grad, between, left, needs)
    of_right = ks_mm_weight_grad(grad_between, x, *_sizes(right), False) if needs.right else None
    return of_left, of_right, of_bias


def _left_grads(
    grad: Tensor, between: Tensor, left: Tensor, needs: Needed
) -> tuple[Tensor | None, Tensor | None]:
    """The gradient of the left factor, and of the bias where the same kernel computes it."""
    if not needs.left:
        return None, None
    if needs.bias and _are_together(grad, between, left):
        of_left, of_bias = ks_mm_weight_bias_grad_inner(grad, between, *_sizes(left))
        return of_left, of_bias
    return ks_mm_weight_grad(grad, between, *_sizes(left), False), None


def _are_together(grad: Tensor, between: Tensor, left: Tensor) -> bool:
    """Whether one kernel computes the gradients of the left factor and of the bias."""
    if torch.is_grad_enabled():  # it has no gradient of its own
        return False
    return weight_gradient.is_weight_grad_by_kernel(grad, between, *_sizes(left), False)


def _siblings_of_launch(x: Tensor, weights: Sequence[Tensor], with_bias: bool) -> int:
    """How many siblings' weight gradients one launch computes: all, one, or none (0)."""
    left, right, *_ = weights
    for siblings in dict.fromkeys((len(weights) // 2, 1)):
        if chain_gradients.are_together(x, left, right, with_bias, siblings):
            return siblings
    return 0


def _weight_grads(
    grads: Sequence[Tensor],
    between: Sequence[Tensor],
    grad_between: Sequence[Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    with_bias: bool,
    of_launch: int,
) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """The gradients of both weights and the bias of each sibling.

    Args:
        grads, between, grad_between: of each sibling.
        x: of all; weights: sibling after sibling.
        with_bias: whether biases are trained.
        of_launch: how many siblings' one launch computes.
    """
    result: list[tuple[Tensor, Tensor, Tensor | None]] = []
    for at in range(0, len(grads), of_launch):
        end = at + of_launch
        both, biases = chain_gradients.weight_grads(
            *(grads[at:end], between[at:end], grad_between[at:end]),
            *(x, weights[2 * at : 2 * end], with_bias),
        )
        several = itertools.repeat(None) if biases is None else biases
        result += zip(both[::2], both[1::2], several, strict=False)
    return result


def input_grads(
    grads: Sequence[Tensor], weights: Sequence[Tensor], of_x: bool, packed: Tensor | None
) -> tuple[Tensor | None, Sequence[Tensor]]:
    """The gradients of x, if requested, and of the values between each sibling's factors."""
    if of_x and _is_one_launch(grads[0], weights):
        known = packed if packed is not None and packed.numel() else None
        grad_x, grad_between = ks_chain_input_grad(grads, weights, known)
        return grad_x, [grad_between] if len(grads) == 1 else grad_between.unbind(0)
    if len(grads) > 1:
        several = [input_grads([grad], pair, of_x, None) for grad, *pair in each(grads, weights)]
        sums = [one for one, _ in several if one is not None]
        total = functools.reduce(torch.add, sums) if of_x else None
        return total, [between for _, (between,) in several]
    left, right = weights
    with weight_scopes.repacked():
        grad_between = ks_mm(grads[0], left.transpose(1, 2))
        return ks_mm(grad_between, right.transpose(1, 2)) if of_x else None, [grad_between]


def _is_one_launch(grad: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether one kernel computes the gradients of x and of the values between the factors."""
    if torch.is_grad_enabled():  # it has no gradient of its own
        return False
    return input_gradient.is_one_launch(grad, weights)


def _sizes(weight: Tensor) -> tuple[int, int]:
    a, _, _, d = weight.shape
    return a, d


def have_joint_gradients(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> bool:
    """Whether a launch is predicted to compute several gradients faster, of fakes too.

    They are those of all weights, or that of x.

    Args:
        x, weights, biases: as for `trained_products`; all weights are trained.
    """
    if x.requires_grad and input_gradient.is_one_launch(x, weights):
        return True
    (left, right, *_), with_bias = weights, any(bias.requires_grad for bias in biases)
    return chain_gradients.is_faster(x, left, right, with_bias, len(weights) // 2)


def trained_products(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] = (), of_launch: int = 0
) -> list[Tensor]:
    """The products of chains of two factors plus their biases, with their gradients recorded.

    Args:
        x: [*batch, N].
        weights: of x's dtype, left to right, sibling after sibling.
        biases: [M] of each sibling, of x's dtype; none for no bias.
        of_launch: how many siblings a launch of the forward pass computes; 0: it is one per factor.

    Returns:
        [*batch, M] of each sibling.
    """
    siblings = len(weights) // 2
    results = _TrainedChains.apply(x, siblings, of_launch, *weights, *biases)
    return list(results[:siblings])
