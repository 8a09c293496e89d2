"""The products below autograd: for real tensors, for fakes, and under transforms.

:mod:`ksopt.ops` registers these functions, and documents the operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ksopt import epilogue
from ksopt.epilogue import GATES, After, add_epilogue_, parts_of_result
from ksopt.errors import InvalidInputError
from ksopt.kernels import (
    dispatch,
    host_plans,
    layer_plans,
    weight_cache,
    weight_scopes,
)
from ksopt.kernels.by_factors import by_factors
from ksopt.kernels.operands import Operands
from ksopt.kernels.validation import (
    check_castable,
    check_chain,
    check_chain_out,
    check_epilogue,
    check_ks_mm,
    check_out,
    check_result_in_float32,
    is_written_straight,
    shape_of_result,
)
from ksopt.reference import ks_reference


def product(
    x: Tensor,
    weight: Tensor,
    batch_last: bool = False,
    owner: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """y = x Kᵀ: see `ksopt.ops`."""
    if owner is None:
        return _multiplied(x, weight, batch_last, out)
    root = weight_scopes.root_of(owner)
    y = dispatch.run_known(x, weight, batch_last, out, root)
    if y is not None:
        return y
    # `weight_scopes.owned_by`, in a third of the time.
    before, weight_scopes.thread_state.owner = weight_scopes.thread_state.owner, root
    try:
        if weight.dtype != x.dtype:
            check_ks_mm(x, weight, batch_last, any_dtype=True)
            weight = weight_cache.cast(weight, x.dtype)
        return _multiplied(x, weight, batch_last, out)
    finally:
        weight_scopes.thread_state.owner = before


def _multiplied(x: Tensor, weight: Tensor, batch_last: bool, out: Tensor | None) -> Tensor:
    y = dispatch.run_known(x, weight, batch_last, out)
    if y is not None:
        return y
    check_ks_mm(x, weight, batch_last)
    if out is not None:
        check_out(x, weight, batch_last, out)
    # Some candidates return a view of a tensor of theirs: torch would forbid in-place operations,
    # were it to know.
    with torch._C._AutoDispatchBelowADInplaceOrView():
        if out is None or is_written_straight(out, x, weight):
            return dispatch.run(x, weight, batch_last, out)
        return out.copy_(dispatch.run(x, weight, batch_last))


def repacked(
    x: Tensor,
    weight: Tensor,
    batch_last: bool = False,
    owner: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`product` with the weight prepared for this call alone.

    As `product` and `frozen`, entered where the host library's kernel does not know the call.
    """
    weight_cache.forget(weight if owner is None else owner)
    return _once(x, weight, batch_last, owner, out)


def _once(
    x: Tensor, weight: Tensor, batch_last: bool, owner: Tensor | None, out: Tensor | None
) -> Tensor:
    y = dispatch.run_known_repacked(x, weight, batch_last, out)
    if y is not None:
        return y
    with weight_scopes.repacked():
        return product(x, weight, batch_last, owner, out)


