"""Weights that are zero outside a support, by construction or by their values.

A product by such a weight is recognised by the elements on the support alone. Multiplications by
the zeros are left out: an infinity or a NaN in the input does not meet them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ksopt.compile.capture.contraction import is_sparse, right_is_weight
from ksopt.compile.capture.diagonal_axes import is_whole
from ksopt.compile.capture.index_map import Atom, IndexMap, NotNestedError, compose
from ksopt.compile.capture.rule_table import rule
from ksopt.compile.capture.symbolic import same, same_shape
from ksopt.compile.capture.tracker import Tracker
from ksopt.compile.capture.values import (
    Cast,
    Compact,
    Kind,
    Root,
    Stacked,
    Structured,
    Unfollowed,
    View,
)
from ksopt.patterns.chain import Pattern

aten = torch.ops.aten

Multiply = Callable[[View, View, bool], View | None]
"""(left, right, whether digits of the weight may be repeated) -> a view of the product, or None."""

UNFOLLOWED = "ksopt_unfollowed"
"""Key in a node's ``meta``: why a weight that is written in place there is not followed."""

_FAR = 200
"""Maximal number of nodes before a weight that are searched for a Kronecker-sparse matrix."""


@rule(aten.block_diag)
def _block_diag(
    tracker: Tracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> None:
    blocks: Sequence[Tensor] = args[0]
    views = [tracker.view(block) for block in blocks]
    if len(blocks) < 2 or any(view.root.kind is Kind.ACTIVATION for view in views):
        return
    if not all(same_shape(block.shape, blocks[0].shape) for block in blocks):
        tracker.fresh(result, Kind.WEIGHT, Unfollowed(_unequal(tracker)))
        return
    if blocks[0].dim() != 2 or not blocks[0].numel():
        return
    b, c = (int(size) for size in blocks[0].shape)
    shape = (len(blocks), b, c)
    weight = tracker.root(shape, blocks[0].dtype, Kind.WEIGHT, Stacked(tuple(views)))
    i, k, l = ((atom,) for atom in _atoms(shape))
    tracker.fresh(result, Kind.WEIGHT, Structured(weight, ((*i, *k), (*i, *l))))


def _unequal(tracker: Tracker) -> str:
    name = "" if tracker.node is None else f" at node {tracker.node.name}"
    return f"its weight is made{name} of blocks of unequal sizes"


@rule(aten.eye)
def _eye(
    tracker: Tracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> None:
    rows, columns = result.shape
    if isinstance(rows, int) and same(rows, columns) and rows > 1:
        root = tracker.fresh(result, Kind.CONSTANT).root
        tracker.structured[root] = _compact(tracker, root, Pattern(rows, 1, 1, 1))


@rule(aten.diag_embed)
def _diag_embed(
    tracker: Tracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> None:
    named = dict(zip(("self", "offset", "dim1", "dim2"), args, strict=False)) | kwargs
    view = tracker.view(args[0])
    if named.get("offset", 0) != 0 or view.root.kind is Kind.ACTIVATION or view.map.offsets:
        return
    if not all(isinstance(size, int) and size > 0 for size in result.shape):
        return
    rank = result.dim()
    both = {named.get("dim1", -2) % rank, named.get("dim2", -1) % rank}
    rest = iter(view.map.dims[:-1])
    dims = tuple(view.map.dims[-1] if dim in both else next(rest) for dim in range(rank))
    tracker.fresh(result, view.root.kind, Structured(view.root, dims))


def support(tracker: Tracker, root: Root) -> Structured | None:
    """A root's elements on its support, by construction or by its values; None if it has none."""
    if root not in tracker.structured:
        tracker.structured[root] = _support(tracker, root)
    known = tracker.structured[root]
    if known is None or tracker.records_like_now(root) or known.weight.producer is root.producer:
        return known
    return None  # gradients would flow through the elements on the support, but not through it


def _support(tracker: Tracker, root: Root) -> Structured | None:
    origin = root.origin
    if isinstance(origin, Structured):
        return origin
    if isinstance(origin, Cast):
        source = support(tracker, origin.source)
        if source is None:
            return None
        weight = source.weight
        # Computed at the author's cast.
        cast = Root(weight.shape, root.dtype, weight.kind, root.producer, Cast(weight))
        return Structured(cast, source.dims)
    if root.kind is not Kind.WEIGHT or len(root.shape) != 2 or tracker.frozen_pattern is None:
        return None
    node = None if root.holder is None else root.holder.node
    if node is None or node.op != "placeholder":
        return None
    pattern = tracker.frozen_pattern(node)
    return None if pattern is None else _compact(tracker, root, pattern)


def _compact(tracker: Tracker, matrix: Root, pattern: Pattern) -> Structured:
    origin = Compact(matrix, pattern)
    weight = tracker.root(pattern.weight_shape, matrix.dtype, matrix.kind, origin)
    i, k, l, j = ((atom,) if atom.size > 1 else () for atom in _atoms(pattern.weight_shape))
    return Structured(weight, ((*i, *k, *j), (*i, *l, *j)))


def _atoms(shape: Sequence[int]) -> list[Atom]:
    return [Atom(axis, size, 1) for axis, size in enumerate(shape)]


def on_support(tracker: Tracker, view: View) -> View | None:
    """A view of a weight as a view of its elements on the support, with repeated digits.

    Returns:
        None if it has no support.

    Raises:
        NotNestedError: it is a part of the weight, or its digits do not nest with the support's.
    """
    known = support(tracker, view.root)
    if known is None:
        return None
    if view.map.offsets:
        raise NotNestedError("only a part of it is read")
    dims = compose(view.map, IndexMap(known.dims)).dims
    if not is_whole(dims, known.dims):
        raise NotNestedError("only a part of it is read")
    return View(known.weight, IndexMap(dims))


def by_support(tracker: Tracker, left: View, right: View, multiply: Multiply) -> View | None:
    """A product by a weight, or by its elements on the support if it has one.

    Raises:
        NotNestedError: the digits of the operands do not nest.
    """
    roles = right_is_weight(left.root, right.root)
    if roles is None:
        return multiply(left, right, False)
    weight = right if roles else left
    flops, missed = _flops(tracker), len(tracker.trace.misses)
    reason = None
    try:
        compact = on_support(tracker, weight)
        if compact is not None:
            one, other = (left, compact) if roles else (compact, right)
            view = multiply(one, other, True)
            if view is not None:
                return view
    except NotNestedError as error:
        reason = f"its weight is zero but on a support that is not followed: {error}"
    if tracker.node is not None and flops is not None:
        tracker.trace.flops[tracker.node] = flops
    view = multiply(left, right, False)
    if view is not None and is_sparse(view):
        del tracker.trace.misses[missed:]
        return view
    reason = reason or _lost(tracker, weight.root)
    if reason is not None:
        tracker.miss(reason)
    return view


def _flops(tracker: Tracker) -> int | None:
    return None if tracker.node is None else tracker.trace.flops.get(tracker.node, 0)


def has_support(tracker: Tracker, view: View) -> bool:
    """Whether a weight is zero outside a support, or nearly is, so that the reason is reported."""
    root = view.root
    return support(tracker, root) is not None or _lost(tracker, root) is not None


def miss_support(tracker: Tracker, left: Root, right: Root) -> None:
    """Report a sum of elementwise products whose weight has a support that is not followed."""
    roles = right_is_weight(left, right)
    if roles is None:
        return
    weight = right if roles else left
    reason = _lost(tracker, weight)
    if support(tracker, weight) is not None:
        reason = "its weight is zero but on a support, which a sum of products is not followed for"
    if reason is not None:
        tracker.miss(reason)


def _lost(tracker: Tracker, root: Root) -> str | None:
    """Why a weight is not known to be zero outside a support, if it nearly is; else None."""
    if isinstance(root.origin, Unfollowed):
        return root.origin.reason
    if isinstance(root.origin, Cast):
        return _lost(tracker, root.origin.source)
    if tracker.structured.get(root) is not None and root.producer is not None:
        return f"its weight is made at node {root.producer.name}, where gradients are off"
    if root.producer is None or root.producer.op == "placeholder":
        return None
    if root not in tracker.lost:
        tracker.lost[root] = _lost_before(tracker, root.producer)
    return tracker.lost[root]


def _lost_before(tracker: Tracker, node: fx.Node) -> str | None:
    """The node at which a support is lost, among those that compute a weight, as a clause."""
    left, seen = [node], {node}
    while left and len(seen) < _FAR:
        one = left.pop(0)
        for other in one.all_input_nodes:
            view = tracker.trace.views.get(other)
            if other in seen or (view is not None and view.root.kind is Kind.ACTIVATION):
                continue
            seen.add(other)
            left.append(other)
            if UNFOLLOWED in other.meta:
                return str(other.meta[UNFOLLOWED])
            origin = None if view is None else view.root.origin
            if isinstance(origin, Unfollowed):
                return origin.reason
            if isinstance(origin, Structured) and _is_of_blocks(origin):
                return (
                    f"its weight is computed at node {one.name} from a Kronecker-sparse matrix, "
                    f"{other.name}, and is not Kronecker-sparse itself as far as can be followed"
                )
    return None


def _is_of_blocks(structured: Structured) -> bool:
    """Whether a structured tensor is a trained or stored matrix of more than a diagonal."""
    if structured.weight.kind is not Kind.WEIGHT:
        return False
    atoms = [atom for dim in structured.dims for atom in dim]
    return len(set(atoms)) < len(atoms) and any(atoms.count(atom) == 1 for atom in atoms)
