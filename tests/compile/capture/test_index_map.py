"""Index maps, against torch itself on tensors that hold their own indices."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ksopt.compile.capture.index_map import (
    Atom,
    IndexMap,
    NotNestedError,
    align,
    compose,
    expand,
    identity,
    is_identity,
    narrow,
    permute,
    regroup,
    reshape,
)

ROOTS = [(24,), (4, 6), (2, 12, 3), (8, 1, 9), (36, 2), (5, 4)]


def elements(index_map: IndexMap, root: tuple[int, ...]) -> torch.Tensor:
    """The flat root index of every element, computed digit by digit, as plainly as possible."""
    step = [math.prod(root[axis + 1 :]) for axis in range(len(root))]
    table = torch.tensor(sum(amount * step[axis] for axis, amount in index_map.offsets))
    for atom in index_map.atoms:
        move = 0 if atom.axis is None else atom.stride * step[atom.axis]
        table = table.unsqueeze(-1) + torch.arange(atom.size) * move
    return table.reshape(index_map.shape)


def check(index_map: IndexMap, root: tuple[int, ...], expected: torch.Tensor) -> None:
    assert index_map.shape == tuple(expected.shape)
    assert torch.equal(elements(index_map, root), expected)
    for atoms in index_map.dims:
        assert all(atom.size > 1 for atom in atoms)
        for high, low in itertools.pairwise(atoms):
            assert (high.axis, high.stride) != (low.axis, low.span)


def factorizations(total: int) -> list[tuple[int, ...]]:
    actual = [(total,), (1, total)]
    for one in range(2, total):
        if total % one == 0:
            actual.append((one, total // one))
            actual += [(one, *rest) for rest in factorizations(total // one) if len(rest) == 2]
    return actual


def step(data: st.DataObject, index_map: IndexMap, tensor: torch.Tensor):
    """One random operation, on the map and on the tensor; the map is None if it says it cannot."""
    kind = data.draw(st.sampled_from(["reshape", "permute", "narrow", "expand"]))
    try:
        if kind == "permute":
            order = data.draw(st.permutations(range(tensor.dim())))
            return permute(index_map, order), tensor.permute(order)
        if kind == "reshape":
            shape = data.draw(st.sampled_from(factorizations(tensor.numel())))
            return reshape(index_map, shape), tensor.reshape(shape)
        if kind == "expand":
            sizes = [3 if size == 1 else size for size in tensor.shape]
            shape = [2, *sizes] if tensor.dim() < 4 else sizes
            return expand(index_map, shape), tensor.expand(shape)
        dim = data.draw(st.integers(0, tensor.dim() - 1))
        start = data.draw(st.integers(0, tensor.shape[dim] - 1))
        length = data.draw(st.integers(1, tensor.shape[dim] - start))
        stride = data.draw(st.sampled_from([1, 1, 2]))
        index = torch.arange(start, start + length, stride)
        actual = narrow(index_map, dim, start, len(index), stride)
        return actual, tensor.index_select(dim, index)
    except NotNestedError:
        return None, tensor


@given(st.data())
def test_any_sequence_of_movements_keeps_track_of_every_element(data):
    root = data.draw(st.sampled_from(ROOTS))
    tensor = torch.arange(math.prod(root)).reshape(root)
    index_map = identity(root)
    check(index_map, root, tensor)
    for _ in range(data.draw(st.integers(1, 6))):
        index_map, tensor = step(data, index_map, tensor)
        if index_map is None or tensor.numel() > 4000:
            return
        check(index_map, root, tensor)


@given(st.data())
def test_maps_compose_as_the_tensors_do(data):
    root = data.draw(st.sampled_from(ROOTS))
    tensor = torch.arange(math.prod(root)).reshape(root)
    inner, tensor = step(data, identity(root), tensor)
    if inner is None or tensor.numel() > 4000:
        return
    outer = identity(tuple(tensor.shape))
    for _ in range(2):
        outer, tensor = step(data, outer, tensor)
        if outer is None or tensor.numel() > 4000:
            return
    try:
        composed = compose(outer, inner)
    except NotNestedError:
        return
    check(composed, root, tensor)


@pytest.mark.parametrize("root", ROOTS)
def test_whole_movements_are_never_refused(root):
    """Cases that must not be refused, because refusing is always correct."""
    tensor = torch.arange(math.prod(root)).reshape(root)
    back = identity(root)
    for order in ([*range(1, len(root)), 0], list(range(len(root)))[::-1]):
        moved = permute(back, order)
        flat = reshape(moved, (math.prod(root),))
        check(flat, root, tensor.permute(order).reshape(-1))
        inverse = [order.index(dim) for dim in range(len(root))]
        again = permute(reshape(flat, [root[dim] for dim in order]), inverse)
        assert is_identity(again, root)


def test_a_reshape_across_a_permutation_is_refused_unless_it_nests():
    moved = permute(reshape(identity((24,)), (4, 6)), (1, 0))
    assert reshape(moved, (2, 3, 4)).shape == (2, 3, 4)
    with pytest.raises(NotNestedError):
        reshape(moved, (8, 3))
    # Without the permutation the digits run on, and any factorization will do.
    assert reshape(reshape(identity((24,)), (4, 6)), (3, 8)).shape == (3, 8)


def test_pieces_of_a_dim_start_where_they_start():
    rows = reshape(identity((24,)), (4, 6))
    piece = narrow(rows, 0, 2, 1)
    assert piece.offsets == ((0, 12),)
    assert narrow(narrow(identity((24,)), 0, 6, 12), 0, 3, 2).offsets == ((0, 9),)


def test_aligned_digits_agree():
    pairs = align(regroup([Atom(0, 12, 1)], (12,))[0], [Atom(1, 2, 6), Atom(2, 6, 1)])
    assert [(one.size, one.stride, other.axis) for one, other in pairs] == [(2, 6, 1), (6, 1, 2)]
    with pytest.raises(NotNestedError):
        align([Atom(0, 6, 1)], [Atom(0, 2, 1), Atom(1, 2, 1)])
    with pytest.raises(NotNestedError):
        align([Atom(0, 4, 1), Atom(1, 3, 1)], [Atom(0, 3, 1), Atom(1, 4, 1)])