def inner(
    x: Tensor,
    weight: Tensor,
    batch_last: bool = False,
    owner: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`product` as graphs call it; a weight without an owner is computed by the graph.

    Such a weight is not cached: see `ksopt.ops.graph_inputs`.
    """
    if owner is None:
        return _once(x, weight, batch_last, None, out)
    return product(x, weight, batch_last, owner, out)


def frozen(
    x: Tensor, weight: Tensor, batch_last: bool = False, owner: Tensor | None = None
) -> Tensor:
    """`inner` whose prepared weight outlives steps of an optimizer."""
    with weight_scopes.frozen():
        return inner(x, weight, batch_last, owner)


def fake(
    x: Tensor, weight: Tensor, batch_last: bool = False, owner: Tensor | None = None
) -> Tensor:
    """The shape of a `product`."""
    check_ks_mm(x, weight, batch_last, any_dtype=owner is not None)
    a, b, _, d = weight.shape
    if batch_last:
        return x.new_empty((a * b * d, *x.shape[1:]))
    return x.new_empty((*x.shape[:-1], a * b * d))


def writing(product: Callable[..., Tensor]) -> Callable[..., None]:
    """The kernel of an operator that writes the result of ``product`` into ``out``."""

    def kernel(
        x: Tensor,
        weight: Tensor,
        owner: Tensor | None = None,
        batch_last: bool = False,
        *,
        out: Tensor,
    ) -> None:
        if torch.is_grad_enabled() and any(
            tensor is not None and tensor.requires_grad for tensor in (x, weight, out)
        ):
            raise InvalidInputError(
                "ks_mm: no gradient is recorded of a product that is written into out, but x, "
                "weight or out requires one: leave out away, or multiply under torch.no_grad()"
            )
        product(x, weight, batch_last, owner, out)
        torch.autograd.graph.increment_version(out)

    return kernel


def copying(product: Callable[..., Tensor]) -> Callable[..., None]:
    """`writing` by a copy of the result of ``product``."""

    def kernel(
        x: Tensor,
        weight: Tensor,
        owner: Tensor | None = None,
        batch_last: bool = False,
        *,
        out: Tensor,
    ) -> None:
        writing_fake(x, weight, owner, batch_last, out=out)
        out.copy_(product(x, weight, batch_last, owner))

    return kernel


def writing_fake(
    x: Tensor,
    weight: Tensor,
    owner: Tensor | None = None,
    batch_last: bool = False,
    *,
    out: Tensor,
) -> None:
    """The checks of `writing` on fakes."""
    check_ks_mm(x, weight, batch_last, any_dtype=owner is not None)
    check_out(x, weight, batch_last, out)


def chain(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
    batch_last: bool = False,
    siblings: int = 1,
    owners: Sequence[Tensor] | None = None,
    in_float32: bool = False,
    out: Tensor | None = None,
    op: str = "ks_chain",
) -> Tensor:
    """A layer's result by its plan: see `ksopt.ops`.

    Args:
        out: where it is written: contiguous, aligned to 16 bytes, and apart from the operands; of
            their dtype.
        op: what errors call the operator.
    """
    around = (bias, residual, activation, batch_last, siblings)
    y = host_plans.run(x, weights, *around, owners, in_float32=in_float32, out=out)
    if y is not None:
        return y
    check_chain(op, weights, siblings, activation)
    if in_float32:
        check_result_in_float32(op, x, residual)
    if owners is not None and not are_alike(x, weights):
        with weight_scopes.owned_by_each(owners):
            return chain(x, cast(x, weights, owners, op), *around, None, in_float32, out, op)
    operands = Operands(x, tuple(weights), bias, residual)
    check = partial(chain_fake, x, weights, *around, None, in_float32, op)
    call = layer_plans.whole_call(operands, activation, batch_last, siblings, check, in_float32)
    if call is not None:
        with torch._C._AutoDispatchBelowADInplaceOrView():
            if owners is None:
                return call(x, operands.weights, bias, residual, out)
            with weight_scopes.owned_by_each(owners):
                return call(x, operands.weights, bias, residual, out)
    behind, within = partial(_behind, op), partial(_within, op)
    return by_factors(product, behind, x, weights, *around, owners, out, within, in_float32)


def are_alike(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether weights are of x's dtype."""
    return all(weight.dtype == x.dtype for weight in weights)


def cast(x: Tensor, weights: Sequence[Tensor], owners: Sequence[Tensor], op: str) -> list[Tensor]:
    """Weights in x's dtype; what was converted is cached with the owners.

    Args:
        x, weights, owners: see `ksopt.ops`.
        op: what errors call the operator.
    """
    for weight in weights:
        check_castable(op, x, weight)
    with weight_scopes.owned_by_each(owners):
        return [one if one.dtype == x.dtype else weight_cache.cast(one, x.dtype) for one in weights]


def chain_inner(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
    batch_last: bool = False,
    siblings: int = 1,
    owners: Sequence[Tensor] | None = None,
    in_float32: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """`chain` as graphs call it: weights without owners are not cached, as by `inner`."""
    around = (bias, residual, activation, batch_last, siblings)
    arguments = (x, weights, *around, owners, in_float32, out)
    if owners is not None:
        return chain(*arguments)
    with weight_scopes.repacked():
        return chain(*arguments)


def _within(
    op: str,
    x: Tensor,
    weight: Tensor,
    batch_last: bool,
    owner: Tensor | None,
    after: After,
    out: Tensor | None,
) -> Tensor | None:
    check_ks_mm(x, weight, batch_last)
    y = fake(x.to("meta"), weight.to("meta"), batch_last)
    check_epilogue(op, y, after.bias, after.activation, after.residual, batch_last)
    with torch._C._AutoDispatchBelowADInplaceOrView():
        if owner is None:
            return dispatch.run_within(x, weight, batch_last, after, out)
        with weight_scopes.owned_by(owner):
            return dispatch.run_within(x, weight, batch_last, after, out)


def _behind(
    op: str,
    y: Tensor,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    batch_last: bool,
) -> Tensor:
    check_epilogue(op, y, bias, activation, residual, batch_last)
    return add_epilogue_(y, bias, activation, residual, batch_last)


def chain_fake(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
    batch_last: bool = False,
    siblings: int = 1,
    owners: Sequence[Tensor] | None = None,
    in_float32: bool = False,
    op: str = "ks_chain",
) -> Tensor:
    """The shape and dtype of a `chain`'s result."""
    check_chain(op, weights, siblings, activation)
    if in_float32:
        check_result_in_float32(op, x, residual)
    around = (None, None, "none", batch_last, siblings, owners)
    y = by_factors(fake, add_epilogue_, x, weights, *around)
    check_epilogue(op, y, bias, activation, residual, batch_last)
    y = y.new_empty(shape_of_result(y, activation, batch_last)) if activation in GATES else y
    return epilogue.in_float32(y) if in_float32 else y


def chain_writing(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
    batch_last: bool = False,
    siblings: int = 1,
    owners: Sequence[Tensor] | None = None,
    in_float32: bool = False,
    *,
    out: Tensor,
) -> None:
    """Write the result of `chain_inner` into ``out``."""
    operands = (x, *weights, bias, residual)
    if torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (*operands, out)
    ):
        raise InvalidInputError(
            "ks_chain: no gradient is recorded of a product that is written into out, but an "
            "operand or out requires one: leave out away, or multiply under torch.no_grad()"
        )
    around = (bias, residual, activation, batch_last, siblings)
    arguments = (x, weights, *around, owners, in_float32)
    parts = parts_of_result(activation, siblings)
    holds = not in_float32 and _holds_result(out, x, weights, batch_last, parts)
    if holds and is_written_straight(out, *operands):
        chain_inner(*arguments, out)
    else:
        y = chain_inner(*arguments)
        check_chain_out(y, out)
        out.copy_(y)
    torch.autograd.graph.increment_version(out)


def _holds_result(
    out: Tensor, x: Tensor, weights: Sequence[Tensor], batch_last: bool, parts: int
) -> bool:
    """Whether a result has out's shape, dtype and device; others are refused elsewhere."""
    if not weights or weights[0].dim() != 4 or x.dim() == 0:
        return False
    a, b, _, d = weights[0].shape
    features = parts * a * b * d
    shape = (features, *x.shape[1:]) if batch_last else (*x.shape[:-1], features)
    return out.shape == shape and out.dtype == x.dtype and out.device == x.device


def chain_writing_fake(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
    batch_last: bool = False,
    siblings: int = 1,
    owners: Sequence[Tensor] | None = None,
    in_float32: bool = False,
    *,
    out: Tensor,
) -> None:
    """The checks of `chain_writing` on fakes."""
    around = (bias, residual, activation, batch_last, siblings)
    y = chain_fake(x, weights, *around, owners, in_float32)
    check_chain_out(y, out)


def decomposed(x: Tensor, weight: Tensor, batch_last: bool, owner: Tensor | None) -> Tensor:
    """`product` in torch's own operators, which all transforms know."""
    check_ks_mm(x, weight, batch_last, any_dtype=owner is not None)
    return ks_reference(x, weight.to(x.dtype), "batch_last" if batch_last else "batch_first")
