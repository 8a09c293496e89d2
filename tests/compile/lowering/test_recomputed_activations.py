"""Trained chains save no more than dense layers: activations are computed again instead."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager_decomp_partition

import ksopt
from ksopt.compile import backend

UP, DOWN = "(1,128,16,2)*(2,16,32,1)", "(1,32,16,2)*(2,16,128,1)"  # 64 -> 256 -> 64
ROWS = 2000


@pytest.fixture(autouse=True)
def partitioned(monkeypatch):
    """Graphs run eagerly, divided as Inductor divides them."""

    def compile_by_inductor(gm, example_inputs, config):
        return aot_eager_decomp_partition(gm, example_inputs)

    monkeypatch.setattr(backend, "compile_by_inductor", compile_by_inductor)


class Mlp(nn.Module):
    """Two layers, of which a call may activate the first one's result."""

    def __init__(self, activation, inside: str | None = None, dense: bool = False) -> None:
        super().__init__()
        self.activation = activation
        self.up = nn.Linear(64, 256) if dense else ksopt.KSLinear(64, 256, UP, activation=inside)
        self.down = nn.Linear(256, 64) if dense else ksopt.KSLinear(256, 64, DOWN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (ksopt.KSLinear(64, 256, UP, bias=False) for _ in range(2))
        self.down = ksopt.KSLinear(256, 64, DOWN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class ByMatrices(nn.Module):
    """The same layers, as their author wrote them."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            torch.randn(shape) / 4
            for shape in ((2, 16, 32), (2, 128, 16), (2, 16, 128), (2, 32, 16))
        )

    def forward(self, x: Tensor) -> Tensor:
        for at in (0, 2):
            first, second = self.weights[at], self.weights[at + 1]
            z = torch.einsum("nac,abc->nab", x.unflatten(-1, (2, -1)), first).flatten(1)
            y = torch.einsum("ncd,dbc->nbd", z.unflatten(-1, (-1, 2)), second).flatten(1)
            x = F.gelu(y) if at == 0 else y
        return x


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def spelled_gelu(x: Tensor) -> Tensor:
    """As GPT-2's is written."""
    inner = 0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


def run(model: nn.Module, rows: int = ROWS, compiler: str = "ksopt"):
    """The compiled model's result, and how many activations are computed again."""
    x = torch.randn(rows, 64, requires_grad=True)
    with backend.collected() as reports:
        y = torch.compile(model, backend=compiler)(x)
    return x, y, sum(report.passes["activations_recomputed"] for report in reports)


def saved_bytes(model: nn.Module, y: Tensor) -> int:
    """What the backward pass of a compiled model reads, without parameters."""
    own = {parameter.data_ptr() for parameter in model.parameters()}
    saved = {one.data_ptr(): one.untyped_storage().nbytes() for one in y.grad_fn.saved_tensors}
    return sum(size for address, size in saved.items() if address not in own)


MODELS = [
    lambda: Mlp(F.gelu),
    lambda: Mlp(gelu_tanh),
    lambda: Mlp(F.silu),
    lambda: Mlp(spelled_gelu),
    lambda: Mlp(nn.Identity(), "gelu"),
    lambda: Mlp(nn.Identity(), "gelu_tanh"),
    lambda: Mlp(nn.Identity(), "silu"),
    Gated,
    ByMatrices,
]


@pytest.mark.parametrize("make", MODELS)
def test_gradients_are_those_of_float64(make) -> None:
    model = make()
    x, y, count = run(model)
    assert count == 1
    twin, exact = copy.deepcopy(model).double(), x.detach().double().requires_grad_()
    expected = twin(exact)
    grad = torch.randn_like(y)
    y.backward(grad)
    expected.backward(grad.double())
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    pairs = [(x, exact), *zip(model.parameters(), twin.parameters(), strict=True)]
    for mine, theirs in pairs:
        scale = theirs.grad.abs().max()
        torch.testing.assert_close(
            mine.grad.double() / scale, theirs.grad / scale, rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("activation", [F.gelu, gelu_tanh, F.silu, spelled_gelu])
def test_no_more_is_saved_than_by_dense_layers(activation) -> None:
    dense, chains = Mlp(activation, dense=True), Mlp(activation)
    _, y, count = run(dense, compiler="aot_eager_decomp_partition")
    assert count == 0
    of_dense = saved_bytes(dense, y)
    assert of_dense >= 4 * ROWS * (64 + 256 + 256)
    _, y, count = run(chains)
    assert count == 1
    # x, the input of the activation, and the values between the factors of both chains
    assert saved_bytes(chains, y) == 4 * ROWS * (64 + 256 + 32 + 32) < of_dense


@pytest.mark.parametrize(
    ("make", "rows"),
    [
        pytest.param(lambda: Mlp(F.gelu), 8, id="the weights it does not have are more"),
        pytest.param(lambda: Mlp(F.relu), ROWS, id="the gradient reads the result"),
        pytest.param(lambda: Mlp(nn.Identity(), "relu"), ROWS, id="as above, in the layer"),
        pytest.param(lambda: Mlp(F.gelu, dense=True), ROWS, id="no chain"),
        pytest.param(lambda: Mlp(F.gelu).requires_grad_(False), ROWS, id="no trained weight"),
    ],
)
def test_nothing_is_computed_again_without_need(make, rows: int) -> None:
    assert run(make(), rows)[2] == 0


def test_nothing_is_computed_again_where_nothing_is_trained() -> None:
    with torch.no_grad():
        assert run(Mlp(F.gelu))[2] == 0


def test_a_dynamic_batch() -> None:
    model = Mlp(F.gelu)
    compiled = torch.compile(model, backend="ksopt", dynamic=True)
    for rows in (ROWS, 1500):
        x = torch.randn(rows, 64, requires_grad=True)
        y = compiled(x)
        y.sum().backward()
        assert saved_bytes(model, compiled(x)) == 4 * rows * (64 + 256 + 32 + 32)
        (expected,) = torch.autograd.grad(model(x).sum(), x)
        torch.testing.assert_close(x.grad, expected, rtol=1e-4, atol=1e-4)
