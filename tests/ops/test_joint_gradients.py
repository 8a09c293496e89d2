"""Trained chains with a launch per factor forward: kernels that compute several gradients."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import ksopt
from ksopt.epilogue import Activation
from ksopt.kernels.backends.base import backend_of
from ksopt.kernels.problem import DeviceSpec
from ksopt.ops import chain_gradients, input_gradient
from ksopt.ops.trained_chain import have_joint_gradients, trained_products

CHAIN = "(1,8,4,4)*(4,4,8,1)"  # 32 -> 16 -> 32
H200 = DeviceSpec((9, 0), 132, 228 * 1024)
Predict = Callable[[bool, bool], None]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def predict(monkeypatch: pytest.MonkeyPatch) -> Predict:
    """Sets which launches are predicted to be faster: of all weights' gradients, of the input's."""

    def patch(of_weights: bool, of_input: bool) -> None:
        def is_one_launch(*_: Tensor) -> bool:
            return of_input

        monkeypatch.setattr(chain_gradients, "is_faster", lambda *_: of_weights)
        monkeypatch.setattr(input_gradient, "is_one_launch", is_one_launch)

    return patch


class Traced:
    """A backend that keeps the operators of both graphs, and the sizes of what one saves."""

    def __init__(self) -> None:
        self.forward = Counter[str]()
        self.backward = Counter[str]()
        self.saved: list[int] = []

    def __call__(self, gm: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        def forward(graph: fx.GraphModule, _: object) -> fx.GraphModule:
            self.forward.update(_operators(graph))
            (result,) = graph.graph.find_nodes(op="output")
            own = {node for node in graph.graph.nodes if node.op == "placeholder"}
            _, *saved = result.args[0]
            self.saved = sorted(n.meta["val"].numel() for n in saved if n not in own)
            return graph

        def backward(graph: fx.GraphModule, _: object) -> fx.GraphModule:
            self.backward.update(_operators(graph))
            return graph

        compiled: Callable[..., object] = aot_autograd(
            fw_compiler=forward,
            bw_compiler=backward,
            partition_fn=min_cut_rematerialization_partition,
        )(gm, inputs)
        return compiled


def _operators(graph: fx.GraphModule) -> list[str]:
    names = (str(node.target) for node in graph.graph.nodes if node.op == "call_function")
    return [name.split(".")[1] for name in names if name.startswith(("ksopt.", "aten."))]


def gradients(function: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    model.zero_grad()
    function(x).square().sum().backward()
    return [one.grad for one in (x, *model.parameters()) if one.grad is not None]


def check(function: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> None:
    """The gradients are those in float64."""
    twin = copy.deepcopy(model).double()
    truth = gradients(twin, twin, x.double())
    actual = gradients(function, model, x)
    for mine, theirs in zip(actual, truth, strict=True):
        # Sums of some 100 float32 products of numbers up to about 10.
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.sweep
@pytest.mark.parametrize("of_input", [True, False])
@pytest.mark.parametrize("of_weights", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_graphs_have_what_is_predicted_to_be_faster(
    predict: Predict, bias: bool, of_weights: bool, of_input: bool
) -> None:
    predict(of_weights, of_input)
    model = ksopt.KSLinear(32, 32, CHAIN, bias=bias, activation="gelu")
    traced = Traced()
    check(torch.compile(model, backend=traced, fullgraph=True), model, torch.randn(9, 32))
    ahead, back = traced.forward, traced.backward
    assert ahead["ks_mm_repacked"] == 2
    assert ahead["add"] == int(bias)  # which a compiler fuses with the activation
    assert "ks_chain_keeping" not in ahead
    assert back["ks_chain_weight_grads"] == int(of_weights)
    assert back["ks_chain_input_grad"] == int(of_input)
    assert back["ks_mm_repacked"] == (0 if of_input else 2)
    assert back["bmm"] == (0 if of_weights else 2)
    assert back["sum"] == int(bias and not of_weights)


def test_no_more_is_saved(predict: Predict) -> None:
    saved = []
    model = ksopt.KSLinear(32, 32, CHAIN, activation="gelu")
    for is_joint in (True, False):
        torch._dynamo.reset()
        predict(is_joint, is_joint)
        traced = Traced()
        compiled = torch.compile(model, backend=traced, fullgraph=True)
        compiled(torch.randn(9, 32, requires_grad=True)).sum().backward()
        saved.append(traced.saved)
    joint, apart = saved  # beside x and the weights
    assert joint == [9 * 16, 9 * 32]  # between the factors, and what the activation reads
    assert sum(joint) <= sum(apart)


@pytest.mark.slow
def test_only_what_is_needed_is_computed(predict: Predict) -> None:
    """An input without a gradient, and a frozen bias or factor."""
    predict(True, True)
    model = ksopt.KSLinear(32, 32, CHAIN)
    traced = Traced()
    torch.compile(model, backend=traced, fullgraph=True)(torch.randn(9, 32)).sum().backward()
    assert traced.backward["ks_chain_weight_grads"] == traced.backward["ks_mm_repacked"] == 1
    assert traced.backward["ks_chain_input_grad"] == 0
    assert model.bias is not None
    model.bias.requires_grad_(False)
    torch._dynamo.reset()
    check(torch.compile(model, backend="aot_eager", fullgraph=True), model, torch.randn(9, 32))
    model.weights[1].requires_grad_(False)
    torch._dynamo.reset()
    traced = Traced()
    check(torch.compile(model, backend=traced, fullgraph=True), model, torch.randn(9, 32))
    assert "ks_chain_weight_grads" not in traced.backward


@pytest.mark.slow
def test_where_only_the_inputs_gradient_is_faster_an_input_without_one_changes_nothing(
    predict: Predict,
) -> None:
    model = ksopt.KSLinear(32, 32, CHAIN)
    seen = []
    for of_input in (True, False):
        torch._dynamo.reset()
        predict(False, of_input)
        traced = Traced()
        torch.compile(model, backend=traced, fullgraph=True)(torch.randn(9, 32)).sum().backward()
        seen.append((traced.forward, traced.backward))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("ksopt", marks=pytest.mark.slow)])
def test_batches_of_any_size_are_compiled_once(predict: Predict, backend: str) -> None:
    predict(True, True)
    model = ksopt.KSLinear(32, 32, CHAIN, activation="gelu")
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    for rows in ((5, 3), (2, 7)):
        check(compiled, model, torch.randn(*rows, 32))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_the_backend_compiles_them(predict: Predict) -> None:
    predict(True, True)
    model = ksopt.KSLinear(32, 32, CHAIN, activation="gelu")
    check(torch.compile(model, backend="ksopt", dynamic=False), model, torch.randn(9, 32))


@pytest.mark.slow
def test_deterministic_algorithms_and_checkpoints(predict: Predict) -> None:
    predict(True, True)
    model = ksopt.KSLinear(32, 32, CHAIN, activation="gelu")

    def again(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(model, x, use_reentrant=False)
        return y

    traced = Traced()
    torch.use_deterministic_algorithms(True)
    try:
        check(torch.compile(again, backend=traced, fullgraph=True), model, torch.randn(9, 32))
    finally:
        torch.use_deterministic_algorithms(False)
    assert traced.saved == []
    assert traced.backward["ks_chain_weight_grads"] == 1


@pytest.mark.parametrize("activation", ["none", pytest.param("gelu", marks=pytest.mark.slow)])
def test_autocast_casts_what_is_trained(predict: Predict, activation: Activation) -> None:
    predict(True, True)
    model = ksopt.KSLinear(32, 32, CHAIN, activation=activation)
    twin = copy.deepcopy(model)
    traced = Traced()
    compiled = torch.compile(model, backend=traced, fullgraph=True)
    x = torch.randn(9, 32)
    several = []
    for function, its in ((compiled, model), (twin, twin)):
        own = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = function(own)
        assert y.dtype is torch.bfloat16
        y.float().square().sum().backward()
        gradients = [one.grad for one in its.parameters()]
        assert all(one is not None and one.dtype is torch.float32 for one in gradients)
        several.append([y, own.grad, *gradients])
    torch.testing.assert_close(*several, rtol=0.02, atol=0.02)
    assert traced.backward["ks_chain_weight_grads"] == 1
    assert traced.backward["ks_chain_input_grad"] == 1


@pytest.mark.slow
def test_transforms_see_the_parts(predict: Predict) -> None:
    predict(True, True)
    model = ksopt.KSLinear(32, 32, CHAIN).double()
    x = torch.randn(3, 32, dtype=torch.float64)

    def loss(x: Tensor) -> Tensor:
        return model(x).square().sum()

    compiled = torch.compile(torch.func.vmap(torch.func.grad(loss)), backend="aot_eager")
    truth = torch.autograd.functional.jacobian(lambda x: model(x).square().sum(-1), x)
    torch.testing.assert_close(compiled(x), truth.diagonal(0, 0, 1).mT)


@pytest.mark.parametrize("with_bias", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_gradients_of_gradients(predict: Predict, with_bias: bool) -> None:
    predict(True, True)
    shapes = ((2, 4), (1, 2, 2, 2), (2, 2, 2, 1), (4,))
    inputs = [torch.randn(one, dtype=torch.float64, requires_grad=True) for one in shapes]

    def product(x: Tensor, left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
        return trained_products(x, [left, right], [] if bias is None else [bias])[0]

    operands = inputs if with_bias else inputs[:3]
    assert torch.autograd.gradcheck(product, operands)
    assert torch.autograd.gradgradcheck(product, operands)


def test_a_bias_of_another_size_is_refused_in_words(predict: Predict) -> None:
    predict(True, True)
    weights = [one.requires_grad_() for one in (torch.randn(1, 8, 4, 4), torch.randn(4, 4, 8, 1))]
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(ksopt.errors.InvalidInputError, match=r"bias has shape \[1\]"),
    ):
        ksopt.ops.ks_chain(torch.randn(9, 32), weights, torch.randn(1))


@pytest.mark.parametrize(
    ("features", "rows", "dtype", "is_joint"),
    [
        ((768, 768), 64, torch.bfloat16, True),
        ((768, 3072), 64, torch.bfloat16, True),
        ((3072, 768), 64, torch.bfloat16, True),
        ((768, 768), 64, torch.float32, False),
        ((768, 768), 0, torch.bfloat16, False),
    ],
)
def test_chains_of_a_small_language_model(
    monkeypatch: pytest.MonkeyPatch,
    features: tuple[int, int],
    rows: int,
    dtype: torch.dtype,
    is_joint: bool,
) -> None:
    """A quarter of the weights, on an H200, by what is predicted."""
    monkeypatch.setenv("KSOPT_TUNE", "model")
    monkeypatch.setattr(backend_of("cuda"), "spec", lambda _: H200)
    n_in, n_out = features
    c = min(features) // 8
    with FakeTensorMode():
        x, left, right, bias = (
            torch.empty(size, dtype=dtype, device="cuda", requires_grad=True)
            for size in ((rows, n_in), (1, n_out // 2, c, 2), (2, c, n_in // 2, 1), (n_out,))
        )
        assert have_joint_gradients(x, [left, right], [bias]) == is_joint
