"""Compiled graphs on a CUDA device prepare a stored weight once a version, in whatever layout."""

import pytest
import torch
from seen_products import without_library
from torch import nn

from ksopt.kernels import dispatch, weight_cache
from ksopt.reference import ks_reference

pytestmark = pytest.mark.gpu


@pytest.fixture
def prepared(monkeypatch):
    """The kernels are a stand-in that prepares, whatever is the fastest here; counts."""
    weights = []

    def pack(weight):
        weights.append(weight.shape)
        return weight.permute(0, 3, 1, 2).clone(memory_format=torch.contiguous_format)

    def run(x, weight, batch_last, out):
        y = ks_reference(x, weight_cache.prepared(weight, "adbc", pack).permute(0, 2, 3, 1))
        return y if out is None else out.copy_(y)

    without_library(monkeypatch)
    monkeypatch.setattr(dispatch, "run", run)
    torch._dynamo.reset()
    weight_cache.refresh()
    yield weights
    weight_cache.refresh()


class Layer(nn.Module):
    """(4, 16, 32, 8), its weight stored as [d, a, c, b]."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 4, 32, 16, device="cuda") / 6)

    def forward(self, x):
        return torch.einsum("nilj,jilk->nikj", x.view(-1, 4, 32, 8), self.weight).flatten(1)


def autocasting(enabled):
    # Without torch's cache of casts: inside of one region it overlooks changes of a parameter.
    return torch.autocast("cuda", torch.bfloat16, enabled=enabled, cache_enabled=False)


def check(compiled, model, x):
    rough = torch.is_autocast_enabled("cuda")
    tolerance = {"rtol": 2e-2, "atol": 5e-2} if rough else {"rtol": 1e-4, "atol": 1e-4}
    with torch.no_grad():
        torch.testing.assert_close(compiled(x).clone(), model(x), **tolerance)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_weight_is_prepared_once(prepared, autocast):
    model = Layer()
    options = {"tune": "off"}
    compiled = torch.compile(model, backend="ksopt", fullgraph=True, options=options)
    with autocasting(autocast):
        for count in (1, 2):
            for _ in range(4):
                check(compiled, model, torch.randn(64, 1024, device="cuda"))
            assert len(prepared) == count
            with torch.no_grad():
                model.weight.mul_(0.5)
    size = model.weight.nbytes
    # Under autocast the cast in two bytes an element, and two for what is prepared of it.
    assert weight_cache.cached_bytes(torch.device("cuda", 0)) == size


@pytest.mark.parametrize("autocast", [False, True])
def test_a_recorded_graph_prepares_at_each_replay(prepared, autocast):
    """So it is right whatever was changed, and nothing that is cached lies in its memory."""
    model = Layer()
    options = {"mode": "reduce-overhead", "tune": "off"}
    compiled = torch.compile(model, backend="ksopt", fullgraph=True, options=options)
    with autocasting(autocast):
        for _ in range(8):
            check(compiled, model, torch.randn(64, 1024, device="cuda"))
            with torch.no_grad():
                model.weight.add_(0.01)
    assert len(prepared) < 8  # those before the recording, and the recording itself


def test_frozen_weights_stay_cached_while_others_are_trained(prepared):
    model = Layer().requires_grad_(False)
    scale = nn.Parameter(torch.ones(1024, device="cuda"))
    optimizer = torch.optim.SGD([scale], lr=0.01)

    def run(x):
        return model(x * scale)

    options = {"tune": "off"}
    compiled = torch.compile(run, backend="ksopt", fullgraph=True, options=options)
    for _ in range(4):
        x = torch.randn(64, 1024, device="cuda")
        actual, expected = (
            torch.autograd.grad(function(x).square().sum(), scale)[0]
            for function in (compiled, run)
        )
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-1)
        scale.grad = actual
        optimizer.step()
    # The gradient meets a copy, which is prepared at each step: the author's einsum saves one, too.
    assert sorted(prepared) == [(4, 16, 32, 8), *[(4, 32, 16, 8)] * 4]
