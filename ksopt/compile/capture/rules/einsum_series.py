"""An einsum of many operands as a series of products by weights.

torch multiplies the operands pair by pair, in the order of the equation or in one that opt_einsum
finds, and no node holds the intermediate results. The value is independent of the order. So the
operand that depends on the input is followed through its products by the others; an operand that
only scales or masks a weight, and diagonals and sums of one weight, are computed before the
product.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from ksopt.compile.capture.index_map import NotNestedError, identity
from ksopt.compile.capture.rules.einsum import Operand, einsum_product, letters_of
from ksopt.compile.capture.symbolic import Size, product, same
from ksopt.compile.capture.tracker import Tracker
from ksopt.compile.capture.values import Combined, Kind, View
from ksopt.kernels.operands import size_hint

_EINSUMS = (torch.einsum, torch.functional.einsum, torch.ops.aten.einsum.default)


def is_series(node: fx.Node) -> bool:
    """Whether a node is an einsum that `rules.einsum` cannot read from its equation alone."""
    if node.target not in _EINSUMS or not node.args or not isinstance(node.args[0], str):
        return False
    inputs = node.args[0].replace(" ", "").partition("->")[0].split(",")
    # Each letter of two operands is in both, or in the result: all else is summed or cut first.
    return len(inputs) > 2 or (len(inputs) == 2 and _is_prepared(node.args[0]))


def _is_prepared(equation: str) -> bool:
    letters = equation.replace(" ", "").replace("...", "")
    inputs, arrow, out = letters.partition("->")
    one, other = inputs.split(",")
    repeats = any(len(set(letters)) < len(letters) for letters in (one, other))
    return repeats or (bool(arrow) and not (set(one) ^ set(other)) <= set(out))


def note_series(tracker: Tracker, args: Sequence[Any], result: Tensor) -> bool:
    """Record the result of such an einsum; False if it is no series of products.

    Records of intermediate results are then removed; the reason stays.
    """
    tensors = args[1] if len(args) == 2 and isinstance(args[1], tuple | list) else args[1:]
    letters = letters_of(args[0], [tensor.dim() for tensor in tensors])
    if letters is None or any(tensor.dtype != result.dtype for tensor in tensors):
        return False
    views = map(tracker.view, tensors)
    operands = [Operand(view, own) for view, own in zip(views, letters[:-1], strict=True)]
    trace = tracker.trace
    contractions_before, flops = len(trace.contractions), trace.flops.copy()
    try:
        view = _series(tracker, operands, letters[-1], result)
    except NotNestedError:
        view = None
    if view is None:
        del trace.contractions[contractions_before:]
        trace.flops = flops
        return False
    tracker.note(result, view)
    return True


def _series(tracker: Tracker, operands: list[Operand], out: str, result: Tensor) -> View | None:
    inputs = [one for one in operands if one.view.root.kind is Kind.ACTIVATION]
    others = [one for one in operands if one.view.root.kind is not Kind.ACTIVATION]
    if not any(one.view.root.kind is Kind.WEIGHT for one in others):
        return None
    reason = _no_series(inputs, others, out)
    if reason is not None:
        if any(_is_like_a_site(x, weight, out) for x in inputs for weight in others):
            tracker.miss(reason)
        return None
    (x,) = inputs
    if not _agree_in_size(operands):
        return None  # one of them is broadcast
    weights = _combined(tracker, others, set(x.letters) | set(out))
    while weights:
        weight = _next_weight(x, weights, out)
        if weight is None:
            return None
        weights.remove(weight)
        remaining = {letter for one in weights for letter in one.letters} | set(out)
        both = dict.fromkeys(x.letters + weight.letters)
        letters = "".join(letter for letter in both if letter in remaining) if weights else out
        view = einsum_product(tracker, x, weight, letters, result)
        if view is None:
            return None
        x = Operand(view, letters)
    return x.view


def _no_series(inputs: Sequence[Operand], others: Sequence[Operand], out: str) -> str | None:
    """Why the operands are not one input and weights; None if they are."""
    if len(inputs) != 1:
        return "more than one of its operands depend on the model's inputs"
    letters = inputs[0].letters
    elsewhere = {letter for one in others for letter in one.letters} | set(out)
    if len(set(letters)) < len(letters):
        return "it takes a diagonal of the input"
    return None if set(letters) <= elsewhere else "it sums the input alone over an index"


def _is_like_a_site(x: Operand, weight: Operand, out: str) -> bool:
    """Whether the product of the two alone would be sparse: tied, summed and new letters."""
    shared = set(x.letters) & set(weight.letters)
    new = set(weight.letters) - shared
    return bool(shared & set(out)) and not shared <= set(out) and bool(new & set(out))


def _agree_in_size(operands: Sequence[Operand]) -> bool:
    sizes: dict[str, Size] = {}
    return all(
        same(sizes.setdefault(letter, size), size)
        for one in operands
        for letter, size in zip(one.letters, one.view.map.shape, strict=True)
    )


def _next_weight(x: Operand, weights: Sequence[Operand], out: str) -> Operand | None:
    """The first weight that shares with x a letter that nothing else has, to sum over."""
    for weight in weights:
        rest = {letter for one in weights if one is not weight for letter in one.letters}
        if set(x.letters) & set(weight.letters) - rest - set(out):
            return weight
    return None


def _combined(tracker: Tracker, weights: Sequence[Operand], needed: set[str]) -> list[Operand]:
    """The weights of the products; a weight that only scales or masks another is joined to it.

    Args:
        tracker: of the graph.
        weights: as the equation has them.
        needed: letters of the input and of the result.
    """
    weights = [_joined(tracker, [one], _needed_letters([one], weights, needed)) for one in weights]
    groups: list[list[Operand]] = []
    # A group's first weight has all its letters; the smallest that can take another one does.
    for weight in sorted(weights, key=lambda one: -len(set(one.letters))):
        fitting = [one for one in groups if set(weight.letters) <= set(one[0].letters)]
        if fitting:
            min(fitting, key=_elements).append(weight)
        else:
            groups.append([weight])
    places = {id(weight): at for at, weight in enumerate(weights)}
    groups.sort(key=lambda group: places[id(group[0])])
    return [_joined(tracker, group, _needed_letters(group, weights, needed)) for group in groups]


def _needed_letters(group: Sequence[Operand], weights: Sequence[Operand], needed: set[str]) -> str:
    """The letters of a group, each once, except those that only the group has and sums over."""
    inside = [id(one) for one in group]
    others = {letter for one in weights if id(one) not in inside for letter in one.letters}
    return "".join(x for x in dict.fromkeys(group[0].letters) if x in needed | others)


def _joined(tracker: Tracker, group: Sequence[Operand], letters: str) -> Operand:
    """The weights of a group as one operand; a single weight with these letters is unchanged."""
    first = group[0]
    if len(group) == 1 and first.letters == letters:
        return first
    group = [first, *map(_unrepeated, group[1:])]
    equation = f"{','.join(one.letters for one in group)}->{letters}"
    shape = [product(atom.size for atom in first.digits(letter)) for letter in letters]
    kind = functools.reduce(operator.or_, (one.view.root.kind for one in group))
    origin = Combined(_with_letters(equation), tuple(one.view for one in group))
    root = tracker.root(shape, first.view.root.dtype, kind, origin)
    return Operand(View(root, identity(root.shape)), letters)


def _unrepeated(weight: Operand) -> Operand:
    """A weight without the dims along which it is constant."""
    index_map = weight.view.map
    varying = [
        at
        for at, atoms in enumerate(index_map.dims)
        if not atoms or any(atom.axis is not None for atom in atoms)
    ]
    dims = tuple(index_map.dims[at] for at in varying)
    view = View(weight.view.root, replace(index_map, dims=dims))
    return Operand(view, "".join(weight.letters[at] for at in varying))


def _with_letters(equation: str) -> str:
    """An equation with letters in place of the digits for the dims of an ellipsis."""
    free = [x for x in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz" if x not in equation]
    return equation.translate({ord(digit): free[int(digit)] for digit in "0123456789"})


def _elements(group: Sequence[Operand]) -> int:
    return size_hint(product(group[0].view.map.shape)) or 0
