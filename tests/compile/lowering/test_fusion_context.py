"""The operations around a site decide which copies cost time, and so how the site is timed."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ksopt
from ksopt.nn import KSLinear

WEIGHT = nn.Parameter(torch.randn(4, 8, 8))
DENSE = nn.Parameter(torch.randn(32, 32))
BARE = KSLinear(32, 32, "(1,8,8,4)*(4,8,8,1)", bias=False)
BIASED = KSLinear(32, 32, "(1,8,8,4)*(4,8,8,1)")


def blocks(x):
    return torch.einsum("bgi,goi->bgo", x.view(-1, 4, 8), WEIGHT).flatten(1)


@pytest.mark.parametrize(
    ("model", "fused"),
    [
        (blocks, ()),
        (lambda x: blocks(F.layer_norm(x, (32,))), ("before",)),
        (lambda x: blocks(F.layer_norm(x, (32,)).view(-1, 2, 16).flatten(1)), ("before",)),
        (lambda x: F.gelu(blocks(x)), ("behind",)),
        (lambda x: blocks(x.relu()) + x, ("before", "behind")),
        (lambda x: blocks(F.linear(x, DENSE)), ()),
        (lambda x: F.linear(blocks(x).view(-1, 32), DENSE), ()),
        (lambda x: torch.chunk(blocks(x), 2, -1)[1].tanh(), ("behind",)),
        (lambda x: blocks(F.linear(x, DENSE) + 1) @ DENSE, ("before",)),
    ],
)
def test_where_a_copy_would_be_fused(model, fused):
    (site,) = ksopt.explain(model, torch.randn(5, 32)).sites
    assert site.fused == fused
    assert site.to_json()["fused"] == list(fused)


@pytest.mark.parametrize(
    ("model", "fused"),
    [
        (lambda x: blocks(BARE(x)), ()),
        (lambda x: BARE(blocks(x)), ()),
        (lambda x: BIASED(blocks(x)), ()),
        # Inductor adds the bias, and may write the sum in another order at once.
        (lambda x: blocks(BIASED(x)), ("before",)),
        (lambda x: F.relu(blocks(BIASED(x).view(-1, 4, 8).flatten(1))), ("before", "behind")),
    ],
)
def test_a_layer_of_ksopts_is_a_product_beside_it(model, fused):
    sites = ksopt.explain(model, torch.randn(5, 32)).sites
    assert [site.fused for site in sites if site.spelling == "einsum"] == [fused]


def test_a_bias_in_the_product_is_behind_it():
    bias = nn.Parameter(torch.randn(4, 1, 8))

    def model(x):
        y = torch.baddbmm(bias, x.view(-1, 4, 8).transpose(0, 1), WEIGHT)
        return y.transpose(0, 1).flatten(1)

    (site,) = ksopt.explain(model, torch.randn(5, 32)).sites
    assert site.fused == ("behind",)
