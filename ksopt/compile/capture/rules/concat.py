"""Concatenations and stacks of products: a loop over blocks is one factor.

An author may split the input, multiply each piece by a small weight of its own and put the results
side by side. The pieces are products of one form; together they are one product with one more
variable, the index of the piece.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ksopt.compile.capture.contraction import (
    biased,
    contraction,
    digit_of,
    left_only,
    need_fixed,
    new_product,
    right_only,
    tied,
)
from ksopt.compile.capture.index_map import (
    Atom,
    Atoms,
    IndexMap,
    compose,
    identity,
    regroup,
    same_atoms,
)
from ksopt.compile.capture.recognize import NotKroneckerSparseError
from ksopt.compile.capture.rule_table import call_rule, rule
from ksopt.compile.capture.symbolic import product, same, same_shape
from ksopt.compile.capture.tracker import Tracker
from ksopt.compile.capture.values import (
    Biased,
    Cast,
    Contraction,
    Factor,
    Kind,
    Piece,
    Root,
    Stacked,
    Variable,
    View,
)

aten = torch.ops.aten


@rule(aten.cat)
def _cat(
    tracker: Tracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> None:
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % result.dim()

    def placed(atoms: tuple[Atoms, ...]) -> tuple[Atoms, ...]:
        which, rest = atoms[0], list(atoms[1:])
        both = (*which, *rest[dim])
        rest[dim] = regroup(both, (product(atom.size for atom in both),))[0]
        return tuple(rest)

    _note(tracker, args[0], placed, result)


@rule(aten.stack)
def _stack(
    tracker: Tracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> None:
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % result.dim()

    def placed(atoms: tuple[Atoms, ...]) -> tuple[Atoms, ...]:
        rest = list(atoms[1:])
        rest.insert(dim, atoms[0])
        return tuple(rest)

    _note(tracker, args[0], placed, result)


def _note(
    tracker: Tracker,
    tensors: Sequence[Tensor],
    placed: Callable[[tuple[Atoms, ...]], tuple[Atoms, ...]],
    result: Tensor,
) -> None:
    views = [tracker.view(tensor) for tensor in tensors]
    if len(views) < 2 or any(contraction(view) is None for view in views):
        return
    joined, reason = None, "they are of different forms"
    if not all(tracker.records_like_now(root) for view in views for root in _taken_over(view)):
        reason = "gradients are switched on or off between them"
    elif all(same_shape(tensor.shape, tensors[0].shape) for tensor in tensors):
        try:
            joined = side_by_side(tracker, views)
        except NotKroneckerSparseError as error:
            reason = str(error)
    else:
        reason = "they are of unequal sizes"
    if joined is None:
        if _are_of_pieces(views):
            tracker.miss(f"the products of pieces of one input are not one product: {reason}")
        return
    tracker.note(result, View(joined.root, replace(joined.map, dims=placed(joined.map.dims))))
    stamp = tracker.stamp(result)
    joined.root.storage = stamp
    if isinstance(joined.root.origin, Biased):
        joined.root.origin.product.root.storage = stamp


def _taken_over(view: View) -> Iterator[Root]:
    """The roots that are no longer computed after pieces of one form become one product."""
    root, origin = view.root, view.root.origin
    if isinstance(origin, Contraction):
        yield from (root, *_taken_over(_all_of(origin.x)), *_taken_over(_all_of(origin.weight)))
    elif isinstance(origin, Biased):
        yield from (root, *_taken_over(origin.product), *_taken_over(origin.bias))
    elif isinstance(origin, Cast):
        yield from (root, *_taken_over(_all_of(origin.source)))
    elif isinstance(origin, Piece):
        yield from (root, *_taken_over(origin.of))


def _all_of(root: Root) -> View:
    return View(root, identity(root.shape))


def _are_of_pieces(views: Sequence[View]) -> bool:
    """Whether views are of products of different pieces of one tensor."""
    read = [product.x.origin for view in views if (product := contraction(view)) is not None]
    pieces = [one.source.origin if isinstance(one, Cast) else one for one in read]
    starts = {(p.of.root, p.of.map.offsets) for p in pieces if isinstance(p, Piece)}
    return len(starts) == len(views) and len({root for root, _ in starts}) == 1


def side_by_side(tracker: Tracker, views: Sequence[View]) -> View | None:
    """Views of one form stacked along a new first dim, as one view; None if there is none.

    Raises:
        NotKroneckerSparseError: they are products, but not one Kronecker-sparse product.
        NotNestedError: the pieces do not nest.
    """
    origins = [view.root.origin for view in views]
    if all(isinstance(origin, Piece) for origin in origins):
        return _of_one_root(views)
    if not _same_maps([view.map for view in views]):
        return None
    first = views[0].map
    if all(isinstance(origin, Biased) for origin in origins):
        return _biased(tracker, views)
    if all(isinstance(origin, Contraction) for origin in origins):
        return _contractions(tracker, views)
    if len({view.root for view in views}) < len(views):
        return None
    if all(isinstance(origin, Cast) for origin in origins):
        return _casts(tracker, views)
    if any(view.root.kind is Kind.ACTIVATION for view in views):
        return None
    roots = [view.root for view in views]
    one = roots[0]
    if not all(r.dtype == one.dtype and same_shape(r.shape, one.shape) for r in roots):
        return None
    pieces = tuple(View(root, identity(root.shape)) for root in roots)
    shape = (len(roots), *roots[0].shape)
    stack = tracker.root(shape, roots[0].dtype, Kind.WEIGHT, Stacked(pieces))
    shifted = (_shifted(atoms) for atoms in first.dims)
    return View(stack, IndexMap(((Atom(0, len(roots), 1),), *shifted)))


def _of_one_root(views: Sequence[View]) -> View | None:
    """Pieces of one root that start at equal distances."""
    whole = list(views)
    while len({view.root for view in whole}) > 1:
        origins = [view.root.origin for view in whole]
        whole = [
            View(origin.of.root, compose(view.map, origin.of.map))
            for view, origin in zip(whole, origins, strict=True)
            if isinstance(origin, Piece)
        ]
        if len(whole) != len(views):
            return None
    if not _same_maps([view.map for view in whole], with_offsets=False):
        return None
    starts = [dict(view.map.offsets) for view in whole]
    moving = [axis for axis in starts[-1] if starts[-1][axis] != starts[0].get(axis, 0)]
    if len(moving) != 1:
        return None
    (axis,) = moving
    step = starts[1].get(axis, 0) - starts[0].get(axis, 0)
    for place, start in enumerate(starts):
        expected = {**starts[0], axis: starts[0].get(axis, 0) + place * step}
        if step <= 0 or {k: v for k, v in expected.items() if v} != start:
            return None
    which = (Atom(axis, len(views), step),)
    return View(whole[0].root, IndexMap((which, *whole[0].map.dims), whole[0].map.offsets))


def _biased(tracker: Tracker, views: Sequence[View]) -> View | None:
    products: list[View] = []
    biases: list[View] = []
    for view in views:
        origin = view.root.origin
        assert isinstance(origin, Biased)
        for part, parts in ((origin.product, products), (origin.bias, biases)):
            parts.append(View(part.root, compose(view.map, part.map)))
    whole, bias = side_by_side(tracker, products), side_by_side(tracker, biases)
    if whole is None or bias is None:
        return None
    return biased(tracker, whole, bias, None)


def _casts(tracker: Tracker, views: Sequence[View]) -> View | None:
    sources = []
    for view in views:
        assert isinstance(view.root.origin, Cast)
        sources.append(View(view.root.origin.source, view.map))
    whole = side_by_side(tracker, sources)
    if whole is None:
        return None
    return View(tracker.cast(whole.root, views[0].root.dtype), whole.map)


def _contractions(tracker: Tracker, views: Sequence[View]) -> View | None:
    origins = []
    for view in views:
        assert isinstance(view.root.origin, Contraction)
        origins.append(view.root.origin)
    first = origins[0]
    lists = [_variables(one.factor) for one in origins]
    if not all(_same_variables(lists[0], other) for other in lists[1:]):
        return None
    x = side_by_side(tracker, [View(one.x, identity(one.x.shape)) for one in origins])
    w = side_by_side(tracker, [View(one.weight, identity(one.weight.shape)) for one in origins])
    if x is None or w is None or x.map.offsets or w.map.offsets:
        return None
    need_fixed(tracker, x.root, [atom for atom in x.map.dims[0] if atom.axis is not None], ())

    def lifted(variable: Variable) -> list[Variable]:
        left, right = _over(variable.left, x), _over(variable.right, w)
        if left is None or right is None:
            one_sided = left_only(left) if left is not None else right_only(right or ())
            return [replace(one, summed=variable.summed) for one in one_sided]
        return tied(left, right, variable.summed)

    which = tied(x.map.dims[0], w.map.dims[0])
    # The dims of the piece as digits of its variables, and these as digits of the whole's.
    axes, out = _axes(first.factor)
    digits = compose(views[0].map, axes)
    dims = [
        [new for atom in atoms for new in lifted(digit_of(out, atom, False))]
        for atoms in digits.dims
    ]
    summed = [new for variable in first.factor.l for new in lifted(variable)]
    return new_product(tracker, x.root, w.root, [which, *dims], summed, views[0].root.dtype, None)


def _variables(factor: Factor) -> list[Variable]:
    batch = [variable for group in factor.batch for variable in group]
    return [*batch, *factor.i, *factor.k, *factor.l, *factor.j]


def _axes(factor: Factor) -> tuple[IndexMap, list[Variable]]:
    """The axes of the canonical y as digits of the result's variables, and those variables."""
    features = (*factor.i, *factor.k, *factor.j)
    groups = [features, *factor.batch] if factor.batch_last else [*factor.batch, features]
    out: list[Variable] = []
    dims = []
    for group in groups:
        dims.append(tuple(Atom(len(out) + at, v.size, 1) for at, v in enumerate(group)))
        out += group
    return IndexMap(tuple(dims)), out


