"""Strassen's algorithm as terms, and terms that are fitted."""

import pytest
import torch

from ksopt.operators import tile_products


@pytest.mark.parametrize("tile", [2, 4])
def test_strassens_terms_multiply_tiles(tile: int) -> None:
    torch.manual_seed(0)
    terms = tile_products.strassen(tile)
    assert terms.weight.shape == (tile**2, tile_products.exact_terms(tile))
    x, b = torch.randn(2, tile, tile, dtype=torch.float64)
    products = (terms.input.T @ x.flatten()) * (terms.weight.T @ b.flatten())
    torch.testing.assert_close((terms.output @ products).view(tile, tile), x @ b)


@pytest.mark.parametrize("tile", [2, 4])
def test_the_tensor_is_the_product(tile: int) -> None:
    x, b = torch.randn(2, tile, tile, dtype=torch.float64)
    y = torch.einsum("wyx,w,x->y", tile_products.product_tensor(tile), b.flatten(), x.flatten())
    torch.testing.assert_close(y.view(tile, tile), x @ b)


def test_more_terms_lose_less_and_never_more_than_entries_left_out() -> None:
    metric = torch.eye(4, dtype=torch.float64)
    errors = [tile_products.nearest(metric, 2, count).relative_error for count in range(1, 8)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] == 0
    for count, error in enumerate(errors, start=1):
        # Of the eight products of entries, count are computed and the others omitted.
        assert error <= max(0.0, 1 - count / 8) ** 0.5 + 1e-9
    # The border rank of the 2 x 2 product is 7 (Landsberg 2006): six terms cannot be exact.
    assert errors[5] > 0.1


def test_the_error_is_that_of_the_terms_in_the_metric() -> None:
    torch.manual_seed(0)
    metric = torch.linalg.qr(torch.randn(40, 4, dtype=torch.float64)).R * torch.arange(1.0, 5)
    terms = tile_products.nearest(metric, 2, 4)
    target = torch.tensordot(metric, tile_products.product_tensor(2), 1)
    product = torch.einsum("wr,yr,xr->wyx", terms.weight, terms.output, terms.input)
    assert terms.relative_error == pytest.approx(float((product - target).norm() / target.norm()))
    # Least squares: no other weights, the encoders held, come nearer.
    other = terms.weight + 1e-3 * torch.randn_like(terms.weight)
    worse = torch.einsum("wr,yr,xr->wyx", other, terms.output, terms.input)
    assert (worse - target).norm() > (product - target).norm()
