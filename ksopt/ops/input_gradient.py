"""The gradient of the input of a chain of two factors, in one launch: ``ks_chain_input_grad``.

It is no public operator: the backward pass of a trained chain uses it where that is faster
(:mod:`ksopt.kernels.input_gradients`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ksopt.kernels import input_gradients, weight_cache
from ksopt.kernels.families.input_grad_tile import Shape
from ksopt.kernels.operands import size_hint
from ksopt.ops import implementation
from ksopt.ops.schemas import LIBRARY, implement
from ksopt.patterns.chain import Pattern
from ksopt.reference import ks_reference


def _kernel(
    grad: Tensor, left: Tensor, right: Tensor, packed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The gradients of the chain's input, and of the values between its factors."""
    for weight in (left, right):
        weight_cache.forget(weight)
    with torch._C._AutoDispatchBelowADInplaceOrView():
        gradients = input_gradients.run(grad, left, right, packed, _by_factors, _by_pytorch)
    return _by_factors(grad, left, right) if gradients is None else gradients


def _by_factors(grad: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    between = implementation.repacked(grad, left.transpose(1, 2))
    return implementation.repacked(between, right.transpose(1, 2)), between


def _by_pytorch(grad: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    between = ks_reference(grad, left.transpose(1, 2))
    return ks_reference(between, right.transpose(1, 2)), between


def _fake(
    grad: Tensor, left: Tensor, right: Tensor, packed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    between = implementation.fake(grad, left.transpose(1, 2))
    return implementation.fake(between, right.transpose(1, 2)), between


LIBRARY.define(
    "ks_chain_input_grad(Tensor grad, Tensor left, Tensor right, Tensor? packed=None) "
    "-> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
implement("ks_chain_input_grad", _kernel)
torch.library.register_fake("ksopt::ks_chain_input_grad", _fake, lib=LIBRARY)
ks_chain_input_grad = torch.ops.ksopt.ks_chain_input_grad.default


def is_one_launch(grad: Tensor, left: Tensor, right: Tensor) -> bool:
    """Whether one kernel computes both gradients faster, of fakes too.

    Of a dynamic number of rows the one at hand decides. Of ``grad`` only the rows matter, the dtype
    and the device, which are also those of the chain's input.
    """
    sizes = [size_hint(size) for size in (*left.shape, *right.shape, *grad.shape)]
    if None in sizes or 0 in sizes or not grad.dtype == left.dtype == right.dtype:
        return False
    known = [size for size in sizes if size is not None]
    shape = Shape(Pattern(*known[:4]), Pattern(*known[4:8]))
    return input_gradients.is_by_kernel(shape, grad.dtype, math.prod(known[8:-1]), grad.device)


def packed_elements(x: Tensor, left: Tensor, right: Tensor) -> int:
    """Elements of the weights as the kernel of x's gradient reads them, if they are to be saved.

    Returns:
        0 where the backward pass packs them itself: where no kernel does, where the number of rows
        is dynamic and the kernel's tile with it, and where they take more than an eighth of x's
        memory, beside which the launch that is saved is short.
    """
    sizes = (*left.shape, *right.shape, *x.shape)
    if not all(type(size) is int for size in sizes) or 0 in sizes:
        return 0
    if not x.dtype == left.dtype == right.dtype:
        return 0
    shape = Shape(Pattern(*left.shape), Pattern(*right.shape))
    case = (shape, x.dtype, math.prod(x.shape[:-1]), x.device)
    tile = input_gradients.tile_of(*case) if input_gradients.is_by_kernel(*case) else None
    elements = 0 if tile is None else tile.packed_elements(shape)
    return elements if 8 * elements <= x.numel() else 0
