"""The reference is checked against the definition, spelled out entry by entry."""

import itertools

import pytest
import torch

from ksopt.errors import InvalidInputError
from ksopt.reference import chain_reference, chain_to_dense, is_batch_last, ks_reference, to_dense

SHAPES = [(1, 1, 1, 1), (2, 3, 4, 5), (3, 1, 2, 4), (1, 5, 1, 3), (4, 2, 3, 1), (1, 3, 7, 2)]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("shape", SHAPES)
def test_to_dense_is_the_definition(shape):
    a, b, c, d = shape
    weight = random(*shape)
    expected = torch.zeros(a * b * d, a * c * d, dtype=torch.float64)
    for i, k, l, j in itertools.product(range(a), range(b), range(c), range(d)):
        expected[i * b * d + k * d + j, i * c * d + l * d + j] = weight[i, k, l, j]
    assert torch.equal(to_dense(weight), expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_support_is_the_kronecker_product(shape):
    a, b, c, d = shape
    support = torch.kron(torch.kron(torch.eye(a), torch.ones(b, c)), torch.eye(d))
    assert torch.equal(to_dense(torch.ones(shape)), support)


def test_to_dense_keeps_zeros_beside_infinities():
    dense = to_dense(torch.full((2, 1, 1, 2), torch.inf))
    assert torch.equal(dense, torch.diag(torch.full((4,), torch.inf)).nan_to_num(0.0, torch.inf))


@pytest.mark.parametrize("batch", [(), (0,), (1,), (7,), (2, 3), (2, 0, 3)])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_product_is_that_of_the_dense_matrix(shape, batch):
    weight = random(*shape)
    dense = to_dense(weight)
    x = random(*batch, dense.shape[1])
    y = ks_reference(x, weight)
    assert y.shape == (*batch, dense.shape[0])
    torch.testing.assert_close(y, x @ dense.T, rtol=1e-13, atol=1e-13)

    x_last = x.movedim(-1, 0)
    y_last = ks_reference(x_last, weight, "batch_last")
    torch.testing.assert_close(y_last, y.movedim(-1, 0), rtol=1e-13, atol=1e-13)


def test_the_last_factor_of_a_chain_meets_the_input_first():
    weights = [random(1, 4, 3, 2), random(2, 3, 5, 1)]
    x = random(7, 10)
    dense = to_dense(weights[0]) @ to_dense(weights[1])
    torch.testing.assert_close(chain_to_dense(weights), dense)
    torch.testing.assert_close(chain_reference(x, weights), x @ dense.T)
    torch.testing.assert_close(chain_reference(x.T, weights, "batch_last"), dense @ x.T)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.complex128])
def test_any_dtype_is_taken(dtype):
    weight = torch.ones(2, 3, 4, 1, dtype=dtype)
    x = torch.ones(5, 8, dtype=dtype)
    assert torch.equal(ks_reference(x, weight), torch.full((5, 6), 4, dtype=dtype))


def test_an_unknown_layout_is_named():
    assert is_batch_last("batch_last")
    assert not is_batch_last("batch_first")
    with pytest.raises(
        InvalidInputError, match="layout 'bsl' is unknown: it must be 'batch_first'"
    ):
        ks_reference(torch.ones(4), torch.ones(1, 4, 4, 1), "bsl")
