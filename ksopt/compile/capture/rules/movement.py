"""Operators that only move elements: views, permutations, reshapes, repetitions, casts."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ksopt.compile.capture.index_map import (
    IndexMap,
    compose,
    expand,
    identity,
    narrow,
    permute,
    reshape,
)
from ksopt.compile.capture.rule_table import call_rule, rule
from ksopt.compile.capture.symbolic import Size, plain, same_shape
from ksopt.compile.capture.tracker import Tracker
from ksopt.compile.capture.values import Kind, Piece, View
from ksopt.kernels.operands import size_hint

aten = torch.ops.aten


@rule(
    aten.view,
    aten._unsafe_view,
    aten.reshape,
    aten._reshape_alias,
    aten.view_copy,
    aten.unsqueeze,
    aten.unsqueeze_,
    aten.squeeze,
    aten.squeeze_,
)
def _reshape(
    tracker: Tracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> None:
    if func is aten.view.dtype:
        return
    requested = args[1] if len(args) > 1 and isinstance(args[1], Sequence) else result.shape
    reshaped(tracker, args[0], requested, result)


def reshaped(tracker: Tracker, source: Tensor, requested: Sequence[Size], result: Tensor) -> None:
    """Record that a result is a source with another shape; ``requested`` is the shape argument.

    Raises:
        NotNestedError: the sizes do not nest.
        FixedSizeNeeded: a symbolic number of features is split into fixed ones.
    """
    if _splits_features(source, requested):
        tracker.fix(source.shape[-1])
    shape = [plain(size) for size in result.shape]
    tracker.moved(result, source, reshape(tracker.view(source).map, shape))


def _splits_features(source: Tensor, requested: Sequence[Size]) -> bool:
    """Whether a last dim that is symbolic (dynamic=True) is split into dims of fixed sizes."""
    last = plain(source.shape[-1]) if source.dim() else 1
    if isinstance(last, int) or not source.dtype.is_floating_point:
        return False
    fixed = 1
    for size in reversed(requested):
        if not isinstance(plain(size), int) or size < 0:
            break
        fixed *= int(size)
        if fixed == size_hint(last):
            return fixed > 1
    return False


@rule(aten.permute)
def _permute(
    tracker: Tracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> None:
    order = [dim % max(1, result.dim()) for dim in args[1]]
    tracker.moved(result, args[0], permute(tracker.view(args[0]).map, order))


@rule(aten.transpose, aten.transpose_, aten.t, aten.t_)
def _transpose(
    tracker: Tracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> None:
    order = list(range(result.dim()))
    if result.dim() > 0:
        one, other = args[1:] if len(args) == 3 else (0, -1)
        order[one], order[other] = order[other], order[one]
    tracker.moved(result, args[0], permute(tracker.view(args[0]).map, order))


@rule(aten.clone, aten.contiguous, aten.alias)
def _same(
    tracker: Tracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> None:
    # Not detach: it has the same elements, but gradients end there.
    tracker.moved(result, args[0], tracker.view(args[0]).map)


@rule(aten.detach)
def _detach(
    tracker: Tracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> None:
    if tracker.view(args[0]).root.kind is Kind.CONSTANT:  # no gradient ends here
        tracker.moved(result, args[0], tracker.view(args[0]).map)


@rule(aten.lift_fresh)
def _lift_fresh(
    tracker: Tracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> None:
    if tracker.knows(args[0]):
        tracker.moved(result, args[0], tracker.view(args[0]).map)
    else:
        tracker.fresh(
            result, Kind.CONSTANT
        )  # torch.tensor of numbers: not the result of an operator


@rule(aten.expand)
def _expand(
    tracker: Tracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> None:
    tracker.moved(result, args[0], expand(tracker.view(args[0]).map, result.shape))


@rule(aten._to_copy)
def _to_copy(
    tracker: Tracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> None:
    source: Tensor = args[0]
    if source.device != result.device:
        return
    view = tracker.view(source)
    if source.dtype == result.dtype:
        tracker.moved(result, source, view.map)
    elif result.dtype.is_floating_point and (
        source.dtype.is_floating_point or view.root.kind is not Kind.ACTIVATION
    ):
        tracker.note(result, View(tracker.cast(view.root, result.dtype), view.map))


@rule(aten.select)
def _select(
    tracker: Tracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> None:
    source, dim, index = args
    if not isinstance(index, int) or not isinstance(source.shape[dim], int):
        return
    dim %= source.dim()
    one = narrow(identity(source.shape), dim, index % source.shape[dim], 1)
    _piece(tracker, source, one, result)


@rule(aten.slice)
def _slice(
    tracker: Tracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> None:
    operands = [*args, *(0, None, None, 1)[len(args) - 1 :]]
    sliced(tracker, operands[0], operands[1], operands[2], operands[4], result)


def sliced(
    tracker: Tracker, source: Tensor, dim: int, start: Any, step: Any, result: Tensor
) -> None:
    """Record that a result is every step-th of a source's elements along a dim, from ``start``.

    Raises:
        NotNestedError: they begin or end in the middle of a digit.
        FixedSizeNeeded: every step-th feature is taken, of a symbolic number.
    """
    size = plain(source.shape[dim])
    if same_shape(source.shape, result.shape):
        tracker.moved(result, source, tracker.view(source).map)
    elif step != 1 and not isinstance(size, int) and dim % source.dim() == source.dim() - 1:
        tracker.fix(size)  # every step-th feature
    elif not isinstance(size, int) and isinstance(start or 0, int) and (start or 0) >= 0:
        _narrowed(tracker, source, dim % source.dim(), start or 0, result, step)
    elif all(isinstance(known, int) for known in (size, step, start or 0)):
        first = 0 if start is None else max(0, start + size if start < 0 else min(start, size))
        _narrowed(tracker, source, dim % source.dim(), first, result, step)


@rule(aten.split, aten.split_with_sizes, aten.unbind)
def _split(
    tracker: Tracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> None:
    source: Tensor = args[0]
    dim_at = 1 if func.overloadpacket is aten.unbind else 2
    dim = (args[dim_at] if len(args) > dim_at else kwargs.get("dim", 0)) % source.dim()
    start = 0
    for piece in result:
        length = 1 if dim_at == 1 else piece.shape[dim]
        if not isinstance(length, int):
            if dim == source.dim() - 1 and source.dtype.is_floating_point:
                tracker.fix(source.shape[dim])  # features, not a batch
            return
        _narrowed(tracker, source, dim, start, piece)
        start += length


def _narrowed(
    tracker: Tracker, source: Tensor, dim: int, start: int, result: Tensor, step: int = 1
) -> None:
    length = plain(result.shape[dim]) if result.dim() == source.dim() else 1
    if isinstance(length, int) and length > 0:
        _piece(tracker, source, narrow(identity(source.shape), dim, start, length, step), result)


def _piece(tracker: Tracker, source: Tensor, part: IndexMap, result: Tensor) -> None:
    """Record a part as a root of its own; its origin matters only if the parts are joined."""
    if result.dim() < source.dim():
        part = reshape(part, result.shape)
    view = tracker.view(source)
    origin = Piece(View(view.root, compose(part, view.map)))
    alike = tracker.records_like_now(view.root)
    tracker.fresh(result, view.root.kind, origin if alike else None)


@call_rule("view", "reshape")
def _reshape_call(
    tracker: Tracker, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> bool:
    if kwargs or any(isinstance(argument, torch.dtype) for argument in args):
        return False
    sizes = args[1] if len(args) == 2 and isinstance(args[1], tuple | list) else args[1:]
    reshaped(tracker, args[0], sizes, result)
    return True


@call_rule("flatten", "unflatten", "unsqueeze", "squeeze")
@call_rule(torch.flatten, torch.unflatten, torch.unsqueeze, torch.squeeze)
def _restructured_call(
    tracker: Tracker, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> bool:
    reshaped(tracker, args[0], result.shape, result)
    return True


@call_rule("permute", torch.permute)
def _permute_call(
    tracker: Tracker, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> bool:
    order = args[1] if len(args) == 2 and isinstance(args[1], tuple | list) else args[1:]
    if kwargs or len(order) != result.dim():
        return False
    order = [dim % result.dim() for dim in order]
    tracker.moved(result, args[0], permute(tracker.view(args[0]).map, order))
    return True


@call_rule("transpose", torch.transpose)
def _transpose_call(
    tracker: Tracker, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> bool:
    if kwargs or len(args) != 3:
        return False
    order = list(range(result.dim()))
    one, other = args[1:]
    order[one], order[other] = order[other], order[one]
    tracker.moved(result, args[0], permute(tracker.view(args[0]).map, order))
    return True


@call_rule("contiguous")
def _contiguous_call(
    tracker: Tracker, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> bool:
    tracker.moved(result, args[0], tracker.view(args[0]).map)
    return True


@call_rule("expand")
def _expand_call(
    tracker: Tracker, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> bool:
    tracker.moved(result, args[0], expand(tracker.view(args[0]).map, result.shape))
    return True


@call_rule(F.dropout)
def _dropout_call(
    tracker: Tracker, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> bool:
    _, p, training, in_place = (*args, *(None,) * 4)[:4]
    training = kwargs.get("training", True if training is None else training)
    if not isinstance(training, bool) or in_place or kwargs.get("inplace") or p is None:
        return False
    if training:
        tracker.fresh(result, tracker.view(args[0]).root.kind)
    else:
        tracker.moved(result, args[0], tracker.view(args[0]).map)
    return True


@call_rule(operator.getitem)
def _getitem_call(
    tracker: Tracker, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> bool:
    source, index = args
    parts = list(index) if isinstance(index, tuple) else [index]
    if all(part is None or part is ... or _is_whole(part) for part in parts):
        reshaped(tracker, source, result.shape, result)  # new dims of size 1
        return True
    if parts.count(...) > 1 or not all(part is ... or isinstance(part, slice) for part in parts):
        return False
    at = parts.index(...) if ... in parts else len(parts)
    parts[at : at + 1] = [slice(None)] * (source.dim() - len(parts) + (... in parts))
    cuts = [(dim, part) for dim, part in enumerate(parts) if part != slice(None)]
    if len(cuts) != 1:
        return False
    dim, part = cuts[0]
    tracker.fresh(result, tracker.view(source).root.kind)
    sliced(tracker, source, dim, part.start, 1 if part.step is None else part.step, result)
    return True


def _is_whole(part: Any) -> bool:
    return isinstance(part, slice) and part == slice(None)
