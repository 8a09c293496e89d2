"""The chains whose weight gradients are computed by one launch."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from checks import H200

from ksopt.kernels import chain_gradients, gradient_autotuner, weight_gradients
from ksopt.kernels.families.common import chain_grads_tile as kernels
from ksopt.kernels.families.common import pytorch_cost
from ksopt.kernels.families.common.chain_grads_tile import Chain
from ksopt.kernels.families.gradient_base import GradientProblem
from ksopt.patterns import chain as patterns

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def spec(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = SimpleNamespace(spec=lambda _: H200)
    monkeypatch.setattr(gradient_autotuner, "backend_of", lambda _: backend)
    monkeypatch.setenv("KSOPT_TUNE", "model")


def chain_of(text: str) -> Chain:
    left, right = patterns.Chain.parse(text)
    return left, right


def is_one(
    text: str, rows: int = 4096, dtype: torch.dtype = torch.bfloat16, siblings: int = 1
) -> bool:
    return chain_gradients.is_by_kernel(chain_of(text), dtype, rows, CUDA, True, siblings)


def test_where_one_launch_is_predicted_to_be_faster() -> None:
    assert is_one("(1,512,128,2)*(2,128,512,1)")
    assert is_one("(1,192,64,2)*(2,64,192,1)", 25_216)
    # Eight times the products that are needed, for an operand that copies of 3 us would reorder.
    assert not is_one("(1,2048,512,8)*(8,512,2048,1)")
    assert not is_one("(1,512,128,2)*(2,128,512,1)", dtype=torch.float32)
    assert not is_one("(1,512,128,16)*(16,128,512,1)")
    assert not is_one("(1,512,128,2)*(2,128,512,1)", rows=0)


def test_where_one_launch_of_siblings_is_predicted_to_be_faster() -> None:
    for siblings in (2, 3, 4):
        assert is_one("(1,192,64,2)*(2,64,192,1)", 25_216, siblings=siblings)
        assert is_one("(1,512,128,2)*(2,128,512,1)", siblings=siblings)
        assert not is_one("(1,512,128,16)*(16,128,512,1)", siblings=siblings)
    assert not is_one("(1,192,64,2)*(2,64,192,1)", siblings=5)


@pytest.mark.parametrize("text", ["(1,192,64,2)*(2,64,192,1)", "(1,512,128,16)*(16,128,512,1)"])
def test_siblings_compete_with_the_best_way_of_one(text: str) -> None:
    chain = chain_of(text)
    problem = GradientProblem("chain_weights", chain, "bfloat16", True)
    factors = chain_gradients.by_factors_us(chain, "bfloat16", 4096, H200, True)
    assert chain_gradients.without_us(problem, 4096, H200) == factors
    best = [one.predicted_us for one in gradient_autotuner.ranked(problem, 4096, H200)]
    several = replace(problem, siblings=3)
    assert chain_gradients.without_us(several, 4096, H200) == 3 * min([factors, *best])


def test_siblings_share_waves_and_what_they_read() -> None:
    """So they take less than as many launches, and fewer shares of each tile fill the device."""
    chain = chain_of("(1,192,64,2)*(2,64,192,1)")
    one, three = (
        gradient_autotuner.ranked(
            GradientProblem("chain_weights", chain, "bfloat16", True, siblings), 25_216, H200
        )[0]
        for siblings in (1, 3)
    )
    assert one.predicted_us < three.predicted_us < 3 * one.predicted_us
    for config in kernels.configs(chain):
        for launch in kernels.launches_of(config, chain, 25_216, H200, 3):
            assert launch.siblings == 3
            clusters = launch.blocks(chain) // config.cluster
            assert launch.shares == (1, 1) or clusters <= config.clusters(H200)
            assert launch.blocks(chain) == 3 * replace(launch, siblings=1).blocks(chain)


def test_elsewhere_nothing_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = chain_of("(1,512,128,2)*(2,128,512,1)")
    call = (chain, torch.bfloat16, 4096)
    assert not chain_gradients.is_by_kernel(*call, torch.device("cpu"), True)
    monkeypatch.setenv("KSOPT_TUNE", "off")
    assert not chain_gradients.is_by_kernel(*call, CUDA, True)


def test_what_a_launch_a_factor_takes() -> None:
    """The bias costs a sum of its own only where no kernel has the left factor."""
    by_kernel = chain_of("(1,512,128,2)*(2,128,512,1)")
    by_torch = chain_of("(1,512,128,16)*(16,128,512,1)")
    for chain in (by_kernel, by_torch):
        without, with_bias = (
            chain_gradients.by_factors_us(chain, "bfloat16", 4096, H200, bias)
            for bias in (False, True)
        )
        parts = [weight_gradients.predicted_us(p, "bfloat16", 4096, H200) for p in chain]
        assert without == sum(parts)
        extra = pytorch_cost.bias_gradient_us(chain[0].out_features, 4096)
        assert with_bias - without == pytest.approx(extra if chain is by_torch else 0.0)


def test_the_patterns_follow_from_the_rows() -> None:
    left, right = chain_of("(3,8,4,4)*(6,8,16,1)")
    of = chain_gradients.Factors(3, 4, 6, 1)
    widths = (left.out_features, left.in_features, right.out_features, right.in_features)
    assert of.chain(*widths) == (left, right)


def test_more_rows_take_longer() -> None:
    chain = chain_of("(1,192,64,2)*(2,64,192,1)")
    times = [
        gradient_autotuner.ranked(GradientProblem("chain_weights", chain, "bfloat16"), rows, H200)[
            0
        ].predicted_us
        for rows in (64, 4096, 25_216, 200_000)
    ]
    assert times == sorted(times)
