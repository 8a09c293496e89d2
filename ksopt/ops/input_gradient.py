"""The gradient of the input of chains of two factors, in one launch: ``ks_chain_input_grad``.

Of one chain, or of siblings that read the same input. It is no public operator: the backward pass
of trained chains uses it where that is faster (:mod:`ksopt.kernels.input_gradients`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from ksopt.epilogue import Activation, activation_gradient, with_epilogue
from ksopt.kernels import input_gradients, weight_cache
from ksopt.kernels.families.common.input_grad_tile import Shape
from ksopt.kernels.input_gradients import Gradients
from ksopt.kernels.operands import size_hint
from ksopt.ops import implementation
from ksopt.ops.schemas import LIBRARY, implement
from ksopt.patterns.chain import Pattern
from ksopt.reference import ks_reference


def _kernel(
    grads: Sequence[Tensor], weights: Sequence[Tensor], packed: Tensor | None = None
) -> Gradients:
    """The gradients of the chains' input, and of the values between their factors."""
    for weight in weights:
        weight_cache.forget(weight)
    with torch._C._AutoDispatchBelowADInplaceOrView():
        gradients = input_gradients.run(grads, weights, packed, _apart, _by_pytorch)
        return _apart(grads, weights) if gradients is None else gradients


def _kernel_activated(
    grads: Sequence[Tensor],
    weights: Sequence[Tensor],
    below: Tensor,
    bias: Tensor | None,
    activation: Activation,
) -> Gradients:
    """The gradient of a product of which the chain reads an activation, by a kernel."""
    for weight in weights:
        weight_cache.forget(weight)
    apart = partial(_activated_apart, activation=activation)
    by_pytorch = partial(activated_by_pytorch, activation=activation)
    with torch._C._AutoDispatchBelowADInplaceOrView():
        gradients = input_gradients.run(
            grads, weights, None, apart, by_pytorch, below=below, bias=bias, activation=activation
        )
        return apart(grads, weights, below, bias) if gradients is None else gradients


def _activated_apart(
    grads: Sequence[Tensor],
    weights: Sequence[Tensor],
    below: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation,
) -> Gradients:
    to, between = ks_chain_input_grad(grads, weights[:2])
    h = with_epilogue(implementation.repacked(below, weights[2]), bias)
    return activation_gradient(to, h, activation), between


def activated_by_pytorch(
    grads: Sequence[Tensor],
    weights: Sequence[Tensor],
    below: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation,
) -> Gradients:
    """By PyTorch alone, in any dtype."""
    to, between = _by_pytorch(grads, weights[:2])
    h = with_epilogue(ks_reference(below, weights[2]), bias)
    return activation_gradient(to, h, activation), between


def _apart(grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Gradients:
    """By the fastest launches of each sibling, or by one for each factor of the only chain."""
    if len(grads) == 1:
        return _by_factors(implementation.repacked, grads[0], *weights)
    return _together(ks_chain_input_grad([grad], pair) for grad, *pair in each(grads, weights))


def _by_pytorch(grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Gradients:
    return _together(_by_factors(ks_reference, *one) for one in each(grads, weights))


def _by_factors(
    product: Callable[[Tensor, Tensor], Tensor], grad: Tensor, left: Tensor, right: Tensor
) -> Gradients:
    between = product(grad, left.transpose(1, 2))
    return product(between, right.transpose(1, 2)), between


def each(
    grads: Sequence[Tensor], weights: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The gradient, the left weight and the right one of each sibling."""
    return zip(grads, weights[::2], weights[1::2], strict=True)


def _together(several: Iterator[Gradients]) -> Gradients:
    """The gradients of siblings from those of each."""
    to, between = next(several)
    others = list(several)
    if not others:
        return to, between
    for one, _ in others:
        to = to + one
    return to, torch.stack([between, *(one for _, one in others)])


def _fake(
    grads: Sequence[Tensor], weights: Sequence[Tensor], packed: Tensor | None = None
) -> Gradients:
    return _together(_by_factors(implementation.fake, *one) for one in each(grads, weights))


def _fake_activated(
    grads: Sequence[Tensor],
    weights: Sequence[Tensor],
    below: Tensor,
    bias: Tensor | None,
    activation: Activation,
) -> Gradients:
    return _fake(grads, weights[:2])


LIBRARY.define(
    "ks_chain_input_grad(Tensor[] grads, Tensor[] weights, Tensor? packed=None) "
    "-> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.define(
    "ks_chain_input_grad.activated(Tensor[] grads, Tensor[] weights, Tensor below, Tensor? bias, "
    "str activation) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
implement("ks_chain_input_grad", _kernel)
torch.library.register_fake("ksopt::ks_chain_input_grad", _fake, lib=LIBRARY)
implement("ks_chain_input_grad.activated", _kernel_activated)
torch.library.register_fake("ksopt::ks_chain_input_grad.activated", _fake_activated, lib=LIBRARY)
ks_chain_input_grad = torch.ops.ksopt.ks_chain_input_grad.default
ks_chain_input_grad_activated = torch.ops.ksopt.ks_chain_input_grad.activated


def is_one_launch(grad: Tensor, weights: Sequence[Tensor], activation: Activation = "none") -> bool:
    """Whether one kernel computes the gradients of x and between faster, of fakes too.

    Of a dynamic number of rows the one at hand decides. Of ``grad`` only the rows matter, the dtype
    and the device, which are also those of the chains' input. Weights are as for the operator.
    """
    sizes = [size_hint(size) for one in (*weights, grad) for size in one.shape]
    if None in sizes or 0 in sizes or any(weight.dtype != grad.dtype for weight in weights):
        return False
    known = [size for size in sizes if size is not None]
    factors = [Pattern(*known[4 * at : 4 * at + 4]) for at in range(len(weights))]
    shape, rows = input_gradients.shape_of_factors(factors, activation), known[4 * len(weights) :]
    return input_gradients.is_by_kernel(shape, grad.dtype, math.prod(rows[:-1]), grad.device)


def packed_elements(x: Tensor, weights: Sequence[Tensor]) -> int:
    """Elements of the weights as the kernel of x's gradient reads them, if they are to be saved.

    Returns:
        0 where the backward pass packs them itself: where no kernel does, where the number of rows
        is dynamic and the kernel's tile with it, and where they take more than an eighth of x's
        memory, beside which the launch that is saved is short.
    """
    left, right, *_ = weights
    sizes = (*left.shape, *right.shape, *x.shape)
    if not all(type(size) is int for size in sizes) or 0 in sizes:
        return 0
    if any(weight.dtype != x.dtype for weight in weights):
        return 0
    shape = Shape(Pattern(*left.shape), Pattern(*right.shape), len(weights) // 2)
    case = (shape, x.dtype, math.prod(x.shape[:-1]), x.device)
    tile = input_gradients.tile_of(*case) if input_gradients.is_by_kernel(*case) else None
    elements = 0 if tile is None else tile.packed_elements(shape)
    return elements if 8 * elements <= x.numel() else 0
