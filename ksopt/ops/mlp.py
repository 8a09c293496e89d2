"""``ks_mlp``: two consecutive layers as one operator.

It is composed of two ``ks_chain``, with their properties; in compiled training it has an autograd
formula of its own where a launch computes each layer. Only where a kernel takes both, and no
gradient is recorded, is it another operator, ``ks_mlp_inner``, which runs the plan's launch: the
features between the layers are never in memory then. Calls in the host library's table run without
Python (csrc/host/mlp_kernels.cpp).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ksopt.epilogue import with_epilogue
from ksopt.errors import InvalidInputError
from ksopt.kernels import mlp_plans, weight_scopes
from ksopt.kernels.families.base import CHAIN_FAMILIES
from ksopt.kernels.mlp_plans import Mlp
from ksopt.kernels.operands import Operands
from ksopt.kernels.validation import check_chain, check_chain_out, is_written_straight
from ksopt.ops import implementation, trained, trained_mlp
from ksopt.ops.chain import (
    are_parts_seen,
    are_trained,
    cast_summand,
    cast_weights,
    composed,
    for_one_launch,
    is_cast_by_autocast,
)
from ksopt.ops.schemas import LIBRARY, define

_ARGUMENTS = (
    "(Tensor x, Tensor[] weights, Tensor[] last_weights, Tensor? hidden_bias=None, "
    'Tensor? bias=None, Tensor? residual=None, str hidden_activation="none", '
    'str activation="none", Tensor[]? owners=None'
)
_OP = "ks_mlp"


def _composed(
    x: Tensor,
    weights: Sequence[Tensor],
    last_weights: Sequence[Tensor],
    hidden_bias: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    hidden_activation: str = "none",
    activation: str = "none",
    owners: Sequence[Tensor] | None = None,
) -> Tensor:
    check_chain(_OP, weights, 1, hidden_activation)
    check_chain(_OP, last_weights, 1, activation)
    every: Sequence[Tensor] = (*weights, *last_weights)
    if is_cast_by_autocast(x, every):
        x = x.to(trained.autocast_dtype(x.device.type))
        hidden_bias, bias = cast_summand(hidden_bias, x), cast_summand(bias, x)
        around = (hidden_bias, bias, cast_summand(residual, x), hidden_activation, activation)
        owners = every if owners is None else owners
        with torch._C._DisableAutocast():
            return _composed(x, weights, last_weights, *around, owners)
    count = len(weights)
    every, owners = cast_weights(x, every, owners, _OP)
    weights, last_weights = every[:count], every[count:]
    if CHAIN_FAMILIES and not torch.compiler.is_dynamo_compiling():
        operands = Operands(x, tuple(every), bias, residual, hidden_bias)
        if not are_parts_seen(operands):
            ready, cacheable = for_one_launch(x, every, owners)
            own, others = ready[:count], ready[count:]
            mlp = Mlp(count, hidden_activation, activation)
            around = (hidden_bias, bias, residual, hidden_activation, activation)
            check = partial(_fake, x, own, others, *around, owners)
            if mlp_plans.is_whole(replace(operands, weights=tuple(ready)), mlp, check):
                whole: Tensor = ks_mlp_inner(x, own, others, *around, cacheable)
                return whole
        y = _trained(operands, count, hidden_activation)
        if y is not None:
            return with_epilogue(y, None, activation, residual)
    of_own, of_others = _owners_of(owners, count)
    ahead = (hidden_bias, None, hidden_activation, False, 1, of_own)
    hidden = composed(x, weights, *ahead, op=_OP)
    behind = (bias, residual, activation, False, 1, of_others)
    return composed(hidden, last_weights, *behind, op=_OP)


def _trained(operands: Operands, count: int, activation: str) -> Tensor | None:
    """The products of both layers, if they are trained and a launch each computes them."""
    x, weights, last_weights = operands.x, operands.weights[:count], operands.weights[count:]
    biases = (operands.hidden_bias, operands.bias)
    present = [[] if one is None else [one] for one in biases]
    if activation == "none" or not len(weights) == len(last_weights) == 2:
        return None
    if not are_trained(x, weights, present[0]) or not are_trained(x, last_weights, present[1]):
        return None
    hidden = implementation.chain_fake(x, weights, operands.hidden_bias, op=_OP)
    if not trained_mlp.is_faster(x, weights, hidden, last_weights, biases, activation):
        return None
    return trained_mlp.trained_mlp(x, weights, last_weights, *biases, activation)


def _owners_of(
    owners: Sequence[Tensor] | None, factors: int
) -> tuple[Sequence[Tensor] | None, Sequence[Tensor] | None]:
    return (None, None) if owners is None else (owners[:factors], owners[factors:])


def _run(
    x: Tensor,
    weights: Sequence[Tensor],
    last_weights: Sequence[Tensor],
    hidden_bias: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    hidden_activation: str = "none",
    activation: str = "none",
    owners: Sequence[Tensor] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The result of both layers by their plan; weights without owners are not cached."""
    if owners is None:
        with weight_scopes.repacked():
            return _planned(
                *(x, weights, last_weights, hidden_bias, bias, residual),
                *(hidden_activation, activation, None, out),
            )
    return _planned(
        *(x, weights, last_weights, hidden_bias, bias, residual),
        *(hidden_activation, activation, owners, out),
    )


