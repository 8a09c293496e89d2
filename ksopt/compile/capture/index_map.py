"""Index maps: the positions of a tensor's elements in its views, reshapes and permutations.

A tensor that was viewed, permuted and reshaped is described by an `IndexMap` over the tensor that
it came from, its root. Each dim of the map is a list of *atoms*, most significant first: the index
along the dim, written with the atoms' sizes as mixed radices, gives one digit for each atom, and a
digit moves the index along one axis of the root by its stride. So with root [B, 24]::

    view(B, 4, 6)          dims  [B]  [(1, 4, 6)]  [(1, 6, 1)]         (axis, size, stride)
    .transpose(1, 2)       dims  [B]  [(1, 6, 1)]  [(1, 4, 6)]
    .reshape(B, 24)        dims  [B]  [(1, 6, 1), (1, 4, 6)]

Maps are normalized: no atom has size 1, and contiguous neighbours are merged. A reshape is then
possible exactly if the sizes nest: an atom is only ever cut at a divisor of its size.

This module uses no tensors; sizes may be symbolic (`ksopt.compile.capture.symbolic`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ksopt.compile.capture.symbolic import Size, divides, plain, product, quotient, same


class NotNestedError(Exception):
    """The sizes do not nest, so the result is not an index map over the same root."""


@dataclass(frozen=True, slots=True)
class Atom:
    """One digit of an index.

    Attributes:
        axis: the root's axis that it moves along; None for a repeated element.
        size: its number of values.
        stride: by how much one step moves the index along the axis; 0 where axis is None.
    """

    axis: int | None
    size: Size
    stride: Size

    @property
    def span(self) -> Size:
        """size * stride: the stride that a digit just above this one would have."""
        return plain(self.size * self.stride)


Atoms = tuple[Atom, ...]


@dataclass(frozen=True, slots=True)
class IndexMap:
    """A tensor's elements as elements of its root.

    Attributes:
        dims: the atoms of each of the tensor's dims, most significant first.
        offsets: (axis, amount) pairs: where on the root's axes the index 0 stands, if not at 0.
    """

    dims: tuple[Atoms, ...]
    offsets: tuple[tuple[int, int], ...] = ()

    @property
    def shape(self) -> tuple[Size, ...]:
        """Sizes of the dims."""
        return tuple(product(atom.size for atom in atoms) for atoms in self.dims)

    @property
    def atoms(self) -> Atoms:
        """All atoms, dim after dim."""
        return tuple(atom for atoms in self.dims for atom in atoms)


def identity(shape: Sequence[Size]) -> IndexMap:
    """A tensor as a map over itself.

    Example:
        >>> identity((3, 1, 5)).dims
        ((Atom(axis=0, size=3, stride=1),), (), (Atom(axis=2, size=5, stride=1),))
    """
    return IndexMap(tuple(_whole(axis, plain(size)) for axis, size in enumerate(shape)))


def is_identity(index_map: IndexMap, shape: Sequence[Size]) -> bool:
    """Whether the map is known to be the identity on a root of that shape."""
    return (
        not index_map.offsets
        and len(index_map.dims) == len(shape)
        and all(
            same_atoms(atoms, _whole(axis, plain(size)))
            for axis, (atoms, size) in enumerate(zip(index_map.dims, shape, strict=True))
        )
    )


def permute(index_map: IndexMap, order: Sequence[int]) -> IndexMap:
    """Dims in a new order, as `torch.permute`."""
    return replace(index_map, dims=tuple(index_map.dims[dim] for dim in order))


def reshape(index_map: IndexMap, shape: Sequence[Size]) -> IndexMap:
    """The same elements in the same order under another shape, as `torch.reshape`.

    Raises:
        NotNestedError: a dim of the new shape ends in the middle of an atom.

    Example:
        >>> reshape(identity((24,)), (4, 6)).dims
        ((Atom(axis=0, size=4, stride=6),), (Atom(axis=0, size=6, stride=1),))
    """
    return replace(index_map, dims=regroup(index_map.atoms, shape))


def expand(index_map: IndexMap, shape: Sequence[Size]) -> IndexMap:
    """Dims of size 1, and new dims in front, repeated, as `torch.Tensor.expand`."""
    new = len(shape) - len(index_map.dims)
    dims = []
    for at, size in enumerate(shape):
        atoms = index_map.dims[at - new] if at >= new else ()
        dims.append(atoms or _normal([Atom(None, plain(size), 0)]))
    return replace(index_map, dims=tuple(dims))


def narrow(index_map: IndexMap, dim: int, start: int, length: int, step: int = 1) -> IndexMap:
    """Every step-th of the indices from ``start`` of a dim, ``length`` of them.

    Raises:
        NotNestedError: they begin or end in the middle of an atom.
    """
    shape = index_map.shape
    window = list(identity(shape).dims)
    window[dim] = _normal([Atom(dim, length, step)])
    offsets = ((dim, start),) if start else ()
    return compose(IndexMap(tuple(window), offsets), index_map)


def compose(outer: IndexMap, inner: IndexMap) -> IndexMap:
    """A map over the dims of ``inner``, as a map over inner's own root.

    Raises:
        NotNestedError: an atom of ``outer`` does not consist of whole digits of ``inner``.

    Example:
        >>> transposed = permute(reshape(identity((24,)), (4, 6)), (1, 0))
        >>> compose(reshape(identity((6, 4)), (2, 3, 4)), transposed).dims[1]
        (Atom(axis=0, size=3, stride=1),)
    """
    offsets = dict(inner.offsets)
    start = dict(outer.offsets)
    moving: dict[int, list[Atom]] = {}
    for atom in outer.atoms:
        if atom.axis is not None:
            moving.setdefault(atom.axis, []).append(atom)
    for axis, amount in start.items():
        _shift(offsets, inner.dims[axis], amount, moving.get(axis, []))
    dims = tuple(
        _normal([digit for atom in atoms for digit in _digits(atom, inner)]) for atoms in outer.dims
    )
    nonzero = tuple(sorted((axis, amount) for axis, amount in offsets.items() if amount))
    return IndexMap(dims, nonzero)


def _shift(offsets: dict[int, int], digits: Atoms, amount: int, moving: Sequence[Atom]) -> None:
    """Add ``amount`` steps along a dim with these ``digits`` to the offsets of the root's axes."""
    weight = 1
    for place, digit in enumerate(reversed(digits)):
        leading = place == len(digits) - 1
        own = amount // weight if leading else amount // weight % digit.size
        span = weight * digit.size
        touched = any(atom.stride < span and weight < atom.span for atom in moving)
        if own and touched and len(digits) > 1:
            # An atom that starts above 0 and moves would carry into the next digit.
            raise NotNestedError(f"an offset of {amount} falls inside a digit of {digit.size}")
        if own and digit.axis is not None:
            offsets[digit.axis] = offsets.get(digit.axis, 0) + own * digit.stride
        weight = span


