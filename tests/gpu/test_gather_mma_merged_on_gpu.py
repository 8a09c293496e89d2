"""Chains whose product is no factor, by one matrix with holes, on a GPU."""

import pytest
import torch
from torch.nn import functional as F

from ksopt import KSLinear
from ksopt.kernels import plan_autotuner, registry
from ksopt.kernels.families.base import family_of
from ksopt.kernels.families.gather_mma_merged import MergedLauncher
from ksopt.kernels.problem import DeviceSpec, Epilogue, Problem
from ksopt.patterns.chain import Chain
from ksopt.reference import chain_reference

pytestmark = pytest.mark.gpu

CHAINS = [
    "(3,5,2,7)*(2,21,11,1)",
    "(42,2,4,2)*(1,48,1,7)",
    "(21,16,242,2)*(6,77,8,22)",
    "(24,24,1,1)*(4,1,40,6)",
    "(112,14,27,6)*(32,567,16,1)",
    "(24,3,1,1)*(4,1,8,6)*(64,3,2,1)",
]
DTYPES = [torch.bfloat16, torch.float32]


def spec():
    return DeviceSpec.of_device(torch.cuda.current_device())


def tiles_of(problem, rows):
    """Those of the best prediction, and others."""
    ranked = registry.ranked(family_of("gather_mma_merged"), problem, rows, spec())
    return [*ranked[:2], *ranked[2 :: max(1, len(ranked) // 4)]][:6]


def author(x, weights):
    for weight in reversed(weights):
        a, _, c, d = weight.shape
        x = torch.einsum("nacd,abcd->nabd", x.view(-1, a, c, d), weight).reshape(len(x), -1)
    return x


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 7, 425, 3001])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chain", CHAINS)
def test_every_tile_is_as_exact_as_its_author(chain, dtype, rows):
    chain = Chain.parse(chain)
    problem = Problem(chain, str(dtype).removeprefix("torch."), False)
    shapes = [p.weight_shape for p in chain]
    weights = [torch.nn.Parameter(torch.randn(s, device="cuda").to(dtype)) for s in shapes]
    x = torch.randn(rows, chain.in_features, device="cuda").to(dtype)
    wide = [weight.double() for weight in weights]
    truth = chain_reference(x.double(), wide)
    allowed = 2 * (author(x, weights).double() - truth).norm() + 1e-7 * truth.norm()
    hit = x.clone()
    hit[0, 0], hit[rows - 1, -1], hit[rows // 2, 1] = torch.inf, torch.nan, -torch.inf
    reached = chain_reference(hit.double(), wide).isfinite()
    shifted = torch.empty(x.numel() + 1, dtype=dtype, device="cuda")[1:].view_as(x).copy_(x)
    for candidate in tiles_of(problem, rows):
        call = candidate.build(0)
        assert isinstance(call, MergedLauncher)
        for one in (x, shifted):
            out = torch.full((rows, chain.out_features), torch.nan, dtype=dtype, device="cuda")
            y = call(one, weights, None, None, out)
            assert call.is_cached(weights)
            assert (y.double() - truth).norm() <= allowed, candidate.label
        assert torch.equal(call(hit, weights).isfinite(), reached), candidate.label


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_takes_it(dtype, monkeypatch, tmp_path):
    """Also from the host library's table, and after its weights have changed."""
    monkeypatch.setenv("KSOPT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("KSOPT_TUNE", "model")
    merged = family_of("gather_mma_merged")
    monkeypatch.setattr(type(merged), "predicted_us", lambda *_: 1e-3)
    plan_autotuner.forget()
    chain = Chain.parse("(3,5,2,7)*(2,21,11,1)")
    layer = KSLinear(chain.in_features, chain.out_features, chain, activation="gelu")
    layer = layer.to("cuda", dtype)
    x = torch.randn(300, chain.in_features, device="cuda", dtype=dtype)
    problem = Problem(
        chain, str(dtype).removeprefix("torch."), False, epilogue=Epilogue(True, "gelu")
    )
    assert registry.best_predicted(problem, 300, spec())[0].name == merged.name
    for _ in range(2):
        for _ in range(3):
            weights = list(layer.weights)
            truth = chain_reference(x.double(), [weight.double() for weight in weights])
            truth = F.gelu(truth + layer.bias.double())
            theirs = F.gelu(author(x, weights) + layer.bias)
            allowed = 2 * (theirs.double() - truth).norm() + 1e-6 * truth.norm()
            assert (layer(x).double() - truth).norm() <= allowed
        layer.weights[0].mul_(-2)
    plan_autotuner.forget()
