"""Trained layers around an activation: a launch each, which save the activation alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager_decomp_partition
from torch.utils.checkpoint import checkpoint

import ksopt
from ksopt.compile import backend
from ksopt.epilogue import Activation
from ksopt.ops import input_gradient, mlp, trained_mlp
from tests.kernels import toy_chains

UP, DOWN = "(1,32,4,4)*(4,4,8,1)", "(1,8,4,4)*(4,4,32,1)"  # 32 -> 128 -> 32
ROWS = 40


def spelled_gelu(x: Tensor) -> Tensor:
    inner = 0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


class Block(nn.Module):
    def __init__(
        self,
        activation: Callable[[Tensor], Tensor],
        bias: bool = True,
        inside: Activation | None = None,
    ) -> None:
        super().__init__()
        self.up = ksopt.KSLinear(32, 128, UP, bias=bias, activation=inside)
        self.down = ksopt.KSLinear(128, 32, DOWN, bias=bias)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.activation(self.up(x)))


@pytest.fixture(autouse=True)
def partitioned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Graphs run eagerly; the operators of their nodes are listed."""
    names: list[str] = []

    def compile_by_inductor(gm, example_inputs, config):
        names.extend(str(node.target) for node in gm.graph.nodes if node.op == "call_function")
        return aot_eager_decomp_partition(gm, example_inputs)

    torch._dynamo.reset()
    monkeypatch.setenv("KSOPT_TUNE", "model")
    monkeypatch.setattr(backend, "compile_by_inductor", compile_by_inductor)
    yield names
    torch._dynamo.reset()


def gradients(function: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    model.zero_grad()
    function(x).square().mean().backward()
    return [one.grad for one in (x, *model.parameters()) if one.grad is not None]


def check(model: nn.Module, rows: int = ROWS) -> None:
    """A compiled model's gradients are those in float64."""
    x = torch.randn(rows, 32)
    twin = copy.deepcopy(model).double()
    truth = gradients(twin, twin, x.double())
    actual = gradients(torch.compile(model, backend="ksopt"), model, x)
    for mine, theirs in zip(actual, truth, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-6)


def slow(make: Callable[[], Block], is_joint: bool) -> Any:
    return pytest.param(make, is_joint, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("make", "is_joint"),
    [
        (lambda: Block(F.gelu), False),
        slow(lambda: Block(F.gelu), True),
        slow(lambda: Block(F.silu), False),
        (lambda: Block(F.silu), True),
        slow(lambda: Block(F.relu), False),
        slow(lambda: Block(F.relu), True),
        slow(lambda: Block(spelled_gelu), False),
        (lambda: Block(spelled_gelu), True),
        slow(lambda: Block(nn.Identity(), inside="gelu_tanh"), False),
        (lambda: Block(nn.Identity(), inside="gelu_tanh"), True),
    ],
)
def test_it_is_one_operator_with_right_gradients(partitioned, monkeypatch, make, is_joint):
    """Whether or not one launch is predicted to compute the activation's gradient, too."""
    is_one_launch = input_gradient.is_one_launch

    def patched(grad: Tensor, weights: list[Tensor], activation: str = "none") -> bool:
        return is_joint if activation != "none" else is_one_launch(grad, weights)

    monkeypatch.setattr(input_gradient, "is_one_launch", patched)
    with toy_chains.registered() as toy:
        check(make())
        assert sum("ks_mlp" in name for name in partitioned) == 1
        assert not any("ks_chain" in name for name in partitioned)
        first, second = toy.stored
    assert first.epilogue.activation != "none"
    assert second.epilogue.activation == "none"


def test_what_is_saved_is_the_activation_alone() -> None:
    model, x = Block(F.gelu), torch.randn(ROWS, 32)
    with toy_chains.registered():
        y = torch.compile(model, backend="ksopt")(x)
        saved = {one.data_ptr(): one for one in y.grad_fn.saved_tensors}
    (wide,) = (one for one in saved.values() if one.numel() == ROWS * 128)
    # In any order: by blocks, as the gradient of the weight reads it.
    mine, theirs = (one.flatten().sort().values for one in (wide, F.gelu(model.up(x))))
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "freeze",
    [
        lambda model: model.up.weights[0].requires_grad_(False),
        lambda model: model.up.requires_grad_(False),
        lambda model: model.down.bias.requires_grad_(False),
        lambda model: model.up.bias.requires_grad_(False),
    ],
)
def test_frozen_parts(freeze) -> None:
    with toy_chains.registered():
        model = Block(F.gelu)
        freeze(model)
        check(model)


def test_no_bias_no_gradient_of_x_and_a_second_number_of_rows() -> None:
    with toy_chains.registered():
        model = Block(F.silu, bias=False)
        check(model)
        check(model, 24)
        step = torch.compile(model, backend="ksopt")
        step(torch.randn(ROWS, 32)).sum().backward()
        assert model.up.weights[1].grad is not None


def test_autocast(partitioned) -> None:
    with toy_chains.registered() as toy:
        toy.dtypes = (*toy_chains.SINGLE, "bfloat16")
        try:
            model = Block(F.gelu)
            x = torch.randn(ROWS, 32)
            with torch.autocast("cpu", torch.bfloat16):
                expected = gradients(model, model, x)
                actual = gradients(torch.compile(model, backend="ksopt"), model, x)
        finally:
            toy.dtypes = toy_chains.SINGLE
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.dtype == theirs.dtype
        assert (mine - theirs).abs().max() <= 0.05 * theirs.abs().max()


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_gradients_of_gradients(activation: Activation) -> None:
    shapes = ((2, 4), (1, 2, 2, 2), (2, 2, 2, 1), (1, 2, 2, 2), (2, 2, 2, 1), (4,), (4,))
    inputs = [torch.randn(one, dtype=torch.float64, requires_grad=True) for one in shapes]

    def layers(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, *biases: Tensor) -> Tensor:
        return trained_mlp.trained_mlp(x, [a, b], [c, d], *biases, activation)

    assert torch.autograd.gradcheck(layers, inputs)
    assert torch.autograd.gradgradcheck(layers, inputs)


def test_a_checkpointed_block() -> None:
    with toy_chains.registered():
        model = Block(F.gelu)

        class Checkpointed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.block = model

            def forward(self, x: Tensor) -> Tensor:
                y: Tensor = checkpoint(self.block, x, use_reentrant=False)
                return y

        check(Checkpointed())


def test_an_author_calls_the_operator() -> None:
    """`ks_mlp` of trained layers has the same gradients."""
    with toy_chains.registered() as toy:
        up, down = ksopt.KSLinear(32, 128, UP), ksopt.KSLinear(128, 32, DOWN)

        def layers(x: Tensor) -> Tensor:
            return mlp.ks_mlp(
                x, list(up.weights), list(down.weights), up.bias, down.bias, None, "gelu"
            )

        model = nn.ModuleList([up, down])
        x = torch.randn(ROWS, 32)
        expected = gradients(layers, model, x)
        toy.stored.clear()
        actual = gradients(torch.compile(layers, backend="ksopt"), model, x)
        assert len(toy.stored) == 2
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
