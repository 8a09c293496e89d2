"""Steps of torch's optimizers on chains: fused, for each, compiled as a whole."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters

from ksopt import KSLinear
from ksopt.compile import backend

OPTIMIZERS = {
    "fused Adam": functools.partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "foreach Adam": functools.partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "fused SGD": functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9, fused=True),
    "foreach SGD": functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9, foreach=True),
}


@pytest.fixture(autouse=True)
def without_inductor(monkeypatch):
    monkeypatch.setattr(
        backend, "compile_by_inductor", lambda gm, inputs, config: aot_eager(gm, inputs)
    )
    torch._dynamo.reset()
    counters.clear()


class Model(nn.Module):
    """A chain with an activation of its own, and an author's block-diagonal product."""

    def __init__(self):
        super().__init__()
        self.chain = KSLinear(32, 48, "(1,24,8,2)*(2,8,16,1)", activation="gelu")
        self.blocks = nn.Parameter(torch.randn(6, 4, 8) / 8**0.5)

    def forward(self, x):
        z = self.chain(x).unflatten(-1, (6, 8))
        return torch.einsum("ngi,goi->ngo", z, self.blocks).flatten(-2)


def steps(model, optimizer, step, x):
    for _ in range(3):
        step(x)
    return [parameter.detach().clone() for parameter in model.parameters()]


def of(model, optimizer):
    def step(x):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.fixture
def models():
    torch.manual_seed(0)
    model = Model()
    return model, copy.deepcopy(model), torch.randn(16, 32)


def check(ours, theirs):
    assert counters["ksopt"]["lowered"] >= 2  # the chain, and the author's product
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_compiled_models_steps_are_those_of_eager_mode(name, models):
    model, twin, x = models
    optimizer, its = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](twin.parameters())
    compiled = torch.compile(model, backend="ksopt")
    check(steps(model, optimizer, of(compiled, optimizer), x), steps(twin, its, of(twin, its), x))


@pytest.mark.parametrize("compiled_autograd", [False, True])
def test_a_step_that_is_compiled_as_a_whole(compiled_autograd, models):
    model, twin, x = models
    optimizer, its = (OPTIMIZERS["foreach Adam"](one.parameters()) for one in (model, twin))
    with torch._dynamo.config.patch(compiled_autograd=compiled_autograd):
        step = torch.compile(of(model, optimizer), backend="ksopt")
        ours = steps(model, optimizer, step, x)
    check(ours, steps(twin, its, of(twin, its), x))