def _planned(
    x: Tensor,
    weights: Sequence[Tensor],
    last_weights: Sequence[Tensor],
    hidden_bias: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    hidden_activation: str,
    activation: str,
    owners: Sequence[Tensor] | None,
    out: Tensor | None,
) -> Tensor:
    check_chain(_OP, weights, 1, hidden_activation)
    check_chain(_OP, last_weights, 1, activation)
    every = [*weights, *last_weights]
    around = (hidden_bias, bias, residual, hidden_activation, activation)
    if owners is not None and not implementation.are_alike(x, every):
        cast, count = implementation.cast(x, every, owners, _OP), len(weights)
        with weight_scopes.owned_by_each(owners):
            return _planned(x, cast[:count], cast[count:], *around, None, out)
    operands = Operands(x, tuple(every), bias, residual, hidden_bias)
    mlp = Mlp(len(weights), hidden_activation, activation)
    check = partial(_fake, x, weights, last_weights, *around)
    call = mlp_plans.whole_call(operands, mlp, check)
    if call is not None:
        with torch._C._AutoDispatchBelowADInplaceOrView():
            if owners is None:
                return call(x, every, hidden_bias, bias, residual, out)
            with weight_scopes.owned_by_each(owners):
                return call(x, every, hidden_bias, bias, residual, out)
    own, others = _owners_of(owners, len(weights))
    ahead = (hidden_bias, None, hidden_activation, False, 1, own)
    hidden = implementation.chain(x, weights, *ahead, op=_OP)
    behind = (bias, residual, activation, False, 1, others)
    return implementation.chain(hidden, last_weights, *behind, out=out, op=_OP)


def _fake(
    x: Tensor,
    weights: Sequence[Tensor],
    last_weights: Sequence[Tensor],
    hidden_bias: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    hidden_activation: str = "none",
    activation: str = "none",
    owners: Sequence[Tensor] | None = None,
) -> Tensor:
    """The shape of the result."""
    own, others = _owners_of(owners, len(weights))
    ahead = (hidden_bias, None, hidden_activation, False, 1, own)
    hidden = implementation.chain_fake(x, weights, *ahead, op=_OP)
    behind = (bias, residual, activation, False, 1, others)
    return implementation.chain_fake(hidden, last_weights, *behind, op=_OP)


def _writing(
    x: Tensor,
    weights: Sequence[Tensor],
    last_weights: Sequence[Tensor],
    *around: Any,
    out: Tensor,
    **named: Any,
) -> None:
    """Write the result of `_run` into ``out``."""
    names = ("hidden_bias", "bias", "residual", "hidden_activation", "activation", "owners")
    named = dict(zip(names, around, strict=False)) | named
    summands = (named.get(name) for name in names[:3])
    operands = (x, *weights, *last_weights, *summands)
    if torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (*operands, out)
    ):
        raise InvalidInputError(
            "ks_mlp: no gradient is recorded of a product that is written into out, but an "
            "operand or out requires one: leave out away, or multiply under torch.no_grad()"
        )
    fits = _holds_result(out, x, last_weights) and is_written_straight(out, *operands)
    if fits:
        _run(x, weights, last_weights, **named, out=out)
    else:
        y = _run(x, weights, last_weights, **named)
        check_chain_out(y, out)
        out.copy_(y)
    torch.autograd.graph.increment_version(out)


def _holds_result(out: Tensor, x: Tensor, last_weights: Sequence[Tensor]) -> bool:
    """Whether a result has out's shape, dtype and device; others are refused elsewhere."""
    if not last_weights or last_weights[0].dim() != 4 or x.dim() == 0:
        return False
    a, b, _, d = last_weights[0].shape
    is_like_x = out.dtype == x.dtype and out.device == x.device
    return is_like_x and out.shape == (*x.shape[:-1], a * b * d)


def _writing_fake(
    x: Tensor,
    weights: Sequence[Tensor],
    last_weights: Sequence[Tensor],
    *around: Any,
    out: Tensor,
    **named: Any,
) -> None:
    """The checks of `_writing` on fakes."""
    check_chain_out(_fake(x, weights, last_weights, *around, **named), out)


LIBRARY.define(f"ks_mlp{_ARGUMENTS}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.impl("ks_mlp", _composed, "CompositeImplicitAutograd")
define(("ks_mlp_inner",), f"{_ARGUMENTS}) -> Tensor", _run, _fake)
define(("ks_mlp.out",), f"{_ARGUMENTS}, *, Tensor(a!) out) -> ()", _writing, _writing_fake)

ks_mlp = torch.ops.ksopt.ks_mlp.default
ks_mlp_out = torch.ops.ksopt.ks_mlp.out
ks_mlp_inner = torch.ops.ksopt.ks_mlp_inner.default
