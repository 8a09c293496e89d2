"""Plans from one view of a root to another: unflatten, permute, flatten and expand steps.

`plan` is index arithmetic alone; `lowering.emit` turns a `Move` into nodes. Only torch
functions that need no symbolic argument are used, so that a dynamic batch stays one graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ksopt.compile.capture.index_map import Atom, Atoms, NotNestedError
from ksopt.compile.capture.symbolic import Size, divides, plain, quotient, same


@dataclass(frozen=True)
class Move:
    """Steps from a tensor to another view of its root.

    Attributes:
        splits: for each dim of the tensor, the sizes to unflatten it into; at most one symbolic.
        order: the permutation of the dims after that.
        groups: for each dim of the result, how many dims it flattens; 0 is a new dim of size 1.
    """

    splits: tuple[tuple[Size, ...], ...]
    order: tuple[int, ...]
    groups: tuple[int, ...]

    @property
    def is_nothing(self) -> bool:
        """Whether there is nothing to do."""
        counts = tuple(len(split) for split in self.splits)
        in_order = self.order == tuple(range(len(self.order)))
        return in_order and counts == self.groups and max(counts, default=0) <= 1


def plan(have: Sequence[Atoms], want: Sequence[Atoms]) -> Move:
    """Steps from dims ``have`` to dims ``want`` over the same root.

    Both must hold every element of the root once.

    Raises:
        NotNestedError: they do not, or their digits do not nest.

    Example:
        >>> transposed = plan([(Atom(0, 24, 1),)], [(Atom(0, 6, 1),), (Atom(0, 4, 6),)])
        >>> transposed.splits, transposed.order, transposed.groups
        (((4, 6),), (1, 0), (1, 1))
    """
    cuts = _cuts([atom for atoms in (*have, *want) for atom in atoms])
    fine = [[digit for atom in atoms for digit in _refined(atom, cuts)] for atoms in have]
    target = [[digit for atom in atoms for digit in _refined(atom, cuts)] for atoms in want]
    flat = [digit for digits in fine for digit in digits]
    order = []
    for digit in (digit for digits in target for digit in digits):
        hits = [at for at, other in enumerate(flat) if _equal(digit, other)]
        if len(hits) != 1 or hits[0] in order:
            raise NotNestedError(f"no digit of the tensor is {digit}")
        order.append(hits[0])
    if len(order) != len(flat):
        raise NotNestedError("the result leaves out some elements")
    splits = [[digit.size for digit in digits] for digits in fine]
    move = _without_needless_splits(splits, order, [len(digits) for digits in target])
    if any(sum(not isinstance(size, int) for size in split) > 1 for split in move.splits):
        raise NotNestedError("a dim would be split into two symbolic ones")
    return move


def _without_needless_splits(splits: list[list[Size]], order: list[int], groups: list[int]) -> Move:
    """A move that does not split digits which are neighbours before and after it."""
    dims_after = [dim for dim, group in enumerate(groups) for _ in range(group)]
    merged: list[list[Size]] = []
    place = 0  # of a digit before the move
    new_place: dict[int, int] = {}
    groups = list(groups)
    count = 0
    for split in splits:
        merged.append([])
        for at, size in enumerate(split):
            after = order.index(place)
            follows = at > 0 and after > 0 and order[after - 1] == place - 1
            if follows and dims_after[after] == dims_after[after - 1]:
                merged[-1][-1] = plain(merged[-1][-1] * size)
                groups[dims_after[after]] -= 1
            else:
                merged[-1].append(size)
                new_place[place] = count
                count += 1
            place += 1
    new_order = tuple(new_place[digit] for digit in order if digit in new_place)
    return Move(tuple(map(tuple, merged)), new_order, tuple(groups))


def keeps_memory(strides: Sequence[Size], move: Move) -> bool:
    """Whether the result of a move is a view of the tensor, or a copy.

    Args:
        strides: the tensor's.
        move: from `plan`.

    Example:
        >>> atoms = [(Atom(0, 2, 12),), (Atom(0, 3, 4),), (Atom(0, 4, 1),)]
        >>> keeps_memory((12, 4, 1), plan(atoms, [atoms[2], atoms[0] + atoms[1]]))
        True
        >>> keeps_memory((12, 4, 1), plan(atoms, [atoms[1], atoms[0] + atoms[2]]))
        False
    """
    dims: list[tuple[Size, Size]] = []  # size and stride
    for split, stride in zip(move.splits, strides, strict=True):
        below: list[tuple[Size, Size]] = []
        for size in reversed(split):
            below.append((size, stride))
            stride = stride * size
        dims += reversed(below)
    at = 0
    for group in move.groups:
        merged = [dims[which] for which in move.order[at : at + group]]
        merged = [(size, stride) for size, stride in merged if not same(size, 1)]
        at += group
        for (_, stride), (size, inner) in pairwise(merged):
            if not same(stride, size * inner):
                return False
    return True


def _equal(one: Atom, other: Atom) -> bool:
    return one.axis == other.axis and same(one.stride, other.stride) and same(one.size, other.size)


def _cuts(atoms: Sequence[Atom]) -> dict[int, set[int]]:
    """Start and end positions of the digits on each axis."""
    cuts: dict[int, set[int]] = {}
    for atom in atoms:
        if atom.axis is None:
            raise NotNestedError("elements are repeated")
        ends = {end for end in (atom.stride, atom.span) if isinstance(end, int)}
        cuts.setdefault(atom.axis, set()).update(ends)
    return cuts


def _refined(atom: Atom, cuts: dict[int, set[int]]) -> list[Atom]:
    """A digit cut wherever some digit begins or ends, most significant first."""
    low_digits: list[Atom] = []
    assert atom.axis is not None
    for cut in sorted(cuts[atom.axis]):
        stride, size = atom.stride, atom.size
        if not isinstance(stride, int) or cut <= stride or cut % stride:
            continue
        low = cut // stride
        if (isinstance(size, int) and low >= size) or not divides(low, size):
            continue
        low_digits.append(Atom(atom.axis, low, stride))
        atom = Atom(atom.axis, quotient(size, low), plain(stride * low))
    return [*([] if same(atom.size, 1) else [atom]), *reversed(low_digits)]