def _over(atom: Atom | None, whole: View) -> Atoms | None:
    """A digit of a piece as digits of the whole, whose first dim is the index of the piece."""
    if atom is None:
        return None
    return compose(IndexMap(((atom,),)), IndexMap(whole.map.dims[1:])).dims[0]


def _same_variables(ours: Sequence[Variable], theirs: Sequence[Variable]) -> bool:
    return len(ours) == len(theirs) and all(
        same(one.size, other.size)
        and one.summed == other.summed
        and same_atoms([one.left] if one.left else [], [other.left] if other.left else [])
        and same_atoms([one.right] if one.right else [], [other.right] if other.right else [])
        for one, other in zip(ours, theirs, strict=True)
    )


def _same_maps(maps: Sequence[IndexMap], with_offsets: bool = True) -> bool:
    first = maps[0]
    return all(
        len(other.dims) == len(first.dims)
        and all(same_atoms(a, b) for a, b in zip(first.dims, other.dims, strict=True))
        and not (with_offsets and (first.offsets or other.offsets))
        for other in maps
    )


def _shifted(atoms: Atoms) -> Atoms:
    return tuple(atom if atom.axis is None else replace(atom, axis=atom.axis + 1) for atom in atoms)


@call_rule(torch.cat, torch.stack, first_is_tensor=False)
def _concat_call(
    tracker: Tracker, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> bool:
    if not isinstance(args[0], tuple | list):
        return False
    views = [tracker.view(tensor) for tensor in args[0]]
    if all(contraction(view) is not None for view in views):
        return False  # maybe the pieces of one product
    kind = functools.reduce(operator.or_, (view.root.kind for view in views))
    tracker.fresh(result, kind)
    return True
