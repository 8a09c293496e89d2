"""``ks_chain``: a whole layer as one operator.

It is composed of ``ks_mm`` and torch's operations, so it supports all that they support: gradients
of any order, torch.compile, vmap and autocast; and a compiler fuses the operations behind the
products. Only where a kernel takes all of it, and no gradient is recorded, is it another operator,
``ks_chain_inner``, which runs the plan's launch. In compiled training a chain of two factors has an
autograd formula of its own where one launch computes its product, or several of its gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ksopt import epilogue
from ksopt.epilogue import with_epilogue
from ksopt.kernels import layer_plans, trained_chain
from ksopt.kernels.by_factors import by_factors
from ksopt.kernels.families.base import CHAIN_FAMILIES
from ksopt.kernels.operands import Operands, is_real
from ksopt.kernels.validation import check_chain, check_epilogue, check_result_in_float32
from ksopt.ops import implementation, trained
from ksopt.ops.eager import are_ordinary
from ksopt.ops.graph_inputs import cacheable_owners
from ksopt.ops.schemas import LIBRARY, define, ks_mm
from ksopt.ops.trained_chain import have_joint_gradients, trained_products

_ARGUMENTS = (
    "(Tensor x, Tensor[] weights, Tensor? bias=None, Tensor? residual=None, "
    'str activation="none", bool batch_last=False, int siblings=1, Tensor[]? owners=None, '
    "bool in_float32=False"
)


def chain(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
    batch_last: bool = False,
    siblings: int = 1,
    in_float32: bool = False,
    op: str = "ks_chain",
) -> Tensor:
    """`ks_chain`, without torch's dispatcher where that has nothing to do.

    Args:
        x, weights, bias, residual, activation, batch_last, siblings, in_float32: see `ksopt.ops`.
        op: what errors call it.
    """
    if are_ordinary(x, *weights, bias, residual):
        is_factor = siblings == 1 == len(weights) and bias is None is residual
        if is_factor and activation == "none" and not in_float32:  # no plan is to be chosen
            return implementation.product(x, weights[0], batch_last)
        around = (bias, residual, activation, batch_last, siblings)
        return implementation.chain(x, weights, *around, in_float32=in_float32, op=op)
    if CHAIN_FAMILIES and torch.compiler.is_compiling():
        # Dynamo's graph holds one node, and AOTAutograd its parts, or the kernel's operator.
        node: Tensor = torch.ops.ksopt.ks_chain(
            *(x, list(weights), bias, residual, activation, batch_last, siblings),
            **_casts(in_float32),
        )
        return node
    if not torch.compiler.is_compiling():
        if in_float32:
            check_result_in_float32(op, x, residual)
        y = trained.run(x, weights, bias, residual, activation, batch_last, siblings)
        if y is not None:
            return epilogue.in_float32(y) if in_float32 else y
    around = (bias, residual, activation, batch_last, siblings)
    return composed(x, weights, *around, None, in_float32, op)


def _casts(in_float32: bool) -> dict[str, bool]:
    """The argument, unless it is its default, which nodes of a graph leave out as a rule."""
    return {"in_float32": True} if in_float32 else {}


def composed(
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
    """``ks_chain`` composed of other operators; ``op`` is its name in errors."""
    check_chain(op, weights, siblings, activation)
    if in_float32:
        check_result_in_float32(op, x, residual)
    if is_cast_by_autocast(x, weights):
        x = x.to(trained.autocast_dtype(x.device.type))
        around = (
            cast_summand(bias, x),
            cast_summand(residual, x),
            activation,
            batch_last,
            siblings,
        )
        with torch._C._DisableAutocast():
            owners = weights if owners is None else owners
            return composed(x, weights, *around, owners, in_float32, op)
    weights, owners = cast_weights(x, weights, owners, op)
    if CHAIN_FAMILIES and not torch.compiler.is_dynamo_compiling():
        operands = Operands(x, tuple(weights), bias, residual)
        if not are_parts_seen(operands):
            ready, cacheable = for_one_launch(x, weights, owners)
            around = (bias, residual, activation, batch_last, siblings)
            check = partial(implementation.chain_fake, x, ready, *around, owners, in_float32, op)
            how = (activation, batch_last, siblings, check, cacheable is None, in_float32)
            if layer_plans.is_whole(replace(operands, weights=tuple(ready)), *how):
                casts = _casts(in_float32)
                whole: Tensor = ks_chain_inner(x, ready, *around, cacheable, **casts)
                return whole
        if siblings == 1 and not batch_last:
            trained_parts = _trained(x, weights, [] if bias is None else [bias], 1)
            if trained_parts is not None:
                y = _behind(op, trained_parts[0], None, activation, residual, batch_last)
                return epilogue.in_float32(y) if in_float32 else y
    around = (bias, residual, activation, batch_last, siblings)
    behind = partial(_behind, op)
    return by_factors(ks_mm, behind, x, weights, *around, owners, casts=in_float32)


def chain_siblings(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    siblings: int,
    owners: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """``ks_chain`` of each of several chains on one x, which training may compute together.

    Args:
        x, weights, siblings, owners: see `ksopt.ops`; batch first.
        biases: of each sibling; none for no bias.
    """
    length = len(weights) // siblings
    if is_cast_by_autocast(x, weights):
        x = x.to(trained.autocast_dtype(x.device.type))
        biases = [bias.to(x.dtype) for bias in biases]
        owners = weights if owners is None else owners
        with torch._C._DisableAutocast():
            return chain_siblings(x, weights, biases, siblings, owners)
    ready, _ = cast_weights(x, weights, owners, "ks_chain")
    if CHAIN_FAMILIES and not torch.compiler.is_dynamo_compiling():
        parts = _trained(x, ready, biases, siblings)
        if parts is not None:
            return parts
    return [
        composed(
            *(x, weights[at : at + length], biases[at // length] if biases else None),
            owners=None if owners is None else owners[at : at + length],
        )
        for at in range(0, len(weights), length)
    ]


def _trained(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], siblings: int
) -> list[Tensor] | None:
    """The results of chains that are trained, by an autograd formula of their own.

    None where a compiler traces none, or launches for each factor are faster in both passes.
    """
    if len(weights) != 2 * siblings or not are_trained(x, weights, biases):
        return None
    bias, of_launch = biases[0] if biases else None, 0
    for several in dict.fromkeys((siblings, 1)):
        if of_launch == 0 and trained_chain.is_one_launch(x, weights[: 2 * several], bias, several):
            of_launch = several
    if of_launch < siblings and not have_joint_gradients(x, weights, biases):
        return None
    return trained_products(x, weights, biases, of_launch)


def _behind(
    op: str,
    y: Tensor,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    batch_last: bool,
) -> Tensor:
    bias, residual = cast_summand(bias, y), cast_summand(residual, y)
    check_epilogue(op, y, bias, activation, residual, batch_last)
    return with_epilogue(y, bias, activation, residual, batch_last)


def is_cast_by_autocast(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether autocast casts the operands of this call; where not all, they are refused elsewhere.

    Then x is cast, and the weights beside their owners: so what they are cast to can be cached.
    """
    kind = x.device.type
    if trained.autocast_dtype(kind) is None or _is_transformed():
        return False
    return all(trained.is_cast(kind, one) for one in (x, *weights))


