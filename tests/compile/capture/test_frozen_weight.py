"""Patterns in the values of matrices."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ksopt.compile.capture.frozen_weight import FrozenValues, fits, pattern_of
from ksopt.patterns.chain import Pattern
from ksopt.reference import chain_to_dense


@given(st.tuples(*[st.integers(1, 5)] * 4))
def test_a_factor_is_recognised_in_its_own_matrix(numbers):
    pattern = Pattern(*numbers)
    weight = torch.rand(pattern.weight_shape) + 0.5
    dense = chain_to_dense([weight])
    actual = pattern_of(dense)
    if pattern.a * pattern.d == 1:
        assert actual is None
        return
    assert actual is not None
    assert actual.a * actual.d >= pattern.a * pattern.d  # a diagonal has several names
    assert fits(dense, actual)
    assert actual.nnz <= pattern.nnz


def test_holes_inside_the_support_do_not_matter():
    weight = torch.randn(3, 4, 5, 2)
    weight[weight.abs() < 0.3] = 0.0
    assert pattern_of(chain_to_dense([weight])) == Pattern(3, 4, 5, 2)


@pytest.mark.parametrize(
    "matrix",
    [torch.ones(6, 4), torch.zeros(6, 4), torch.ones(5, 7), torch.eye(8) + torch.eye(8).roll(1, 1)],
    ids=["dense", "zero", "coprime", "circulant"],
)
def test_other_matrices_have_none(matrix):
    assert pattern_of(matrix) is None


def test_one_entry_outside_counts_unless_it_is_tolerated():
    dense = chain_to_dense([torch.rand(2, 4, 4, 1) + 0.5])
    dense[0, 7] = 1e-6
    assert pattern_of(dense) is None
    assert pattern_of(dense, tolerance=1e-4) == Pattern(2, 4, 4, 1)
    assert not fits(dense, Pattern(2, 4, 4, 1))
    assert fits(dense, Pattern(2, 4, 4, 1), tolerance=1e-4)


def test_only_what_is_frozen_is_looked_at():
    dense = chain_to_dense([torch.rand(2, 4, 4, 1) + 0.5])
    trained = dense.clone().requires_grad_()
    with torch.inference_mode():
        uncounted = dense.clone()
    values = FrozenValues([dense, trained, uncounted, dense.flatten(), 3, dense.to("meta")])
    assert [values.pattern(at) for at in range(7)] == [Pattern(2, 4, 4, 1), *[None] * 6]
    assert values.patterns == {0: Pattern(2, 4, 4, 1)}
