"""The product of a 2:4 sparse matrix by PyTorch's semi-structured tensors, with its gradients."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from ksopt.operators.batches import Product, of_any_batch
from ksopt.operators.two_four import kept
from ksopt.reference import is_batch_last


def bind(weight: Tensor, layout: str) -> Product:
    """The product by the two largest of each four of a weight [out_features, in_features].

    A weight that needs no gradient is packed once, at the first call; another at every call,
    because training changes it.
    """
    last = is_batch_last(layout)
    if weight.requires_grad:
        return of_any_batch(lambda x: _Product.apply(x, weight, last), layout)
    packed: list[Tensor] = []

    def product(x: Tensor) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            return _Product.apply(x, weight, last)
        if not packed:
            packed.append(_packed(weight * kept(weight)))
        return _multiply(x, packed[0], last)

    return of_any_batch(product, layout)


def _packed(pruned: Tensor) -> Tensor:
    with warnings.catch_warnings():
        # torch says once that the type is a prototype.
        warnings.simplefilter("ignore", UserWarning)
        return torch.sparse.to_sparse_semi_structured(pruned.detach().contiguous())


def _multiply(x: Tensor, packed: Tensor, last: bool) -> Tensor:
    # torch's type is the left operand: [out, in] @ [in, rows].
    return torch.mm(packed, x) if last else linear(x.contiguous(), packed)


class _Product(torch.autograd.Function):
    """x [rows, in], or [in, rows] in batch_last, by the packed weight; dense gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, last: bool) -> Tensor:
        places = kept(weight)
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
