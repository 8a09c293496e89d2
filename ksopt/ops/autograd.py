"""Gradients of the operators, to any order, and the operators without gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ksopt.kernels import weight_cache, weight_scopes
from ksopt.kernels.validation import check_ks_mm
from ksopt.ops import implementation, weight_gradient
from ksopt.ops.eager import PLAIN
from ksopt.ops.graph_inputs import cacheable_owner
from ksopt.ops.schemas import (
    LIBRARY,
    ks_mm,
    ks_mm_frozen,
    ks_mm_inner,
    ks_mm_repacked,
    ks_mm_weight_grad,
    ks_mm_weight_grad_inner,
)

# Autograd. The product is linear in x and in weight, so every gradient is one of the two operators
# again, with the pattern transposed where x is concerned: gradients of any order follow.


class _KsMm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, batch_last: bool, owner: Tensor | None
    ) -> Tensor:
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        # A frozen weight, through which gradients reach x, is cached for both passes.
        ctx.repacked = needs_weight or weight_cache.are_marked_repacked()
        if not ctx.repacked:
            weight, owner = _with_cacheable_owner(x, weight, owner)
        product = ks_mm_repacked if ctx.repacked else ks_mm_frozen
        y = product(x, weight, batch_last, owner)
        ctx.save_for_backward(
            x if needs_weight else None,
            weight if needs_x else None,
            owner if needs_x and not ctx.repacked else None,
        )
        ctx.a, _, _, ctx.d = weight.shape
        ctx.batch_last = batch_last
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad = in_rows(*grads)
        x, weight, owner = ctx.saved_tensors
        grad_x = grad_weight = None
        if weight is not None:
            repacked = ctx.repacked or owner is None or weight_cache.are_marked_repacked()
            with weight_scopes.repacked(repacked), weight_scopes.frozen(not repacked):
                grad_x = ks_mm(grad, weight.transpose(1, 2), ctx.batch_last, owner)
        if x is not None:
            grad_weight = ks_mm_weight_grad(grad, x, ctx.a, ctx.d, ctx.batch_last)
        return grad_x, grad_weight, None, None


def in_rows(grad: Tensor) -> Tensor:
    """A gradient with contiguous elements along its last dim, as all kernels read it.

    Both products of a backward pass read it: one copy for both, which a compiler fuses with what
    computed the gradient (that of attention's keys comes transposed).
    """
    step = grad.stride(-1)  # no int where the sizes are symbolic; 1 is one there, too
    return grad if isinstance(step, int) and step == 1 else grad.contiguous()


def _with_gradients(x: Tensor, weight: Tensor, batch_last: bool, owner: Tensor | None) -> Any:
    if weight.dtype != x.dtype and weight.requires_grad:
        check_ks_mm(x, weight, batch_last, any_dtype=owner is not None)
        weight = weight.to(x.dtype)
    return _KsMm.apply(x, weight, batch_last, owner)


def _with_cacheable_owner(
    x: Tensor, weight: Tensor, owner: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """A weight, and the tensor that the cache stores its forms with."""
    if owner is None:  # of which a weight of another dtype is refused
        return weight, cacheable_owner(weight) if weight.dtype == x.dtype else None
    owner = cacheable_owner(owner)
    return (weight if owner is not None else weight.to(x.dtype)), owner


class _KsMmWeightGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, x: Tensor, a: int, d: int, batch_last: bool) -> Tensor:
        needs_grad, needs_x, *_ = ctx.needs_input_grad
        ctx.save_for_backward(grad if needs_x else None, x if needs_grad else None)
        ctx.batch_last = batch_last
        return _weight_grad_traced(grad, x, a, d, batch_last)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        (grad_weight,) = grads
        grad, x = ctx.saved_tensors
        grad_grad = grad_x = None
        with weight_scopes.repacked():  # the weight of this product is a gradient
            if x is not None:
                grad_grad = ks_mm(x, grad_weight, ctx.batch_last)
            if grad is not None:
                grad_x = ks_mm(grad, grad_weight.transpose(1, 2), ctx.batch_last)
        return grad_grad, grad_x, None, None, None


def _register_autograd(
    op: torch._ops.OpOverload,
    inner: Callable[..., Tensor],
    kernel_of_inner: Callable[..., Tensor],
    differentiable: Callable[..., Any],
    decomposed: Callable[..., Tensor],
    defaults: tuple[Any, ...],
) -> None:
    """Make ``op`` differentiable by ``differentiable``, which records an autograd.Function.

    A graph that torch.compile traced through this kernel calls ``inner``, or what that calls, and
    never comes back here. Without tracing, ``kernel_of_inner`` is called at once, which saves a
    way through the dispatcher: about 2 us of a call.

    torch.library.register_autograd is not used: it refuses torch.func.grad, drops the tangents of
    forward mode without a word, and adds 7 us to a call that needs no gradient instead of 4. Under
    transforms of torch.func and in forward mode ``decomposed``, in torch's own operators,
    stands in: slower, and right for any nesting.
    """

    def kernel(*args: Any) -> Tensor:
        # The dispatcher leaves out arguments that equal their defaults.
        args = (*args, *defaults[len(args) :])
        if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
            return decomposed(*args)
        if torch.is_grad_enabled() and (args[0].requires_grad or args[1].requires_grad):
            return differentiable(*args)
        x = args[0]
        plain = type(x) in PLAIN and type(args[1]) in PLAIN and (x.is_cuda or x.is_cpu)
        if plain and torch._C._len_torch_dispatch_stack() == 0:
            return kernel_of_inner(*args)
        # ``inner`` has no kernel for autograd: an owner that requires gradients, beside a weight
        # that was detached from it, would make torch's own require them of the result.
        with torch._C._AutoDispatchBelowAutograd():
            return inner(*args)

    LIBRARY.impl(op, kernel, "Autograd")


def _ks_mm_traced(x: Tensor, weight: Tensor, batch_last: bool, owner: Tensor | None) -> Tensor:
    """The twin operator that carries the state of `weight_scopes` into a compiled graph."""
    twin = ks_mm_frozen if weight_scopes.thread_state.frozen else ks_mm_inner
    if weight_cache.are_marked_repacked():
        twin = ks_mm_repacked
    else:
        weight, owner = _with_cacheable_owner(x, weight, owner)
    y: Tensor = twin(x, weight, batch_last, owner)
    return y


def _weight_grad_traced(grad: Tensor, x: Tensor, a: int, d: int, batch_last: bool) -> Tensor:
    """ks_mm_weight_grad below autograd, as compiled graphs contain it.

    It is in torch's own operators where no kernel of ksopt's is faster.
    """
    # They may return a view of their result: torch would forbid in-place operations on it. And
    # autocast would cast for them, as it does not for the operator.
    with torch._C._AutoDispatchBelowADInplaceOrView(), torch._C._DisableAutocast():
        if weight_gradient.is_weight_grad_by_kernel(grad, x, a, d, batch_last):
            gradient: Tensor = ks_mm_weight_grad_inner(grad, x, a, d, batch_last)
            return gradient
        return weight_gradient.weight_grad_decomposed(grad, x, a, d, batch_last)


_register_autograd(
    ks_mm,
    _ks_mm_traced,
    implementation.product,
    _with_gradients,
    implementation.decomposed,
    (None, None, False, None),
)
_register_autograd(
    ks_mm_weight_grad,
    _weight_grad_traced,
    weight_gradient.weight_grad,
    _KsMmWeightGrad.apply,
    weight_gradient.weight_grad_decomposed,
    (),
)
