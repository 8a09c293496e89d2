"""Projection on a GPU: the same errors as on the CPU, and fast where it was promised."""

import pytest
import torch

import ksopt
from ksopt import Chain
from ksopt.reference import chain_to_dense

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "chain",
    [
        Chain.monarch(96, 192, p=4),
        Chain.square_dyadic(64),
        Chain.kaleidoscope(16),
        Chain.parse("(1,2,3,2)*(2,3,2,1)"),
    ],
    ids=str,
)
def test_it_agrees_with_the_cpu(chain: Chain, dtype: torch.dtype) -> None:
    matrix = torch.randn(chain.shape).to(dtype)
    here = ksopt.project(matrix, chain, iterations=5)
    there = ksopt.project(matrix.cuda(), chain, iterations=5)
    assert {weight.device.type for weight in there.weights} == {"cuda"}
    assert {weight.dtype for weight in there.weights} == {dtype}
    assert there.relative_error == pytest.approx(here.relative_error, rel=1e-4)
    assert there.lower_bound == pytest.approx(here.lower_bound, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("p", [2, 16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_factors_of_4096_are_fitted(p: int, dtype: torch.dtype) -> None:
    chain = Chain.monarch(4096, 4096, p)
    matrix = torch.randn(chain.shape, device="cuda").to(dtype)
    actual = ksopt.project(matrix, chain)
    assert actual.relative_error < 1


@pytest.mark.parametrize("p", [2, 64, 512])
def test_a_large_product_of_the_chain_is_recovered(p: int) -> None:
    chain = Chain.monarch(4096, 4096, p)
    weights = [torch.randn(one.weight_shape, device="cuda") for one in chain]
    actual = ksopt.project(chain_to_dense(weights), chain)
    print(f"{chain}: relative error {actual.relative_error:.2e}")
    # The factors are float32: each is rounded once, and so is the matrix.
    assert actual.relative_error < 4 * torch.finfo(torch.float32).eps
    assert actual.guarantee == 1


def test_a_model_is_converted_where_it_is() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 128)).to("cuda", torch.bfloat16)
    ksopt.convert(model, {"0": Chain.monarch(64, 128, p=4)})
    assert {p.device.type for p in model.parameters()} == {"cuda"}
    assert model(torch.randn(3, 64, device="cuda", dtype=torch.bfloat16)).shape == (3, 128)
