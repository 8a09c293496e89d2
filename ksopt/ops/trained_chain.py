"""Trained chains of two factors in compiled graphs, and their one launch: ``ks_chain_keeping``.

The forward pass stores the values between the two factors, so that the backward pass computes no
product again. As one launch it also stores the weights as the kernel of the input's gradient reads
them, so that both passes pack them in one launch; that is no public operator. Where a launch per
factor is faster, the bias is an addition of torch's, which a compiler fuses with what follows. The
backward pass takes the kernels that compute several gradients where they are faster.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ksopt.kernels import trained_chain, weight_cache, weight_scopes
from ksopt.ops import chain_gradients, implementation, input_gradient, weight_gradient
from ksopt.ops.autograd import in_rows
from ksopt.ops.input_gradient import ks_chain_input_grad
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


def _kernel(x: Tensor, left: Tensor, right: Tensor, bias: Tensor | None, packed: int = 0) -> Three:
    """y, the values between and packed weights, for calls that the host library does not know."""
    for weight in (left, right):
        weight_cache.forget(weight)
    with torch._C._AutoDispatchBelowADInplaceOrView():
        result = trained_chain.run(x, (left, right), bias, packed)
    if result is not None:
        return result
    between = implementation.repacked(x, right)
    y = implementation.repacked(between, left)
    y = y if bias is None else y.add_(bias)
    return y, between, trained_chain.packed_of_grad(x, left, right, packed)


def _fake(x: Tensor, left: Tensor, right: Tensor, bias: Tensor | None, packed: int = 0) -> Three:
    between = implementation.fake(x, right)
    return implementation.fake(between, left), between, x.new_empty(packed)


LIBRARY.define(
    "ks_chain_keeping(Tensor x, Tensor left, Tensor right, Tensor? bias, int packed=0) "
    "-> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
implement("ks_chain_keeping", _kernel)
torch.library.register_fake("ksopt::ks_chain_keeping", _fake, lib=LIBRARY)
ks_chain_keeping = torch.ops.ksopt.ks_chain_keeping.default


def _without_autocast(backward: Backward) -> Backward:
    @functools.wraps(backward)
    def computed(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with torch._C._DisableAutocast():
            return backward(ctx, *grads)

    return computed


class _TrainedChain(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, left: Tensor, right: Tensor, bias: Tensor | None, is_whole: bool
    ) -> tuple[Tensor, ...]:
        if not is_whole:
            between = ks_mm_repacked(x, right)
            y = ks_mm_repacked(between, left)
            y = y if bias is None else y + bias
            ctx.mark_non_differentiable(between)
            ctx.save_for_backward(x, between, left, right, None)
            return y, between
        elements = input_gradient.packed_elements(x, left, right) if ctx.needs_input_grad[0] else 0
        y, between, packed = ks_chain_keeping(x, left, right, bias, elements)
        ctx.mark_non_differentiable(between, packed)
        ctx.save_for_backward(x, between, left, right, packed)
        return y, between, packed

    @staticmethod
    @_without_autocast  # which compilers trace the backward pass with, where the forward pass was
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = in_rows(grads[0])
        x, between, left, right, packed = ctx.saved_tensors
        of_x, of_left, of_right, of_bias, _ = ctx.needs_input_grad
        if torch.is_grad_enabled():  # gradients of gradients: through x and right, too
            between = ks_mm(x, right)
        grad_x = grad_left = grad_right = grad_bias = None
        are_one = of_left and of_right and chain_gradients.are_together(x, left, right, of_bias)
        if of_left and of_bias and not are_one and _are_together(grad, between, left):
            grad_left, grad_bias = ks_mm_weight_bias_grad_inner(grad, between, *_sizes(left))
        elif of_left and not are_one:
            grad_left = ks_mm_weight_grad(grad, between, *_sizes(left), False)
        if of_x and _is_one_launch(grad, left, right):
            known = packed if packed is not None and packed.numel() else None
            grad_x, grad_between = ks_chain_input_grad(grad, left, right, known)
        else:
            with weight_scopes.repacked():
                grad_between = ks_mm(grad, left.transpose(1, 2))
                if of_x:
                    grad_x = ks_mm(grad_between, right.transpose(1, 2))
        if are_one:
            (grad_left, grad_right), biases = chain_gradients.weight_grads(
                [grad], [between], [grad_between], x, [left, right], of_bias
            )
            grad_bias = None if biases is None else biases[0]
        elif of_right:
            grad_right = ks_mm_weight_grad(grad_between, x, *_sizes(right), False)
        if of_bias and grad_bias is None:
            grad_bias = weight_gradient.bias_grad(grad)
        return grad_x, grad_left, grad_right, grad_bias, None


def _are_together(grad: Tensor, between: Tensor, left: Tensor) -> bool:
    """Whether one kernel computes the gradients of the left factor and of the bias."""
    if torch.is_grad_enabled():  # it has no gradient of its own
        return False
    return weight_gradient.is_weight_grad_by_kernel(grad, between, *_sizes(left), False)


def _is_one_launch(grad: Tensor, left: Tensor, right: Tensor) -> bool:
    """Whether one kernel computes the gradients of x and of the values between the factors."""
    if torch.is_grad_enabled():  # it has no gradient of its own
        return False
    return input_gradient.is_one_launch(grad, left, right)


def _sizes(weight: Tensor) -> tuple[int, int]:
    a, _, _, d = weight.shape
    return a, d


def have_joint_gradients(x: Tensor, left: Tensor, right: Tensor, bias: Tensor | None) -> bool:
    """Whether a launch is predicted to compute several of a chain's gradients faster, of fakes too.

    Args:
        x, left, right, bias: as for `trained_product`; both weights are trained.
    """
    with_bias = bias is not None and bias.requires_grad
    return chain_gradients.is_faster(x, left, right, with_bias) or (
        x.requires_grad and input_gradient.is_one_launch(x, left, right)
    )


def trained_product(
    x: Tensor, left: Tensor, right: Tensor, bias: Tensor | None, is_whole: bool = True
) -> Tensor:
    """The product of a chain of two factors plus a bias, with its gradients recorded.

    Args:
        x: [*batch, N]; left, right: weights of x's dtype; bias: [M] of it, or None.
        is_whole: whether the forward pass is one launch, not one per factor.
    """
    y: Tensor = _TrainedChain.apply(x, left, right, bias, is_whole)[0]
    return y
