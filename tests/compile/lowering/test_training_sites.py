"""Sites with trained weights are recognised, and the kernels informed."""

import copy

import pytest
import torch
from seen_products import SeenProducts
from torch import nn

import ksopt
from ksopt.compile import backend


class Blocks(nn.Module):
    def __init__(self, n=3, masked=True):
        super().__init__()
        self.masked = masked
        self.weight = nn.Parameter(torch.randn(n, 4, 4))
        self.mask = nn.Buffer(torch.ones(n, 4, 4))

    def forward(self, x):
        weight = self.weight * self.mask if self.masked else self.weight
        return torch.einsum("bni,noi->bno", x.unflatten(1, (-1, 4)), weight).flatten(1)


def is_training(model, x):
    return [site.training for site in ksopt.explain(model, x).sites]


def test_a_site_is_in_training_if_its_weight_is():
    one, two = Blocks(), Blocks().requires_grad_(False)
    model, x = nn.Sequential(one, nn.ReLU(), two), torch.randn(5, 12)
    assert is_training(model, x) == [True, False]
    with torch.no_grad():
        assert is_training(model, x) == [False, False]
    with torch.autocast("cpu", torch.bfloat16):
        assert is_training(model, x) == [True, False]
    assert is_training(two, x.requires_grad_()) == [False]

    def without(x):
        with torch.no_grad():
            return one(x)

    assert is_training(without, x) == [False]


def test_weights_of_loops_are_trained_too():
    weights = nn.ParameterList(torch.randn(4, 4) for _ in range(3))

    def loop(x):
        return torch.cat([p @ w for p, w in zip(x.chunk(3, -1), weights, strict=True)], -1)

    assert is_training(loop, torch.randn(5, 12)) == [True]


def test_the_decision_is_for_training(compiled_by_eager, monkeypatch):
    calls = []
    decide = backend.decide
    monkeypatch.setattr(backend, "decide", lambda site, *_: calls.append(site) or decide(site, *_))
    compiled, x = torch.compile(Blocks(), backend="ksopt"), torch.randn(5, 12)
    compiled(x)
    with torch.no_grad():
        compiled(x)
    assert [site.training for site in calls] == [True, False]


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("by_library", [False, True])
def test_compiled_graphs_tell_the_kernels_that_weights_change(
    by_library, trained, masked, compiled_by_eager, monkeypatch
):
    """They do where they are trained, and where they are computed at each call."""
    seen = SeenProducts(monkeypatch, by_library)
    model = Blocks(masked=masked).requires_grad_(trained)
    twin = copy.deepcopy(model)
    compiled, x = torch.compile(model, backend="ksopt"), torch.randn(5, 12)
    for _ in range(2):  # the library serves what it knows
        first = x.clone().requires_grad_(trained)
        y = compiled(first)
        if trained:
            y.sum().backward()
    model.zero_grad()
    seen.clear()
    leaf, other = x.clone().requires_grad_(trained), x.clone().requires_grad_(trained)
    y = compiled(leaf)
    torch.testing.assert_close(y, twin(other))
    if not trained:
        assert seen.repacked == [masked]
        assert seen.by_python == (0 if by_library else 1)
        return
    y.sum().backward()
    twin(other).sum().backward()
    torch.testing.assert_close(model.weight.grad, twin.weight.grad)
    torch.testing.assert_close(leaf.grad, other.grad)
    assert seen.repacked == [True, True]  # forward, and the gradient of x
    assert seen.by_python == (0 if by_library else 2)


def test_a_frozen_weight_that_is_computed_in_many_steps(compiled_by_eager):
    """Each step reads the one before it twice: there are 2**60 ways back, and 120 nodes."""
    one = Blocks().requires_grad_(False)

    def steps(x):
        weight = one.weight
        for _ in range(60):
            weight = weight * 0.5 + weight.sin()
        return torch.einsum("bni,noi->bno", x.unflatten(1, (-1, 4)), weight).flatten(1)

    assert is_training(steps, torch.randn(5, 12)) == [False]
    one.requires_grad_(True)
    assert is_training(steps, torch.randn(5, 12)) == [True]
