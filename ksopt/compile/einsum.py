"""The variables of an einsum of two operands, read off its equation."""

from __future__ import annotations

from torch import Tensor

from ksopt.compile.contractions import Dims, left_only, offered, right_only, tied
from ksopt.compile.index import Atoms, IndexMap
from ksopt.compile.sizes import same
from ksopt.compile.tracking import Tracker
from ksopt.compile.values import Variable


def note_einsum(
    tracker: Tracker, equation: str, left: Tensor, right: Tensor, result: Tensor
) -> bool:
    """Note the result of an einsum; False if it is of a kind that must be run.

    Raises:
        NotNestedError: the digits of the operands do not nest.
    """
    letters = letters_of(equation, left.dim(), right.dim())
    if letters is None:
        return False
    ours, theirs, out = letters
    a, b = tracker.view(left), tracker.view(right)
    shared = set(ours) & set(theirs)
    for letter in shared:
        if not same(left.shape[ours.index(letter)], right.shape[theirs.index(letter)]):
            return False  # one of them is broadcast
    if any(letter not in out for letter in set(ours) ^ set(theirs)):
        return False  # one operand alone is summed first

    def variables(letter: str, summed: bool) -> list[Variable]:
        if letter in shared:
            return tied(_digits(a.map, ours, letter), _digits(b.map, theirs, letter), summed)
        if letter in ours:
            return left_only(_digits(a.map, ours, letter))
        return right_only(_digits(b.map, theirs, letter))

    dims: Dims = [variables(letter, summed=False) for letter in out]
    summed = [v for letter in ours if letter not in out for v in variables(letter, summed=True)]
    view = offered(tracker, a.root, b.root, dims, summed, result)
    if view is None:
        tracker.fresh(result, a.root.kind | b.root.kind)
    else:
        tracker.note(result, view)
    return True


def letters_of(equation: str, left: int, right: int) -> tuple[str, str, str] | None:
    """The letters of the dims of both operands and of the result; None where that is not all.

    Args:
        equation: as torch.einsum takes it.
        left, right: how many dims the operands have.

    Example:
        >>> letters_of("...gi, goi -> ...go", 4, 3)
        ('01gi', 'goi', '01go')
        >>> letters_of("ii,ij->ij", 2, 2) is None
        True
    """
    text = equation.replace(" ", "")
    inputs, arrow, out = text.partition("->")
    operands = inputs.split(",")
    if not arrow or len(operands) != 2:
        return None
    found = []
    ranks = set()
    for operand, rank in zip(operands, (left, right), strict=True):
        more = rank - len(operand.replace("...", ""))
        if "..." in operand:
            ranks.add(more)
        elif more:
            return None
        found.append(operand.replace("...", "0123456789"[:more]))
    if len(ranks) > 1:
        return None  # broadcast against each other
    dots = "0123456789"[: ranks.pop()] if ranks else ""
    found.append(out.replace("...", dots))
    ours, theirs, result = found
    once = all(len(set(one)) == len(one) for one in found)
    known = set(result) <= set(ours) | set(theirs)
    return (ours, theirs, result) if once and known and not set(dots) - set(result) else None


def _digits(index_map: IndexMap, letters: str, letter: str) -> Atoms:
    return index_map.dims[letters.index(letter)]
