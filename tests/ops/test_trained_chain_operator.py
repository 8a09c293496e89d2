"""Trained chains whose forward pass is one launch, in compiled graphs."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ksopt
from ksopt.kernels import plan_autotuner, trained_chain
from ksopt.kernels.families.base import register_family, unregister_family
from ksopt.kernels.problem import Problem
from ksopt.reference import ks_reference
from tests.einsum_layer import ByEinsum
from tests.kernels import toy_chains

CHAIN = "(1,8,4,4)*(4,4,8,1)"  # 32 -> 16 -> 32


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[toy_chains.ToyChain]]:
    monkeypatch.setenv("KSOPT_TUNE", "model")
    with toy_chains.registered() as family:
        yield family


class Activated(ByEinsum):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(super().forward(x))


def by_layer() -> nn.Module:
    return ksopt.KSLinear(32, 32, CHAIN, activation="gelu")


def gradients(function: nn.Module, model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = function(x)
    y.square().sum().backward()
    return [y.detach(), *(one.grad for one in (x, *model.parameters()) if one.grad is not None)]


class KeepsNothing(toy_chains.ToyChain):
    """Predicted to be faster, and without a kernel for trained chains."""

    name = "toy_keeps_nothing"
    us = 5e-4

    def stores_intermediate(self, problem: Problem) -> bool:
        return False


@pytest.mark.parametrize(("toy_us", "stored"), [(1e-3, 1), (1e9, 0)])
def test_the_fastest_that_keeps_is_taken_if_it_beats_a_launch_a_factor(
    toy, toy_us: float, stored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toy, "us", toy_us)
    register_family(KeepsNothing)
    try:
        plan_autotuner.forget()
        chain = ksopt.Chain.parse(CHAIN)
        weights = [torch.randn(p.weight_shape) for p in chain]
        result = trained_chain.run(torch.randn(9, 32), weights, torch.randn(32), 1)
        assert (result is not None) == bool(stored)
        assert len(toy.stored) == stored
    finally:
        unregister_family("toy_keeps_nothing")


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("make", [by_layer, Activated])
def test_gradients_are_those_of_eager_mode(toy, make, dynamic: bool) -> None:
    torch.manual_seed(0)
    model = make()
    twin = copy.deepcopy(model).double()
    compiled = torch.compile(model, backend="ksopt", dynamic=dynamic)
    for rows in ((5, 3), (2, 7) if dynamic else (5, 3)):  # or a size would be compiled again
        x = torch.randn(*rows, 32)
        truth = gradients(twin, twin, x.double())
        actual = gradients(compiled, model, x)
        assert len(actual) == len(truth) == 5
        for mine, theirs in zip(actual, truth, strict=True):
            torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-4)
    assert len(toy.stored) >= 2
    assert all(problem.epilogue.bias for problem in toy.stored)
    assert toy.launches == []


def test_nothing_is_stored_where_nothing_is_trained(toy) -> None:
    model = by_layer()
    compiled = torch.compile(model, backend="ksopt")
    x = torch.randn(4, 32)
    with torch.no_grad():
        compiled(x)
    model.requires_grad_(False)
    compiled(x.requires_grad_()).sum().backward()
    assert toy.stored == []


@pytest.mark.slow
def test_a_frozen_factor_and_no_bias(toy) -> None:
    """Of a weight that is not trained there is no gradient, and one launch per factor is taken."""
    model = ksopt.KSLinear(32, 32, CHAIN, bias=False)
    compiled = torch.compile(model, backend="ksopt")
    x = torch.randn(4, 32)
    twin = copy.deepcopy(model).double()
    for mine, theirs in zip(
        gradients(compiled, model, x), gradients(twin, twin, x.double()), strict=True
    ):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-4)
    assert len(toy.stored) == 1
    model.weights[0].requires_grad_(False)
    twin.weights[0].requires_grad_(False)
    torch._dynamo.reset()
    mine, theirs = gradients(compiled, model, x), gradients(twin, twin, x.double())
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)
    assert len(toy.stored) == 1


def test_the_operator_is_one_of_torchs(toy) -> None:
    x, left, right = torch.randn(6, 32), torch.randn(1, 8, 4, 4), torch.randn(4, 4, 8, 1)
    op = torch.ops.ksopt.ks_chain_keeping.default
    for bias in (torch.randn(32), None):
        torch.library.opcheck(op, (x, [left, right], bias), test_utils="test_faketensor")
        torch.library.opcheck(op, (x, [left, right], bias), test_utils="test_schema")
        y, between, packed = op(x, [left, right], bias)
        assert packed.shape == (0,)
        assert op(x, [left, right], bias, packed=8)[2].shape == (8,)
        torch.testing.assert_close(between, ks_reference(x, right))
        expected = ks_reference(between, left)
        torch.testing.assert_close(y, expected if bias is None else expected + bias)
