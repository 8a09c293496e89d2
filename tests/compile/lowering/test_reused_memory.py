"""Weights that a graph computes: Inductor writes the next one into the memory of the last.

It counts no version there, and passes the same tensor to the operator.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
from seen_products import without_library
from torch import nn

import ksopt
from ksopt import ops
from ksopt.kernels import dispatch, weight_cache
from ksopt.reference import ks_reference

PATTERN = (2, 4, 4, 2)


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Kernels that want a weight as [a, d, b, c], and count how often they prepare one."""
    seen = SimpleNamespace(prepared=0)

    def pack(weight):
        seen.prepared += 1
        return weight.permute(0, 3, 1, 2).clone(memory_format=torch.contiguous_format)

    def run(x, weight, batch_last, out):
        stored = weight_cache.prepared(weight, "adbc", pack)
        y = ks_reference(
            x, stored.permute(0, 2, 3, 1), "batch_last" if batch_last else "batch_first"
        )
        return y if out is None else out.copy_(y)

    without_library(monkeypatch)
    monkeypatch.setattr(dispatch, "run", run)
    weight_cache.refresh()
    yield seen
    weight_cache.refresh()


class Scaled(nn.Module):
    """Each weight depends on the result of the one before it."""

    def __init__(self, multiply):
        super().__init__()
        self.multiply = multiply
        self.weights = nn.ParameterList(torch.randn(PATTERN) / 2 for _ in range(3))

    def forward(self, x):
        for weight in self.weights:
            x = self.multiply(x, weight * (1 + x.mean()))
        return x


def by_layer(x, weight):
    return ksopt.functional.ks_linear(x, [weight])


def by_cast(x, weight):
    with torch.autocast("cpu", torch.bfloat16):
        return ops.ks_mm(x, weight).float()


MULTIPLY, BACKENDS = (ops.ks_mm, by_layer, by_cast), ("inductor", "ksopt")
CASES = [
    *((multiply, backend, "no gradient") for multiply in MULTIPLY for backend in BACKENDS),
    *((ops.ks_mm, "inductor", mode) for mode in ("of x alone", "inference")),
]


@pytest.mark.sweep
@pytest.mark.parametrize(("multiply", "backend", "mode"), CASES)
def test_each_product_reads_its_own_weight(multiply, backend, mode):
    torch.manual_seed(0)
    model = Scaled(multiply).requires_grad_(False)
    x = torch.randn(5, 16, requires_grad=mode == "of x alone")
    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        results = []
        for function in (model, compiled):
            with torch.inference_mode(mode == "inference"):
                y = function(x)
            results.append([y.detach()])
            if x.requires_grad:
                results[-1] += torch.autograd.grad(y.sum(), [x])
        tolerance = 3e-2 if multiply is by_cast else 1e-4
        torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)


class Stored(nn.Module):
    """A parameter, a buffer, a view of a parameter, and a buffer that follows the parameter."""

    def __init__(self):
        super().__init__()
        self.parameter = nn.Parameter(torch.randn(PATTERN))
        self.register_buffer("buffer", torch.randn(PATTERN))
        self.viewed = nn.Parameter(torch.randn(2, 2, 4, 4))
        self.register_buffer("follower", torch.randn(PATTERN))

    def forward(self, x):
        x = ops.ks_mm(x, self.follower)  # as it was
        self.follower.lerp_(self.parameter, 0.5)
        for weight in (self.parameter, self.buffer, self.viewed.permute(0, 2, 3, 1), self.follower):
            x = ops.ks_mm(x, weight) / 4
        return x


@pytest.mark.parametrize("backend", ["inductor", pytest.param("ksopt", marks=pytest.mark.slow)])
def test_stored_weights_are_prepared_once_and_written_ones_again(backend, kernels):
    torch.manual_seed(0)
    model, x = Stored().requires_grad_(False), torch.randn(5, 16)
    model_too = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        for call in range(3):
            before = kernels.prepared
            y = compiled(x)
            prepared = kernels.prepared - before
            torch.testing.assert_close(y, model_too(x), rtol=1e-4, atol=1e-4)
            assert prepared == (5 if call == 0 else 2)
