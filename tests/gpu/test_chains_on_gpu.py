"""Chains in one launch, through the public doors: values against float64, epilogues, graphs."""

import random

import pytest
import torch

import ksopt
from ksopt.epilogue import ACTIVATIONS, with_epilogue
from ksopt.kernels import planner
from ksopt.kernels.families.base import family_of
from ksopt.kernels.problem import DeviceSpec, Epilogue, Problem
from ksopt.patterns.chain import Chain
from ksopt.reference import chain_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="warpgroup products need compute capability 9.0",
    ),
]

CHAINS = (
    *("(1,192,48,2)*(2,48,192,1)", "(1,96,64,4)*(8,32,48,1)", "(1,256,64,1)*(1,64,256,1)"),
    *("(1,48,16,8)*(2,64,192,1)", "(1,40,24,2)*(3,16,40,1)", "(1,384,64,4)*(4,64,96,1)"),
)
BATCHES = (1, 7, 63, 64, 1000, 4133)
TILES_EACH = 3


def operands(chain, batch, dtype, siblings=1, bias=True, residual=True):
    generator = torch.Generator("cuda").manual_seed(batch)

    def normal(*shape):
        drawn = torch.randn(shape, generator=generator, device="cuda", dtype=torch.float64)
        return drawn.to(dtype)

    weights = [normal(*p.weight_shape) / p.c**0.5 for _ in range(siblings) for p in chain]
    features = siblings * chain.out_features
    return (
        normal(batch, chain.in_features),
        weights,
        normal(features) if bias else None,
        normal(batch, features) if residual else None,
    )


def expected(chain, x, weights, bias, residual, activation, rounded=None):
    """In float64; with ``rounded`` as PyTorch does in that dtype, step by step."""
    dtype = torch.float64 if rounded is None else rounded
    parts = []
    for at in range(0, len(weights), len(chain)):
        own = [weight.to(dtype) for weight in weights[at : at + len(chain)]]
        parts.append(chain_reference(x.to(dtype), own, "batch_first"))
    bias = None if bias is None else bias.to(dtype)
    residual = None if residual is None else residual.to(dtype)
    return with_epilogue(torch.cat(parts, -1), bias, activation, residual)


def check(actual, case, chain, activation):
    truth = expected(chain, *case, activation)
    plain = expected(chain, *case, activation, rounded=case[0].dtype)
    assert torch.isfinite(actual).all()
    error, allowed = ((y.double() - truth).norm() / truth.norm() for y in (actual, plain))
    assert error <= 1.2 * allowed


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("text", CHAINS)
def test_every_tile_and_batch(text, dtype):
    chain, family = Chain.parse(text), family_of("chain_wgmma16")
    device = DeviceSpec.of_device(0)
    for activation, bias, residual, siblings in (
        ("none", False, False, 1),
        ("gelu", True, False, 1),
        ("none", True, True, 2),
    ):
        name = str(dtype).removeprefix("torch.")
        after = Epilogue(bias, activation, residual)
        problem = Problem(chain, name, False, epilogue=after, siblings=siblings)
        reason = family.unsupported_reason(problem, device)
        if reason is not None:
            assert siblings > 1
            continue
        tiles = list(family.configs(problem, device))
        tiles = [tile for tile in tiles if family.fits(problem, tile, device)]
        drawn = random.Random(text).sample(tiles, min(TILES_EACH, len(tiles)))
        drawn += {tile.cluster: tile for tile in tiles}.values()  # one of each size of clusters
        for tile in drawn:
            launch = family.launcher(problem, tile, 0)
            for batch in BATCHES:
                case = operands(chain, batch, dtype, siblings, bias, residual)
                out = case[0].new_full((batch, problem.out_features), torch.nan)
                check(launch(*case, out), case, chain, activation)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_layer_is_one_launch_with_its_bias_and_activation(activation):
    chain = Chain.parse("(1,384,96,2)*(2,96,384,1)")
    case = operands(chain, 4096, torch.bfloat16, residual=True)
    x, weights, bias, residual = case
    with torch.no_grad():
        y = ksopt.ks_linear(x, weights, bias, activation=activation, residual=residual)
    check(y, case, chain, activation)
    problem = Problem(chain, "bfloat16", False, epilogue=Epilogue(True, activation, True))
    assert planner.plan_of(problem, 4096).is_whole


def test_rows_that_lie_otherwise():
    chain = Chain.parse("(1,192,48,2)*(2,48,192,1)")
    x, weights, bias, _ = operands(chain, 600, torch.bfloat16, residual=False)
    wide = torch.randn(600, 400, device="cuda").bfloat16()
    for rows in (wide[:, 8:392], wide[:, 3:387], wide[::2, 8:392], x.T.contiguous().T):
        case = (rows, weights, bias, None)
        with torch.no_grad():
            check(ksopt.ks_linear(rows, weights, bias), case, chain, "none")
    three = x.view(4, 150, 384)
    with torch.no_grad():
        y = ksopt.ks_linear(three, weights, bias)
    assert y.shape == (4, 150, 384)
    check(y.flatten(0, 1), (x, weights, bias, None), chain, "none")


def test_a_weight_that_changes_is_packed_again():
    chain = Chain.parse("(1,384,96,2)*(2,96,384,1)")
    x, weights, bias, _ = operands(chain, 4096, torch.bfloat16, residual=False)
    for at in (0, 1, 0):
        with torch.no_grad():
            check(ksopt.ks_linear(x, weights, bias), (x, weights, bias, None), chain, "none")
            weights[at].mul_(2)
            check(ksopt.ks_linear(x, weights, bias), (x, weights, bias, None), chain, "none")


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_compiled_layer(mode):
    layer = ksopt.KSLinear(768, 768, "(1,384,96,2)*(2,96,384,1)", activation="gelu")
    layer = layer.cuda().bfloat16()
    compiled = torch.compile(layer, backend="ksopt", mode=mode)
    chain = Chain.parse("(1,384,96,2)*(2,96,384,1)")
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(4096, 768, device="cuda").bfloat16()
            y = compiled(x).clone()
            check(y, (x, list(layer.weights), layer.bias, None), chain, "gelu")
            layer.weights[0].mul_(1.1)


def test_nan_and_infinity_stay_in_their_row():
    chain = Chain.parse("(1,384,96,2)*(2,96,384,1)")
    x, weights, bias, _ = operands(chain, 4096, torch.bfloat16, residual=False)
    x[7, 3], x[4095, 700] = torch.nan, torch.inf
    with torch.no_grad():
        y = ksopt.ks_linear(x, weights, bias)
    broken = ~torch.isfinite(y).all(1)
    assert broken.nonzero().flatten().tolist() == [7, 4095]
    # The blocks of x that the infinity is not in are finite where no output class reads them.
    plain = expected(chain, x, weights, bias, None, "none", rounded=torch.bfloat16)
    assert torch.equal(torch.isfinite(y), torch.isfinite(plain))
