"""Plans from one view to another, carried out by torch."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ksopt.compile.capture.index_map import IndexMap, NotNestedError, identity, permute, reshape
from ksopt.compile.capture.reshape_plan import plan


def carried_out(move, tensor):
    at = 0
    for split in move.splits:
        tensor = tensor.unflatten(at, split) if split else tensor.squeeze(at)
        at += len(split)
    tensor = tensor.permute(move.order)
    for at, group in enumerate(move.groups):
        tensor = tensor.flatten(at, at + group - 1) if group else tensor.unsqueeze(at)
    return tensor


def moved(data, index_map, tensor):
    for _ in range(data.draw(st.integers(0, 3))):
        order = data.draw(st.permutations(range(tensor.dim())))
        index_map, tensor = permute(index_map, order), tensor.permute(order)
        shape = data.draw(st.sampled_from([(2, 12, 1, 3), (8, 9), (4, 3, 6), (72,), (2, 2, 18)]))
        try:
            index_map, tensor = reshape(index_map, shape), tensor.reshape(shape)
        except NotNestedError:
            continue
    return index_map, tensor


@given(st.data())
def test_a_plan_leads_from_any_view_to_any_other(data):
    root = data.draw(st.sampled_from([(72,), (8, 9), (2, 1, 36)]))
    numbers = torch.arange(math.prod(root)).reshape(root)
    have, one = moved(data, identity(root), numbers)
    want, other = moved(data, identity(root), numbers)
    try:
        move = plan(have.dims, want.dims)
    except NotNestedError:
        return
    assert torch.equal(carried_out(move, one), other)
    if move.is_nothing:
        assert torch.equal(one, other)


def test_nothing_to_do_is_seen():
    dims = identity((4, 1, 6)).dims
    assert plan(dims, dims).is_nothing
    assert not plan(dims, identity((4, 6)).dims[:1] + dims[2:]).is_nothing


def test_views_that_nest_are_always_reached():
    rows = reshape(identity((5, 24)), (5, 4, 6))
    for order in ([0, 1, 2], [1, 0, 2], [2, 1, 0], [0, 2, 1]):
        want = permute(rows, order)
        numbers = torch.arange(120).reshape(5, 24)
        actual = carried_out(plan(identity((5, 24)).dims, want.dims), numbers)
        assert torch.equal(actual, numbers.reshape(5, 4, 6).permute(order))


def test_parts_and_repetitions_are_refused():
    whole = identity((4, 6))
    with pytest.raises(NotNestedError, match="leaves out"):
        plan(whole.dims, whole.dims[:1])
    with pytest.raises(NotNestedError, match="repeated"):
        plan(whole.dims, IndexMap(whole.dims).dims + identity((3,)).dims + repeated(3))


def repeated(size):
    from ksopt.compile.capture.index_map import expand

    return expand(identity((1,)), (size,)).dims