def _digits(atom: Atom, inner: IndexMap) -> list[Atom]:
    """The digits over inner's root of an atom over the dims of ``inner``."""
    if atom.axis is None:
        return [atom]
    digits = inner.dims[atom.axis]
    if same(atom.stride, 1) and same(atom.size, product(digit.size for digit in digits)):
        return list(digits)
    if len(digits) == 1:
        digit = digits[0]
        return [replace(digit, size=atom.size, stride=plain(digit.stride * atom.stride))]
    # Cut the dim into the digits above the atom, the atom, and the digits below.
    total = product(digit.size for digit in digits)
    if not divides(atom.span, total):
        raise NotNestedError(f"{atom.span} does not divide {total}")
    return list(regroup(digits, (quotient(total, atom.span), atom.size, atom.stride))[1])


def regroup(atoms: Iterable[Atom], sizes: Sequence[Size]) -> tuple[Atoms, ...]:
    """Split atoms, most significant first, into groups of these sizes.

    Raises:
        NotNestedError: a group ends in the middle of an atom.
    """
    left = list(reversed(_normal(atoms)))
    groups = []
    for size in sizes:
        group: list[Atom] = []
        need = plain(size)
        while not same(need, 1):
            if not left:
                raise NotNestedError(f"no atoms are left for a dim of size {size}")
            atom = left.pop()
            if divides(atom.size, need):
                need = quotient(need, atom.size)
            elif divides(need, atom.size):
                atom, rest = _cut(atom, need)
                left.append(rest)
                need = 1
            else:
                raise NotNestedError(f"a dim of size {need} ends in the middle of {atom.size}")
            group.append(atom)
        groups.append(_normal(group))
    if left:
        raise NotNestedError("the sizes hold fewer elements than the atoms")
    return tuple(groups)


def align(left: Iterable[Atom], right: Iterable[Atom]) -> list[tuple[Atom, Atom]]:
    """Cut two lists of atoms of one total size so that they agree digit by digit.

    Raises:
        NotNestedError: the sizes do not nest.

    Example:
        >>> [(x.size, y.size) for x, y in align([Atom(0, 6, 1)], [Atom(1, 2, 1), Atom(0, 3, 1)])]
        [(2, 2), (3, 3)]
    """
    ours, theirs = list(reversed(_normal(left))), list(reversed(_normal(right)))
    pairs = []
    while ours and theirs:
        one, other = ours.pop(), theirs.pop()
        if same(one.size, other.size):
            pass
        elif divides(other.size, one.size):
            one, rest = _cut(one, other.size)
            ours.append(rest)
        elif divides(one.size, other.size):
            other, rest = _cut(other, one.size)
            theirs.append(rest)
        else:
            raise NotNestedError(f"digits of sizes {one.size} and {other.size} do not nest")
        pairs.append((one, other))
    if ours or theirs:
        raise NotNestedError("the two dims differ in size")
    return pairs


def same_atoms(left: Sequence[Atom], right: Sequence[Atom]) -> bool:
    """Whether two lists of atoms are known to be equal."""
    return len(left) == len(right) and all(
        one.axis == other.axis and same(one.size, other.size) and same(one.stride, other.stride)
        for one, other in zip(left, right, strict=True)
    )


def runs_on(high: Atom, low: Atom) -> bool:
    """Whether two neighbouring digits are contiguous: the higher continues where the lower ends."""
    if high.axis is None or low.axis is None:
        return high.axis is low.axis
    return high.axis == low.axis and same(high.stride, low.span)


def joined(high: Atom, low: Atom) -> Atom:
    """The single digit that two contiguous digits (see `runs_on`) form."""
    return replace(low, size=plain(high.size * low.size))


def _cut(atom: Atom, high: Size) -> tuple[Atom, Atom]:
    """Split off the ``high`` most significant values: (high digit, low digit)."""
    low = quotient(atom.size, high)
    return (
        replace(atom, size=high, stride=plain(atom.stride * low)),
        replace(atom, size=low),
    )


def _whole(axis: int, size: Size) -> Atoms:
    return () if same(size, 1) else (Atom(axis, size, 1),)


def _normal(atoms: Iterable[Atom]) -> Atoms:
    normal: list[Atom] = []
    for atom in atoms:
        if same(atom.size, 1):
            continue
        if normal and runs_on(normal[-1], atom):
            atom = joined(normal.pop(), atom)
        normal.append(atom)
    return tuple(normal)