def cast_weights(
    x: Tensor, weights: Sequence[Tensor], owners: Sequence[Tensor] | None, op: str
) -> tuple[Sequence[Tensor], Sequence[Tensor] | None]:
    """Weights in x's dtype, if their owners were passed, and the owners.

    Some are left to the operators, which cast and cache them: traced ones, and those beside others
    that are trained.
    """
    if owners is None or implementation.are_alike(x, weights):
        return weights, owners
    if torch.is_grad_enabled() and any(one.requires_grad for one in (x, *weights)):
        are_trained = all(weight.requires_grad for weight in weights)
        return [one.to(x.dtype) for one in weights] if are_trained else weights, owners
    if not is_real(x):
        return weights, owners
    cast = implementation.cast(x, weights, owners, op)
    return cast, cast


def for_one_launch(
    x: Tensor, weights: Sequence[Tensor], owners: Sequence[Tensor] | None
) -> tuple[list[Tensor], list[Tensor] | None]:
    """Weights for a launch of all of them, and their cacheable owners, None if one has none.

    Beside these a traced weight may be of another dtype than x, if its owner was passed.
    """
    if owners is None and not implementation.are_alike(x, weights):
        return list(weights), None  # refused elsewhere
    cacheable = cacheable_owners(weights if owners is None else owners)
    if owners is None or cacheable is not None:
        return list(weights), cacheable
    return [weight.to(x.dtype) for weight in weights], None


def cast_summand(summand: Tensor | None, y: Tensor) -> Tensor | None:
    """A summand of y, cast to y's dtype under autocast; other dtypes are refused later."""
    if summand is None or summand.dtype == y.dtype:
        return summand
    return summand.to(y.dtype) if torch.is_autocast_enabled(y.device.type) else summand


def are_parts_seen(operands: Operands) -> bool:
    """Whether the parts of a layer must be visible: to gradients, transforms, lazy negation."""
    present = operands.present
    return (
        (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in present))
        or _is_watched_by_transforms()
        or any(tensor.is_neg() for tensor in present)
    )


def are_trained(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> bool:
    """Whether a compiler traces chains of two factors that are all trained."""
    present = [x, *weights, *biases]
    return (
        torch.is_grad_enabled()
        and not is_real(x)
        and all(weight.requires_grad and weight.dim() == 4 for weight in weights)
        and all(tensor.dtype == x.dtype for tensor in present)
        and all(_is_of_outputs(bias, weights[0]) for bias in biases)
        and not _is_watched_by_transforms()
        and not any(tensor.is_neg() for tensor in present)
    )


def _is_of_outputs(bias: Tensor, left: Tensor) -> bool:
    """Whether a bias has one value for each output; another is refused elsewhere, in words."""
    a, b, _, d = left.shape
    return bias.dim() == 1 and bool(bias.shape[0] == a * b * d)


def _is_watched_by_transforms() -> bool:
    return _is_transformed() or torch._C._is_any_autocast_enabled()


def _is_transformed() -> bool:
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


LIBRARY.define(f"ks_chain{_ARGUMENTS}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.impl("ks_chain", composed, "CompositeImplicitAutograd")
define(
    ("ks_chain_inner",),
    f"{_ARGUMENTS}) -> Tensor",
    implementation.chain_inner,
    implementation.chain_fake,
)
define(
    ("ks_chain.out",),
    f"{_ARGUMENTS}, *, Tensor(a!) out) -> ()",
    implementation.chain_writing,
    implementation.chain_writing_fake,
)

LIBRARY.define(
    "ks_chain_siblings(Tensor x, Tensor[] weights, Tensor[] biases, int siblings, "
    "Tensor[]? owners=None) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.impl("ks_chain_siblings", chain_siblings, "CompositeImplicitAutograd")

ks_chain = torch.ops.ksopt.ks_chain.default
ks_chain_siblings = torch.ops.ksopt.ks_chain_siblings.default
ks_chain_out = torch.ops.ksopt.ks_chain.out
ks_chain_inner = torch.ops.ksopt.ks_chain_inner.default
