"""Elementwise functions of weights, one of which is zero outside a support: masks, torch.kron.

The result is zero outside the same support, and its elements there are computed from the operands'
elements there. So a trained matrix times a constant mask is a Kronecker-sparse weight whose
gradient is zero where the mask is, as in the author's code.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ksopt.compile.capture.diagonal_axes import Digit, digits_of, is_whole, same_value
from ksopt.compile.capture.index_map import (
    Atom,
    Atoms,
    IndexMap,
    NotNestedError,
    compose,
    expand,
    identity,
)
from ksopt.compile.capture.rule_table import rule
from ksopt.compile.capture.rules.structured_weight import on_support, support
from ksopt.compile.capture.symbolic import same_shape
from ksopt.compile.capture.tracker import Tracker
from ksopt.compile.capture.values import (
    Applied,
    Cast,
    Complement,
    Kind,
    Root,
    Structured,
    Unfollowed,
    View,
    Zero,
)

aten = torch.ops.aten

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"

_COMPARISONS: dict[Any, Callable[..., bool]] = {
    aten.ne: operator.ne,
    aten.eq: operator.eq,
    aten.gt: operator.gt,
    aten.ge: operator.ge,
    aten.lt: operator.lt,
    aten.le: operator.le,
    aten.logical_not: operator.not_,
    aten.bitwise_not: operator.not_,
}
"""Operators that turn a weight into booleans, as functions of a number."""

_MASK_MAKERS = {packet.__name__ for packet in _COMPARISONS} | {
    "bool",
    "inv",
    "invert",
    "to",
    "type",
}


def is_followed(node: fx.Node) -> bool:
    """Whether a node with a boolean result may create a mask that is followed."""
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return name.strip("_") in _MASK_MAKERS


@rule(aten.zeros, aten.zeros_like, aten.new_zeros)
def _zeros(
    tracker: Tracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> None:
    tracker.fresh(result, Kind.CONSTANT, Zero())


@rule(aten.scalar_tensor)
def _scalar_tensor(
    tracker: Tracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> None:
    tracker.fresh(result, Kind.CONSTANT, Zero() if args[0] == 0 else None)


@rule(*_COMPARISONS)
def _compare(
    tracker: Tracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> None:
    """A comparison that is true where a weight is zero, or where it is not."""
    source, more, packet = args[0], args[1:], func.overloadpacket
    view = tracker.view(source)
    numbers = all(isinstance(one, int | float) for one in more)
    if view.root.kind is Kind.ACTIVATION or result.dtype is not torch.bool or not numbers:
        return
    function = getattr(torch, packet.__name__)
    if not _COMPARISONS[packet](0, *more):
        note_applied(tracker, function, [source], result, more)
        return
    known = support(tracker, view.root)
    if known is None or view.map.offsets:
        return
    dims = compose(view.map, IndexMap(known.dims)).dims
    if is_whole(dims, known.dims):
        shape = known.weight.shape
        letters = _LETTERS[: len(shape)]
        pieces = (View(known.weight, identity(shape)),)
        origin = Applied(function, pieces, (letters,), letters, more)
        weight = tracker.root(shape, result.dtype, view.root.kind, origin)
        tracker.fresh(result, view.root.kind, Complement(weight, dims))


@rule(aten.masked_fill)
def _masked_fill(
    tracker: Tracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> None:
    source, mask, value = args
    if isinstance(value, int | float) and value == 0:
        note_applied(tracker, torch.masked_fill, [source, mask], result, (0.0,))


@rule(aten.where)
def _where(
    tracker: Tracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> None:
    if len(args) != 3 or not all(isinstance(one, Tensor) for one in args):
        return
    mask, value, other = args
    if _is_zero(tracker, other) and value.dtype == result.dtype:
        note_applied(tracker, torch.where, [mask, value], result, (0.0,))
    elif _is_zero(tracker, value) and other.dtype == result.dtype:
        note_applied(tracker, torch.masked_fill, [other, mask], result, (0.0,))


def _is_zero(tracker: Tracker, tensor: Tensor) -> bool:
    return isinstance(tracker.view(tensor).root.origin, Zero)


def note_applied(
    tracker: Tracker,
    function: Callable[..., Tensor],
    operands: Sequence[Tensor],
    result: Tensor,
    more: tuple[Any, ...] = (),
) -> bool:
    """Record an elementwise function that is zero wherever one of its operands is.

    Args:
        tracker: of the graph.
        function: of torch, called with the operands and then with ``more``.
        operands: of the function, broadcast to the result.
        result: of the function.
        more: further arguments, no tensors.

    Returns:
        False if none of the operands is known to be zero outside a support.
    """
    views = [tracker.view(operand) for operand in operands]
    kind = functools.reduce(operator.or_, (view.root.kind for view in views))
    if kind is Kind.ACTIVATION or not all(isinstance(s, int) and s > 0 for s in result.shape):
        return False
    try:
        compact = [_on_support(tracker, view) for view in views]
        known = [one or view for one, view in zip(compact, views, strict=True)]
        if not any(compact) or any(view.map.offsets for view in known):
            return _note_unfollowed(tracker, views, kind, result)
        is_structured = [one is not None for one in compact]
        spread = [expand(view.map, result.shape).dims for view in known]
        dims, number = same_value(digits_of(spread, result.shape), is_structured)
    except NotNestedError:
        return False
    every = [digit for group in dims for digit in group]
    if max(number.values(), default=0) >= len(_LETTERS):
        return False
    sizes = {number[digit]: digit.size for digit in every}
    pieces, letters = [], []
    for at, view in enumerate(known):
        atoms, own = _piece(every, number, at, is_structured[at])
        pieces.append(View(view.root, IndexMap(atoms)))
        letters.append(own)
    out = "".join(_LETTERS[at] for at in sizes)
    origin = Applied(function, tuple(pieces), tuple(letters), out, more)
    weight = tracker.root(tuple(sizes.values()), result.dtype, kind, origin)
    own_dims = tuple(tuple(Atom(number[d], d.size, 1) for d in group) for group in dims)
    tracker.fresh(result, kind, Structured(weight, own_dims))
    return True


def _piece(
    every: Sequence[Digit], number: dict[Digit, int], at: int, is_structured: bool
) -> tuple[tuple[Atoms, ...], str]:
    """An operand with one dim for each of its digits, and their letters."""
    dims: list[Atoms] = []
    letters = ""
    seen = set()
    for digit in every:
        atom = digit.of[at]
        if atom.axis is None or (is_structured and (atom.axis, atom.stride) in seen):
            continue
        seen.add((atom.axis, atom.stride))
        dims.append((atom,))
        letters += _LETTERS[number[digit]]
    return tuple(dims), letters


def _on_support(tracker: Tracker, view: View) -> View | None:
    """A weight restricted to its support, whether it is zero or true elsewhere."""
    complement = view.root.origin
    if not isinstance(complement, Complement):
        return on_support(tracker, view)
    if view.map.offsets or not tracker.records_like_now(view.root):
        return None
    dims = compose(view.map, IndexMap(complement.dims)).dims
    return View(complement.weight, IndexMap(dims)) if is_whole(dims, complement.dims) else None


def _note_unfollowed(tracker: Tracker, views: Sequence[View], kind: Kind, result: Tensor) -> bool:
    """Record why a mask is not followed, for products by the result."""
    if kind is not Kind.WEIGHT or result.dim() < 2 or tracker.node is None:
        return False
    for view in views:
        if same_shape(view.map.shape, result.shape):
            reason = _no_mask(tracker, view.root)
            if reason is not None:
                reason = f"its weight is masked at node {tracker.node.name} by {reason}"
                tracker.fresh(result, kind, Unfollowed(reason))
                return True
    return False


def _no_mask(tracker: Tracker, root: Root) -> str | None:
    """Description of a mask that is not followed; None if the root is no mask."""
    while isinstance(root.origin, Cast):
        root = root.origin.source
    node = root.producer
    if root.kind is not Kind.WEIGHT or node is None:
        return None
    if node.op != "placeholder":
        is_mask = root.dtype is torch.bool
        return f"what node {node.name} computes at each call" if is_mask else None
    frozen = tracker.frozen_pattern
    if len(root.shape) != 2 or support(tracker, root) is not None:
        return None
    if frozen is not None and frozen.has_zeros(node):
        return f"{node.name}, whose nonzero values are of no Kronecker-sparse pattern"
    return None
