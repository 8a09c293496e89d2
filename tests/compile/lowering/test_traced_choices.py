"""torch's caches on disk do not return a graph that was traced under other choices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import ksopt
from ksopt.compile.lowering import traced_choices
from ksopt.ops import input_gradient
from tests.kernels import toy_chains

CHAIN = "(1,8,4,4)*(4,4,8,1)"


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[toy_chains.ToyChain]]:
    monkeypatch.setenv("KSOPT_TUNE", "model")
    with toy_chains.registered() as family:
        yield family


@pytest.mark.parametrize("is_trained", [True, False])
def test_another_choice_has_another_digest(toy, compiled_by_eager, is_trained, monkeypatch) -> None:
    model = ksopt.KSLinear(32, 32, CHAIN).requires_grad_(is_trained)
    torch.compile(model, backend="ksopt")(torch.randn(5, 32))
    graph = compiled_by_eager.graphs[-1]
    first = traced_choices.digest(graph)
    assert first == traced_choices.digest(graph) != ""
    monkeypatch.setattr(toy, "us", 1e9)
    assert traced_choices.digest(graph) != first
    monkeypatch.setenv("KSOPT_TUNE", "off")
    assert traced_choices.digest(graph) == ""


def test_siblings_have_choices_of_their_own(toy, compiled_by_eager, monkeypatch) -> None:
    layers = torch.nn.ModuleList(ksopt.KSLinear(32, 32, CHAIN) for _ in range(2))
    torch.compile(lambda x: layers[0](x).sin() * layers[1](x), backend="ksopt")(torch.randn(5, 32))
    (graph,) = compiled_by_eager.graphs
    assert any("ks_chain_siblings" in str(node.target) for node in graph.nodes)
    digests = {traced_choices.digest(graph)}
    for faster in (1, 2):  # of which one launch computes the gradient of x
        monkeypatch.setattr(
            input_gradient, "is_one_launch", lambda _, weights, n=faster: len(weights) == 2 * n
        )
        digests.add(traced_choices.digest(graph))
    assert len(digests) == 3


def test_layers_around_an_activation_have_choices_of_their_own(
    compiled_by_eager, monkeypatch
) -> None:
    layers = torch.nn.ModuleList(ksopt.KSLinear(32, 32, CHAIN) for _ in range(2))
    x = torch.randn(5, 32)
    torch.compile(lambda x: layers[1](torch.nn.functional.gelu(layers[0](x))), backend="ksopt")(x)
    graph = compiled_by_eager.graphs[-1]
    assert any("ks_mlp" in str(node.target) for node in graph.nodes)
    digests = {traced_choices.digest(graph)}
    monkeypatch.setattr(input_gradient, "is_one_launch", lambda *several: several[-1] == "gelu")
    digests.add(traced_choices.digest(graph))
    assert len(digests) == 2


def test_an_author_may_call_two_layers_with_few_arguments(compiled_by_eager) -> None:
    layers = torch.nn.ModuleList(ksopt.KSLinear(32, 32, CHAIN) for _ in range(2))

    def by_operator(x: torch.Tensor) -> torch.Tensor:
        first, second = (list(layer.weights) for layer in layers)
        y: torch.Tensor = torch.ops.ksopt.ks_mlp(x, first, last_weights=second)
        return y

    torch.compile(by_operator, backend="ksopt")(torch.randn(5, 32))
    assert traced_choices.digest(compiled_by_eager.graphs[-1]) == ""


def test_a_graph_without_products_has_none(compiled_by_eager) -> None:
    torch.compile(torch.nn.ReLU(), backend="ksopt")(torch.randn(5))
    assert traced_choices.digest(compiled_by_eager.graphs[-1]) == ""


@pytest.mark.slow
@pytest.mark.usefixtures("graph_caches")
def test_a_stored_graph_is_not_taken_for_another_choice(toy, monkeypatch) -> None:
    model = ksopt.KSLinear(32, 32, CHAIN)
    x = torch.randn(6, 32)
    for us, stored in ((1e9, 0), (1e-3, 1), (1e9, 1)):
        monkeypatch.setattr(toy, "us", us)
        torch._dynamo.reset()
        torch.compile(model, backend="ksopt")(x).sum().backward()
        assert len(toy.stored) == stored
