"""The product by a frozen weight that may be written before the backward pass: ks_mm_saving."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ksopt.ops import implementation
from ksopt.ops.autograd import in_rows
from ksopt.ops.schemas import LIBRARY, define, ks_mm, ks_mm_once

# The tensor to save is an argument, so that a compiler computes it in the forward pass.
_SCHEMA = "(Tensor x, Tensor weight, Tensor saved, Tensor owner, bool batch_last=False) -> Tensor"
define(
    ("ks_mm_saving_inner",),
    _SCHEMA,
    lambda x, weight, saved, owner, last=False: implementation.frozen(x, weight, last, owner),
    lambda x, weight, saved, owner, last=False: implementation.fake(x, weight, last, owner),
)
ks_mm_saving_inner = torch.ops.ksopt.ks_mm_saving_inner.default


class _KsMmSaving(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, saved: Tensor, owner: Tensor, batch_last: bool
    ) -> Tensor:
        ctx.save_for_backward(saved)
        ctx.batch_last = batch_last
        y: Tensor = ks_mm_saving_inner(x, weight, saved, owner, batch_last)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (saved,) = ctx.saved_tensors
        grad_x = ks_mm_once(in_rows(*grads), saved.transpose(1, 2), ctx.batch_last)
        return grad_x, None, None, None, None


def _ks_mm_saving(
    x: Tensor, weight: Tensor, saved: Tensor, owner: Tensor, batch_last: bool = False
) -> Tensor:
    if torch.is_grad_enabled() and x.requires_grad:
        product: Tensor = _KsMmSaving.apply(x, weight, saved, owner, batch_last)
        return product
    y: Tensor = ks_mm(x, weight, batch_last, owner)
    return y


LIBRARY.define(f"ks_mm_saving{_SCHEMA}", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.impl("ks_mm_saving", _ks_mm_saving, "CompositeImplicitAutograd")
ks_mm_saving = torch.ops.ksopt.ks_mm_saving.default
