"""The variables of an einsum of two operands, read off its equation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ksopt.compile.capture.contraction import (
    Dims,
    left_only,
    of_one_dtype,
    offered,
    right_only,
    tied,
)
from ksopt.compile.capture.index_map import Atoms
from ksopt.compile.capture.rule_table import call_rule
from ksopt.compile.capture.rules.structured_weight import by_support
from ksopt.compile.capture.symbolic import same
from ksopt.compile.capture.tracker import Tracker
from ksopt.compile.capture.values import Kind, Variable, View


class Operand(NamedTuple):
    """An operand of an einsum, and a letter for each of its dims."""

    view: View
    letters: str

    def digits(self, letter: str) -> Atoms:
        """The digits of a letter over the operand's root."""
        return self.view.map.dims[self.letters.index(letter)]


def note_einsum(
    tracker: Tracker, equation: str, left: Tensor, right: Tensor, result: Tensor
) -> bool:
    """Record the result of an einsum; False if it must be run instead.

    Raises:
        NotNestedError: the digits of the operands do not nest.
    """
    letters = letters_of(equation, (left.dim(), right.dim()))
    if letters is None or any(len(set(one)) < len(one) for one in letters):
        return False
    ours, theirs, out = letters
    for letter in set(ours) & set(theirs):
        if not same(left.shape[ours.index(letter)], right.shape[theirs.index(letter)]):
            return False  # one of them is broadcast
    if any(letter not in out for letter in set(ours) ^ set(theirs)):
        return False  # one operand alone is summed first
    a, b = tracker.view(left), tracker.view(right)
    if Kind.ACTIVATION not in (a.root.kind, b.root.kind):
        return False  # of weights alone

    def multiply(one: View, other: View, repeats: bool) -> View | None:
        both = Operand(one, ours), Operand(other, theirs)
        return einsum_product(tracker, *both, out, result, repeats)

    view = by_support(tracker, a, b, multiply)
    if view is None:
        tracker.fresh(result, a.root.kind | b.root.kind)
    else:
        tracker.note(result, view)
    return True


def einsum_product(
    tracker: Tracker, left: Operand, right: Operand, out: str, result: Tensor, repeats: bool = False
) -> View | None:
    """The product of two operands summed over the letters not in ``out``; None if it is no site.

    For ``repeats`` see `ksopt.compile.capture.contraction.offered`.

    Raises:
        NotNestedError: the digits of the operands do not nest.
    """

    def variables(letter: str, summed: bool) -> list[Variable]:
        if letter in left.letters and letter in right.letters:
            return tied(left.digits(letter), right.digits(letter), summed)
        if letter in left.letters:
            return left_only(left.digits(letter))
        return right_only(right.digits(letter))

    dims: Dims = [variables(letter, summed=False) for letter in out]
    gone = [letter for letter in left.letters if letter not in out]
    summed = [v for letter in gone for v in variables(letter, summed=True)]
    return offered(tracker, left.view.root, right.view.root, dims, summed, result, repeats)


def letters_of(equation: str, ranks: Sequence[int]) -> list[str] | None:
    """The letters of the dims of each operand and of the result; None if they do not describe it.

    Args:
        equation: as torch.einsum takes it.
        ranks: numbers of dims of the operands.

    Example:
        >>> letters_of("...gi, goi -> ...go", (4, 3))
        ['01gi', 'goi', '01go']
        >>> letters_of("bi,ri,or", (2, 2, 2))
        ['bi', 'ri', 'or', 'bo']
    """
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    operands = inputs.split(",")
    if len(operands) != len(ranks):
        return None
    letters = []
    dotted = set()
    for operand, rank in zip(operands, ranks, strict=True):
        more = rank - len(operand.replace("...", ""))
        if "..." in operand:
            dotted.add(more)
        elif more:
            return None
        letters.append(operand.replace("...", "0123456789"[:more]))
    if len(dotted) > 1:
        return None  # broadcast against each other
    dots = "0123456789"[: dotted.pop()] if dotted else ""
    every = "".join(letters)
    if not arrow:
        once = sorted(letter for letter in set(every) - set(dots) if every.count(letter) == 1)
        out = "..." + "".join(once)
    result = out.replace("...", dots)
    if not set(result) <= set(every) or set(dots) - set(result) or len(set(result)) < len(result):
        return None
    return [*letters, result]


@call_rule(torch.einsum, torch.functional.einsum, casts=True, first_is_tensor=False)
def _einsum_call(
    tracker: Tracker, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> bool:
    operands = args[1] if len(args) == 2 and isinstance(args[1], tuple | list) else args[1:]
    if len(operands) != 2 or not isinstance(args[0], str) or not of_one_dtype(*operands, result):
        return False
    left, right = operands
    return note_einsum(tracker, args[0], left, right, result)
