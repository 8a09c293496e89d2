"""The product of a 2:4 sparse matrix by PyTorch's semi-structured tensors, with its gradients."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn.functional import linear
from torch.utils.weak import WeakIdKeyDictionary

from ksopt.kernels import weight_cache
from ksopt.operators.batches import Product, of_any_batch
from ksopt.operators.structures.two_four import largest_two_mask
from ksopt.reference import is_batch_last

# The weight cache cannot count the memory of torch's packed tensors. It stores a placeholder for
# each, which is the key here: a packed tensor lives as long as its placeholder is cached.
_packed_of: WeakIdKeyDictionary = WeakIdKeyDictionary()


def bind(weight: Tensor, layout: str) -> Product:
    """The product by the two largest of each four of a weight [out_features, in_features].

    The weight is packed once per version, in training at every call.
    """
    last = is_batch_last(layout)
    return of_any_batch(lambda x: _product(x, weight, last), layout)


def _product(x: Tensor, weight: Tensor, last: bool) -> Tensor:
    # The cache cannot be traced; without tracing, torch._dynamo need not be imported.
    return (_untraced if torch.compiler.is_compiling() else _computed)(x, weight, last)


def _computed(x: Tensor, weight: Tensor, last: bool) -> Tensor:
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _Product.apply(x, weight, last)
    place = weight_cache.prepared(weight, "2:4", _placeholder_of_packed)
    return _multiply(x, _packed_of[place], last)


_untraced = _disable_dynamo(_computed)


def _placeholder_of_packed(weight: Tensor) -> Tensor:
    place = weight.new_empty(1)
    _packed_of[place] = _packed(weight * largest_two_mask(weight))
    return place


def _packed(pruned: Tensor) -> Tensor:
    with warnings.catch_warnings():
        # torch warns once that the type is a prototype.
        warnings.simplefilter("ignore", UserWarning)
        return torch.sparse.to_sparse_semi_structured(pruned.detach().contiguous())


def _multiply(x: Tensor, packed: Tensor, last: bool) -> Tensor:
    # torch's type is the left operand: [out, in] @ [in, rows].
    return torch.mm(packed, x) if last else linear(x.contiguous(), packed)


class _Product(torch.autograd.Function):
    """The product of x [rows, in] ([in, rows] in batch_last) and the weight; dense gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, last: bool) -> Tensor:
        weight_cache.forget(weight)  # an optimizer may change it without a new version
        places = largest_two_mask(weight)
        pruned = weight * places
        ctx.save_for_backward(x, pruned, places)
        ctx.last = last
        return _multiply(x, _packed(pruned), last)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, pruned, places = ctx.saved_tensors
        (of_y,) = gradients
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = pruned.T @ of_y if ctx.last else of_y @ pruned
        if ctx.needs_input_grad[1]:
            of_weight = (of_y @ x.T if ctx.last else of_y.T @ x) * places
        return of_x, of_weight, None
