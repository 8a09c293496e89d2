"""Matrices of any scale that their dtype holds are projected as they are near 1."""

from __future__ import annotations

import pytest
import torch

from ksopt import Chain, convert, project
from ksopt.errors import InvalidInputError

# One factor, two, three split one after the other, and three refitted in turn.
CHAINS = {
    "one": "(2,3,4,2)",
    "two": "(1,4,3,4)*(4,3,4,1)",
    "dyadic": "(1,2,2,4)*(2,2,2,2)*(4,2,2,1)",
    "refitted": str(Chain.kaleidoscope(4)),
}
# The exponent of two of the largest entry, at either end of the range.
ENDS = {
    torch.float64: (1023, 700, -700, -1000, -1060),
    torch.float32: (127, -100, -126, -140),
    torch.bfloat16: (127, -100, -126),
    torch.float16: (15, -14, -18),
}


def matrix_of(chain: Chain, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    entries = torch.randn(*chain.shape, generator=generator, dtype=torch.float64)
    return (entries / entries.abs().max() * 0.9).to(dtype)


def times_power(matrix: torch.Tensor, exponent: int) -> torch.Tensor:
    """In float64, by whole powers of two that are numbers of float64's."""
    half = exponent // 2
    return matrix.double() * 2.0**half * 2.0 ** (exponent - half)


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize(
    ("dtype", "exponent"), [(dtype, end) for dtype, ends in ENDS.items() for end in ends], ids=str
)
def test_the_error_is_that_of_the_same_matrix_near_1(name, dtype, exponent):
    chain = Chain.parse(CHAINS[name])
    matrix = times_power(matrix_of(chain, dtype), exponent).to(dtype)
    # With the digits that subnormal numbers have lost.
    near_1 = times_power(matrix, -exponent)
    projection = project(matrix, chain, refine=3, dtype=torch.float64)
    expected = project(near_1.to(dtype), chain, refine=3, dtype=torch.float64)
    assert all(weight.isfinite().all() for weight in projection.weights)
    assert projection.relative_error == pytest.approx(expected.relative_error, rel=1e-6, abs=1e-13)
    assert projection.lower_bound == pytest.approx(expected.lower_bound, rel=1e-6, abs=1e-13)
    assert projection.method == expected.method
    assert projection.iterations == expected.iterations
    # The reported error is that of the weights, each scaled near 1.
    shares = [weight.abs().max().log2().ceil().int().item() for weight in projection.weights]
    dense = torch.eye(chain.in_features, dtype=torch.float64)
    for pattern, weight, share in reversed(
        list(zip(chain, projection.weights, shares, strict=True))
    ):
        small, (a, b, c, d) = times_power(weight, -share), pattern.weight_shape
        dense = torch.einsum("ikljn,iklj->ikjn", dense.view(a, 1, c, d, -1), small)
        dense = dense.reshape(a * b * d, -1)
    error = (times_power(dense, sum(shares) - exponent) - near_1).norm() / near_1.norm()
    assert projection.relative_error == pytest.approx(error.item(), rel=1e-9, abs=1e-13)


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("dtype", ENDS, ids=str)
def test_weights_in_the_matrix_s_own_dtype(name, dtype):
    chain = Chain.parse(CHAINS[name])
    for exponent in ENDS[dtype]:
        matrix = times_power(matrix_of(chain, dtype), exponent).to(dtype)
        projection = project(matrix, chain)
        assert all(
            weight.dtype == dtype and weight.isfinite().all() for weight in projection.weights
        )
        assert (
            0 <= projection.lower_bound <= projection.relative_error <= 1 + torch.finfo(dtype).eps
        )


def test_one_factor_keeps_every_digit():
    pattern = Chain.parse("(2,3,4,2)")
    weight = torch.randn(2, 3, 4, 2, dtype=torch.float64) * 1e307
    dense = torch.zeros(2, 3, 2, 2, 4, 2, dtype=torch.float64)
    for i in range(2):
        for j in range(2):
            dense[i, :, j, i, :, j] = weight[i, :, :, j]
    projection = project(dense.view(12, 16), pattern)
    torch.testing.assert_close(projection.weights[0], weight, rtol=1e-14, atol=0)
    assert projection.relative_error < 1e-14


def test_zeros_stay_zeros():
    projection = project(torch.zeros(16, 16, dtype=torch.float64), CHAINS["two"])
    assert projection.relative_error == 0
    assert projection.lower_bound == 0


def test_weights_that_their_dtype_cannot_hold_are_refused():
    matrix = torch.full((16, 16), 1e300, dtype=torch.float64)
    with pytest.raises(InvalidInputError, match=r"reach .*e\+150, but float16 holds 6.6e\+04"):
        project(matrix, CHAINS["two"], dtype=torch.float16)


@pytest.mark.parametrize("scale", [1e200, 1e-200])
def test_converted_layers_report_the_same_errors(scale):
    reports = []
    for factor in (1.0, scale):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 32, bias=False, dtype=torch.float64))
        with torch.no_grad():
            model[0].weight.mul_(factor)
        plan = {"16x32": ["(1,4,4,4)*(4,4,4,1)", "(1,4,4,4)*(4,4,4,1)"]}
        (layer,) = convert(model, plan).layers
        reports.append((layer.relative_error, layer.lower_bound))
    assert 0 < reports[0][0] < 1
    assert reports[1] == pytest.approx(reports[0], rel=1e-9)
