"""ATen operators that multiply, described by the variables of a product.

mm, bmm, addmm, baddbmm, convolutions with kernels of size 1, multiplications that are summed
afterwards, and ksopt's own operator.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ksopt import ops
from ksopt.compile.capture.contraction import (
    DTYPES,
    Dims,
    contraction,
    count_flops,
    digit_of,
    is_sparse,
    left_only,
    note_biased,
    of_one_dtype,
    offered,
    right_is_weight,
    right_only,
    tied,
)
from ksopt.compile.capture.index_map import Atom, Atoms, IndexMap, compose, regroup
from ksopt.compile.capture.rule_table import call_rule, rule
from ksopt.compile.capture.rules.mask import note_applied
from ksopt.compile.capture.rules.structured_weight import by_support, has_support, miss_support
from ksopt.compile.capture.symbolic import Size, plain, same, same_shape
from ksopt.compile.capture.tracker import Tracker
from ksopt.compile.capture.values import Kind, Multiplied, Native, Variable, View
from ksopt.patterns.chain import Chain, Pattern

assert ops  # registers ksopt's operators

aten = torch.ops.aten


@rule(aten.mm, aten.bmm)
def _mm(
    tracker: Tracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> None:
    if len(args) == 2:  # a third argument is another dtype for the result
        view = matrix_product(tracker, args[0], args[1], result)
        if view is not None:
            tracker.note(result, view)


@rule(aten.addmm, aten.baddbmm)
def _addmm(
    tracker: Tracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> None:
    view = matrix_product(tracker, args[1], args[2], result)
    if view is None or len(args) != 3:
        return
    if kwargs.get("beta", 1) != 1 or kwargs.get("alpha", 1) != 1:
        if is_sparse(view):
            tracker.miss(f"{func.overloadpacket} scales the product or the bias")
        return
    note_biased(tracker, view, args[0], result)


@rule(aten.convolution)
def _convolution(
    tracker: Tracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> None:
    x, weight, bias, stride, padding, _, transposed, _, groups = args
    ones = all(same(size, 1) for size in weight.shape[2:])
    if not ones or transposed or any(q != 1 for q in stride) or any(p != 0 for p in padding):
        return
    # x: [B, g c, *S], weight: [g o, c, *1] -> result: [B, g o, *S]
    a, w = tracker.view(x), tracker.view(weight)
    x_groups, x_channels = regroup(a.map.dims[1], (groups, x.shape[1] // groups))
    w_groups, w_channels = regroup(w.map.dims[0], (groups, weight.shape[0] // groups))
    shared = tied(x_groups, w_groups)
    summed = tied(x_channels, w.map.dims[1], summed=True)
    dims = [
        left_only(a.map.dims[0]),
        [*shared, *right_only(w_channels)],
        *map(left_only, a.map.dims[2:]),
    ]
    view = offered(tracker, a.root, w.root, dims, summed, result)
    if view is None:
        return
    if bias is None:
        tracker.note(result, view)
        return
    # The bias is broadcast along all dims but the channels.
    biases = tracker.view(bias)
    spread = IndexMap((biases.map.dims[0], *((),) * (result.dim() - 2)), biases.map.offsets)
    note_biased(tracker, view, View(biases.root, spread), result)


@rule(aten.mul)
def _mul(
    tracker: Tracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> None:
    if _is_one(args[1]) and _is_mapped(tracker) and args[0].dtype == result.dtype:
        tracker.note(result, tracker.view(args[0]))  # torch's rule for linear scales its bias so
        return
    multiplied(tracker, args[0], args[1], result)


@rule(aten.add)
def _add(
    tracker: Tracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> None:
    """A bias inside a vmap, where no node holds the product alone; elsewhere the sum stays.

    Under autocast the product may be of 16 bits and the bias, and so the sum, of 32.
    """
    both = all(isinstance(one, Tensor) for one in args) and len(args) == 2
    if not both or not _is_mapped(tracker) or not _is_one(kwargs.get("alpha", 1)):
        return
    for product, bias in (args, args[::-1]):
        view = tracker.view(product)
        is_bias = tracker.view(bias).root.kind is not Kind.ACTIVATION
        is_whole = same_shape(product.shape, result.shape)
        alike = tracker.records_like_now(view.root)
        if is_bias and is_whole and alike and contraction(view) is not None:
            note_biased(tracker, view, bias, result)
            return


def _is_mapped(tracker: Tracker) -> bool:
    """Whether a node inside a vmap is running."""
    return tracker.node is not None and tracker.trace.regions[tracker.node].vmap_depth > 0


def _is_one(value: Any) -> bool:
    return isinstance(value, int | float) and value == 1


def multiplied(tracker: Tracker, left: Any, right: Any, result: Tensor) -> None:
    """Record an elementwise product of two tensors, or of a tensor and a number."""
    both = [one for one in (left, right) if isinstance(one, Tensor)]
    views = [tracker.view(one) for one in both]
    kind = functools.reduce(operator.or_, (view.root.kind for view in views))
    if (
        len(both) < 2
        or right_is_weight(*(view.root for view in views)) is None
        or result.dtype not in DTYPES
        or left.dtype != right.dtype
    ):
        number = () if len(both) == 2 else (right if both[0] is left else left,)
        is_scaled = all(isinstance(one, int | float) and math.isfinite(one) for one in number)
        if not is_scaled or not note_applied(tracker, torch.mul, both, result, number):
            tracker.fresh(result, kind)
        return
    variables: list[Variable] = []
    dims: list[tuple[int, ...]] = []
    for dim, size in enumerate(result.shape):
        ours, theirs = (
            _broadcast(view.map, one, result, dim, size)
            for view, one in zip(views, both, strict=True)
        )
        digits = tied(ours, theirs)
        dims.append(tuple(range(len(variables), len(variables) + len(digits))))
        variables += digits
    origin = Multiplied(views[0].root, views[1].root, tuple(variables), tuple(dims))
    tracker.fresh(result, kind, origin)


@rule(aten.sum)
def _sum(
    tracker: Tracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> None:
    view = tracker.view(args[0])
    origin = view.root.origin
    if not isinstance(origin, Multiplied) or len(args) < 2 or args[0].dtype != result.dtype:
        return
    if not tracker.records_like_now(view.root):
        if any(v.left and v.right for v in origin.variables):
            tracker.miss("gradients are switched on or off between the products and their sum")
        return
    rank = args[0].dim()
    over = {dim % rank for dim in (args[1] or range(rank))}
    keep = bool(args[2]) if len(args) > 2 else False
    # The dims of the multiplied tensor as digits of its variables.
    inner = IndexMap(
        tuple(tuple(Atom(at, origin.variables[at].size, 1) for at in dim) for dim in origin.dims)
    )
    digits = compose(view.map, inner)
    dims: Dims = []
    summed: list[Variable] = []
    for dim, atoms in enumerate(digits.dims):
        variables = [digit_of(origin.variables, atom, dim in over) for atom in atoms]
        if dim not in over:
            dims.append(variables)
        else:
            summed += variables
            if keep:
                dims.append([])
    product_view = offered(tracker, origin.left, origin.right, dims, summed, result)
    if product_view is None or not is_sparse(product_view):
        miss_support(tracker, origin.left, origin.right)
    if product_view is not None:
        tracker.note(result, product_view)


@rule(
    torch.ops.ksopt.ks_mm,
    torch.ops.ksopt.ks_mm_inner,
    torch.ops.ksopt.ks_mm_repacked,
    torch.ops.ksopt.ks_mm_frozen,
)
def _ks_mm(
    tracker: Tracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> None:
    x, weight = args[:2]
    kind = tracker.view(x).root.kind | tracker.view(weight).root.kind
    batch_last = bool(args[2] if len(args) > 2 else kwargs.get("batch_last", False))
    pattern = Pattern(*(int(size) for size in weight.shape))
    origin = Native(tracker.view(x), Chain((pattern,)), batch_last)
    tracker.trace.natives.append(tracker.fresh(result, kind, origin).root)
    a, b, _, d = weight.shape
    count_flops(tracker, [weight.numel()], [result.numel() // (a * b * d)])


@rule(torch.ops.ksopt.ks_chain_inner)
def _ks_chain(
    tracker: Tracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> None:
    """A layer that one launch computes; other layers are captured as separate products."""
    x, weights, *rest = args
    named = dict(zip(_AROUND, rest, strict=False)) | kwargs
    batch_last, siblings = bool(named.get("batch_last")), int(named.get("siblings", 1))
    own = weights[: len(weights) // siblings]
    chain = Chain(tuple(Pattern(*(int(size) for size in weight.shape)) for weight in own))
    kinds = [tracker.view(tensor).root.kind for tensor in (x, *weights)]
    kind = functools.reduce(operator.or_, kinds)
    origin = Native(tracker.view(x), chain, batch_last, siblings, named.get("activation", "none"))
    tracker.trace.natives.append(tracker.fresh(result, kind, origin).root)
    rows = result.numel() // origin.out_features
    for weight in weights:
        count_flops(tracker, [weight.numel()], [rows])


_AROUND = ("bias", "residual", "activation", "batch_last", "siblings")


def matrix_product(tracker: Tracker, left: Tensor, right: Tensor, result: Tensor) -> View | None:
    """The result of mm or bmm as a view of a Kronecker-sparse product, or None."""

    def multiply(a: View, b: View, repeats: bool) -> View | None:
        shared = tied(a.map.dims[0], b.map.dims[0]) if left.dim() == 3 else []
        summed = tied(a.map.dims[-1], b.map.dims[-2], summed=True)
        dims = [left_only(a.map.dims[-2]), right_only(b.map.dims[-1])]
        if left.dim() == 3:
            dims.insert(0, shared)
        return offered(tracker, a.root, b.root, dims, summed, result, repeats)

    return by_support(tracker, tracker.view(left), tracker.view(right), multiply)


def dense_layer(
    tracker: Tracker, x: Tensor, weight: Tensor, bias: Tensor | None, result: Tensor
) -> bool:
    """Record F.linear of a dense weight; False if the weight may have a support."""
    a, w = tracker.view(x), tracker.view(weight)
    if right_is_weight(a.root, w.root) is not True or weight.dim() != 2 or has_support(tracker, w):
        return False
    dims = [*map(left_only, a.map.dims[:-1]), right_only(w.map.dims[0])]
    summed = tied(a.map.dims[-1], w.map.dims[1], summed=True)
    view = offered(tracker, a.root, w.root, dims, summed, result)
    if view is None:
        tracker.fresh(result, Kind.ACTIVATION)
    elif bias is None:
        tracker.note(result, view)
    else:
        note_biased(tracker, view, bias, result)
    return True


def _broadcast(
    index_map: IndexMap, argument: Tensor, result: Tensor, dim: int, size: Size
) -> Atoms:
    own = dim - (result.dim() - argument.dim())
    if own < 0 or (same(argument.shape[own], 1) and not same(size, 1)):
        return (Atom(None, plain(size), 0),)
    return index_map.dims[own]


@call_rule("mul", torch.mul, operator.mul)
def _mul_call(
    tracker: Tracker, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> bool:
    if kwargs or len(args) != 2:
        return False
    multiplied(tracker, args[0], args[1], result)
    return True


@call_rule(F.linear, torch._C._nn.linear, casts=True)
def _linear_call(
    tracker: Tracker, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> bool:
    x, weight, bias = (*args, *(kwargs.get(name) for name in ("bias",)), None)[:3]
    return len(args) >= 2 and dense_layer(tracker, x, weight, bias, result)


@call_rule(torch.bmm, torch.mm, torch.matmul, operator.matmul, casts=True)
def _bmm_call(
    tracker: Tracker, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> bool:
    if kwargs or len(args) != 2 or not of_one_dtype(*args, result):
        return False
    left, right = args
    if left.dim() != right.dim() or left.dim() not in (2, 3):
        return False
    if left.dim() == 3 and not same(left.shape[0], right.shape[0]):
        return False
    view = matrix_product(tracker, left, right, result)
    if view is None:
        kind = tracker.view(left).root.kind | tracker.view(right).root.kind
        tracker.fresh(result, kind)
    else:
        tracker.note(result, view)
    return True
