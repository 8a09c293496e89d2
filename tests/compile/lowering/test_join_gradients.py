"""Trained chains that an author wrote become one operator where gradients are computed together."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ksopt.ops import chain_gradients
from tests.einsum_layer import ByEinsum


@pytest.fixture
def joint(monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch computes the weights' gradients of any chain faster."""
    monkeypatch.setattr(chain_gradients, "is_faster", lambda *_: True)


class Mlp(nn.Module):
    """Two layers that read each other, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = ByEinsum(), ByEinsum()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Stacked(nn.Module):
    """Two layers with nothing between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = ByEinsum(), ByEinsum()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x))
        return y


def check(model: nn.Module, x: Tensor) -> None:
    """A step compiled by the backend has the gradients of one in float64."""
    twin = copy.deepcopy(model).double()
    compiled = torch.compile(model, backend="ksopt", fullgraph=True)
    for function, inputs in ((compiled, x), (twin, x.double())):
        function(inputs).square().sum().backward()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if mine.grad is not None:
            # Sums of some 100 float32 products of numbers up to about 100.
            torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-4, atol=1e-3)


def operators(seen: Any) -> list[str]:
    (graph,) = seen.graphs
    return [name for node in graph.nodes if "ks_" in (name := str(node.target))]


@pytest.mark.parametrize("model", [Mlp, Stacked])
def test_each_chain_is_one_operator_with_its_bias(joint, compiled_by_eager, model) -> None:
    check(model(), torch.randn(3, 5, 32))
    names = operators(compiled_by_eager)
    assert len(names) == 2
    assert all("ks_chain" in one for one in names)
    chains = [one for one in compiled_by_eager.graphs[0].nodes if "ks_chain" in str(one.target)]
    assert all(one.args[2] is not None for one in chains)
    (report,) = compiled_by_eager.reports
    assert report.passes["layers_in_one_launch"] == 0
    assert all(site.one_launch is None for site in report.sites)


def test_a_chain_that_autocast_casts_is_one_operator(joint, compiled_by_eager) -> None:
    model, x = Mlp(), torch.randn(6, 32)
    twin = copy.deepcopy(model).double()
    compiled = torch.compile(model, backend="ksopt", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = compiled(x)
    y.square().sum().backward()
    twin(x.double()).square().sum().backward()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert mine.grad is not None
        assert mine.grad.dtype is torch.float32
        # Some roundings to 8 bits, of which each is half a percent at most.
        assert (mine.grad - theirs.grad).norm() < 0.02 * theirs.grad.norm()
    names = operators(compiled_by_eager)
    assert len(names) == 2
    assert all("ks_chain" in one for one in names)


def test_where_they_are_computed_apart_nothing_changes(compiled_by_eager) -> None:
    check(Mlp(), torch.randn(6, 32))
    names = operators(compiled_by_eager)
    assert len(names) == 4
    assert all("ks_mm" in one for one in names)


def test_a_frozen_factor_is_left(joint, compiled_by_eager) -> None:
    model = Mlp()
    model.up.left.requires_grad_(False)
    check(model, torch.randn(6, 32))
    assert sum("ks_chain" in one for one in operators(compiled_by_eager)) == 1


def test_a_value_between_that_others_read_is_left(joint, compiled_by_eager) -> None:
    class Shown(ByEinsum):
        def forward(self, x: Tensor) -> Tensor:
            z = torch.einsum("nacd,abcd->nabd", x.view(-1, 4, 8, 1), self.right).reshape(-1, 16)
            y = torch.einsum("nacd,abcd->nabd", z.view(-1, 1, 4, 4), self.left).reshape(-1, 32)
            return torch.cat([y + self.bias, torch.sin(z)], 1)

    check(Shown(), torch.randn(6, 32))
    assert not any("ks_chain" in one for one in operators(compiled_by_eager))


def test_inference_is_left(joint, compiled_by_eager) -> None:
    model = Mlp()
    with torch.no_grad():
        torch.compile(model, backend="ksopt", fullgraph=True)(torch.randn(6, 32))
    assert not any("ks_chain" in one for one in operators(compiled_by_eager))


def test_a_graph_that_writes_in_place_is_left(joint, compiled_by_eager) -> None:
    class Writing(ByEinsum):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            y[:1].mul_(2)
            return y

    check(Writing(), torch.randn(6, 32))
    assert not any("ks_chain" in one for one in operators(compiled_by_eager))
