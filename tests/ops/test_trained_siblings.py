"""Trained siblings, as queries, keys and values: one launch forward, one for the gradient of x."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.partitioners import min_cut_rematerialization_partition

import ksopt
from ksopt.compile import backend
from ksopt.ops import input_gradient
from ksopt.ops.input_gradient import ks_chain_input_grad
from ksopt.ops.trained_chain import ks_chain_keeping, trained_products
from ksopt.reference import ks_reference
from tests.kernels import toy_chains

CHAIN = "(1,8,4,4)*(4,4,8,1)"  # 32 -> 16 -> 32
Predict = Callable[..., None]


class Siblings(nn.Module):
    """Layers on one input, whose results meet in one expression."""

    def __init__(self, count: int = 3, bias: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ksopt.KSLinear(32, 32, CHAIN, bias=bias) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.ones_like(x)
        for at, layer in enumerate(self.layers):
            y = y * torch.sin((1 + at) * layer(x))
        return y


class Attention(nn.Module):
    """Queries, keys and values, each as its reader wants it."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.q, self.k, self.v = make(), make(), make()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).view(*x.shape[:-1], 4, 8).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)


class ByEinsum(nn.Module):
    """A chain in an author's spelling, with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.randn(1, 8, 4, 4) / 2)
        self.right = nn.Parameter(torch.randn(4, 4, 8, 1) / 3)
        self.bias = nn.Parameter(torch.randn(32))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[:-1]
        z = torch.einsum("...acd,abcd->...abd", x.view(*rows, 4, 8, 1), self.right)
        z = z.reshape(*rows, 1, 4, 4)
        y = torch.einsum("...acd,abcd->...abd", z, self.left).reshape(*rows, 32)
        return y + self.bias


def by_layer() -> nn.Module:
    return ksopt.KSLinear(32, 32, CHAIN)


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[toy_chains.ToyChain]]:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    monkeypatch.setenv("KSOPT_TUNE", "model")
    with toy_chains.registered() as family:
        yield family
    torch._dynamo.reset()


@pytest.fixture
def predict(toy, monkeypatch: pytest.MonkeyPatch) -> Predict:
    """Sets whether chains are one launch forward, and of how many one computes the gradient."""

    def patch(*, forward: bool, of_input: tuple[int, ...] = ()) -> None:
        def is_one_launch(_: Tensor, weights: list[Tensor]) -> bool:
            return len(weights) // 2 in of_input

        monkeypatch.setattr(toy, "us", 1e-3 if forward else 1e9)
        monkeypatch.setattr(input_gradient, "is_one_launch", is_one_launch)

    return patch


class Traced:
    """The operators of both graphs of what is compiled, and the reports."""

    def __init__(self) -> None:
        self.forward = Counter[str]()
        self.backward = Counter[str]()

    def compile(self, gm: fx.GraphModule, inputs: list[Tensor], _: object) -> Callable[..., object]:
        def counting(seen: Counter[str]) -> Callable[[fx.GraphModule, object], fx.GraphModule]:
            def compiler(graph: fx.GraphModule, _: object) -> fx.GraphModule:
                names = (str(node.target) for node in graph.graph.nodes)
                seen.update(name.split(".")[1] for name in names if name.startswith("ksopt."))
                return graph

            return compiler

        compiled: Callable[..., object] = aot_autograd(
            fw_compiler=counting(self.forward),
            bw_compiler=counting(self.backward),
            partition_fn=min_cut_rematerialization_partition,
        )(gm, inputs)
        return compiled


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Traced:
    traced = Traced()
    monkeypatch.setattr(backend, "compile_by_inductor", traced.compile)
    return traced


def gradients(function: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().clone().requires_grad_(x.requires_grad)
    model.zero_grad()
    y = function(x)
    y.square().sum().backward()
    return [y.detach(), *(one.grad for one in (x, *model.parameters()) if one.grad is not None)]


def check(model: nn.Module, x: Tensor, **options: object) -> None:
    """The results and the gradients of compiled steps are those in float64."""
    compiled = torch.compile(model, backend="ksopt", fullgraph=True, **options)
    twin = copy.deepcopy(model).double()
    truth = gradients(twin, twin, x.detach().double().requires_grad_(x.requires_grad))
    actual = gradients(compiled, model, x)
    assert len(actual) == len(truth)
    for mine, theirs in zip(actual, truth, strict=True):
        # Sums of some 100 float32 products of numbers up to about 10.
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-4)


def rows(*sizes: int) -> Tensor:
    return torch.randn(*sizes, 32, requires_grad=True)


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_both_passes_are_one_launch_of_chains(predict, traced, toy, count: int, bias: bool) -> None:
    predict(forward=True, of_input=(count,))
    check(Siblings(count, bias), rows(3, 5))
    assert traced.forward == {"ks_chain_keeping": 1}
    assert traced.backward["ks_chain_input_grad"] == 1
    assert traced.backward["ks_mm_repacked"] == 0
    assert [problem.siblings for problem in toy.stored] == [count]


def test_of_five_one_is_alone(predict, traced) -> None:
    predict(forward=True, of_input=(1, 4))
    check(Siblings(5), rows(7))
    assert traced.forward == {"ks_chain_keeping": 2}
    assert traced.backward["ks_chain_input_grad"] == 2
