"""Axes of block diagonals: index digits that occur twice in a tensor, zero unless they agree.

A block-diagonal matrix has the digits (i, k) in its rows and (i, l) in its columns: an element is
zero unless both have the same i (`values.Structured`). Occurrences of a digit are identified only
by their position; so if one is cut, all must be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ksopt.compile.capture.index_map import Atom, Atoms, NotNestedError, regroup
from ksopt.compile.capture.recognize import NotKroneckerSparseError
from ksopt.compile.capture.symbolic import Size, product
from ksopt.compile.capture.values import Variable

_Key = tuple[int, int]
"""Identity of a digit of a weight: axis and stride. Digits with equal keys have equal sizes."""


def merged(
    dims: Sequence[Sequence[Variable]], summed: Sequence[Variable]
) -> tuple[list[list[Variable]], list[Variable]]:
    """The variables of a product by a weight with repeated digits, with each digit once.

    A digit that is summed over and is an index of the result as well ties the two: the sum has one
    term.

    Args:
        dims: for each dim of the result its variables, the weight to the right.
        summed: those that are summed over.

    Raises:
        NotKroneckerSparseError: the result, or the part of the input that is read, is a diagonal.
        NotNestedError: a digit is cut in a way that does not nest.
    """
    everything = [variable for group in (*dims, summed) for variable in group]
    bounds = _bounds(variable.right for variable in everything)
    fine = [[part for v in group for part in _parts(v, bounds)] for group in dims]
    fine_summed = [part for v in summed for part in _parts(v, bounds)]
    places: dict[_Key, list[Variable]] = {}
    for variable in (v for group in (*fine, fine_summed) for v in group):
        if variable.right is not None:
            places.setdefault(_key(variable.right), []).append(variable)
    tied: dict[Variable, Variable] = {}
    gone: set[Variable] = set()
    for variables in places.values():
        if len(variables) == 1:
            continue
        over = [v for v in variables if v.summed]
        new = [v for v in variables if not v.summed and v.left is None]
        if len(variables) != 2 or len(over) != 1 or len(new) != 1:
            raise NotKroneckerSparseError("only a diagonal of its input or result is not zero")
        tied[new[0]] = replace(over[0], summed=False)
        gone.add(over[0])
    return (
        [[tied.get(v, v) for v in group] for group in fine],
        [v for v in fine_summed if v not in gone],
    )


def _key(atom: Atom) -> _Key:
    assert atom.axis is not None
    return atom.axis, int(atom.stride)


def _bounds(atoms: Iterable[Atom | None]) -> dict[int, set[int]]:
    """Start and end positions of the digits of each axis."""
    bounds: dict[int, set[int]] = {}
    for atom in atoms:
        if atom is not None and atom.axis is not None:
            bounds.setdefault(atom.axis, set()).update((int(atom.stride), int(atom.span)))
    return bounds


def _cuts(atom: Atom, bounds: dict[int, set[int]]) -> list[int]:
    """Sizes of the parts that a digit is cut into, most significant first."""
    if atom.axis is None:
        return [int(atom.size)]
    low, high = int(atom.stride), int(atom.span)
    inside = [low, *sorted(b for b in bounds.get(atom.axis, ()) if low < b < high), high]
    sizes = []
    for start, end in pairwise(inside):
        if end % start:
            raise NotNestedError(f"a digit of {atom.size} is cut at {end // low}")
        sizes.append(end // start)
    return sizes[::-1]


def _parts(variable: Variable, bounds: dict[int, set[int]]) -> list[Variable]:
    if variable.right is None:
        return [variable]
    sizes = _cuts(variable.right, bounds)
    if len(sizes) == 1:
        return [variable]
    right = _split(variable.right, sizes)
    left = [None] * len(sizes) if variable.left is None else _split(variable.left, sizes)
    return [
        Variable(size, one, other, variable.summed)
        for size, one, other in zip(sizes, left, right, strict=True)
    ]


def _split(atom: Atom, sizes: Sequence[int]) -> list[Atom]:
    parts, stride = [], atom.stride
    for size in reversed(sizes):
        parts.append(replace(atom, size=size, stride=0 if atom.axis is None else stride))
        stride = stride * size
    return parts[::-1]


@dataclass(eq=False)
class Digit:
    """A digit of the result of an elementwise function.

    Attributes:
        size: its number of values.
        of: the same digit in each operand; without an axis where the operand is repeated.
    """

    size: int
    of: list[Atom]


def digits_of(operands: Sequence[Sequence[Atoms]], shape: Sequence[Size]) -> list[list[Digit]]:
    """The digits of each dim of an elementwise result, cut so that all operands agree.

    Args:
        operands: the dims of each operand, broadcast to the result's shape.
        shape: the result's sizes, integers.

    Raises:
        NotNestedError: the digits of the operands do not nest.
    """
    digits = []
    for dim, size in enumerate(shape):
        ends = {1, int(size)}
        for dims in operands:
            end = 1
            for atom in reversed(dims[dim]):
                end *= int(atom.size)
                ends.add(end)
        ordered = sorted(ends)
        if any(high % low for low, high in pairwise(ordered)):
            raise NotNestedError(f"digits of a dim of {size} do not nest")
        sizes = [high // low for low, high in pairwise(ordered)][::-1]
        parts = [regroup(dims[dim], sizes) for dims in operands]
        digits.append(
            [Digit(part, [group[at][0] for group in parts]) for at, part in enumerate(sizes)]
        )
    return digits


def same_value(
    dims: list[list[Digit]], is_structured: Sequence[bool]
) -> tuple[list[list[Digit]], dict[Digit, int]]:
    """Groups of digits of an elementwise result that must agree where it is nonzero.

    Args:
        dims: from `digits_of`.
        is_structured: for each operand, whether it is zero unless digits agree.

    Returns:
        The digits, cut where necessary, and a number for each: digits of one number agree.

    Raises:
        NotNestedError: a digit is cut in a way that does not nest.
    """
    operands = [at for at, structured in enumerate(is_structured) if structured]
    while True:
        before = sum(map(len, dims))
        for at in operands:
            bounds = _bounds(digit.of[at] for group in dims for digit in group)
            dims = [[part for d in group for part in _cut(d, at, bounds)] for group in dims]
        if sum(map(len, dims)) == before:
            break
    every = [digit for group in dims for digit in group]
    number = {digit: at for at, digit in enumerate(every)}
    for at in operands:
        first: dict[_Key, int] = {}
        for digit in every:
            if digit.of[at].axis is None:
                continue
            own, other = number[digit], first.setdefault(_key(digit.of[at]), number[digit])
            for one in every:
                if number[one] == own:
                    number[one] = other
    order = {old: new for new, old in enumerate(dict.fromkeys(number[digit] for digit in every))}
    return dims, {digit: order[number[digit]] for digit in every}


def _cut(digit: Digit, at: int, bounds: dict[int, set[int]]) -> list[Digit]:
    sizes = _cuts(digit.of[at], bounds)
    if len(sizes) == 1:
        return [digit]
    parts = [_split(atom, sizes) for atom in digit.of]
    return [Digit(size, [part[k] for part in parts]) for k, size in enumerate(sizes)]


def is_whole(dims: Sequence[Atoms], others: Sequence[Atoms]) -> bool:
    """Whether two lists of dims hold the same number of elements of each axis."""
    return _totals(dims) == _totals(others)


def _totals(dims: Sequence[Atoms]) -> dict[int, int]:
    axes: dict[int, list[Size]] = {}
    for atom in (atom for atoms in dims for atom in atoms):
        if atom.axis is not None:
            axes.setdefault(atom.axis, []).append(atom.size)
    return {axis: int(product(sizes)) for axis, sizes in axes.items()}
