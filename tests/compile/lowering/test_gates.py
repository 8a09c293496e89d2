"""A gate, act(a) * b of two layers on one input, becomes one operator where that is the fastest."""

import pytest
import torch
import torch.nn.functional as F
from test_fuse import CHAIN as OF_EINSUM
from torch import nn

import ksopt
from ksopt.compile import passes
from ksopt.compile.lowering import whole_layer
from ksopt.compile.lowering.fuse import fuse
from ksopt.epilogue import GATES
from ksopt.kernels import plan_autotuner
from ksopt.kernels.families.common.pytorch_cost import elementwise_us
from ksopt.kernels.problem import EMPTY, Epilogue, Problem
from ksopt.patterns.chain import Chain
from tests.kernels import toy_chains

from test_fuse import ByEinsum, chains, graphs_of, targets  # isort: skip

CHAIN = "(1,16,4,4)*(4,4,8,1)"  # 32 -> 16 -> 64
BACK = "(1,8,8,4)*(4,8,16,1)"


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setenv("KSOPT_TUNE", "model")
    with toy_chains.registered() as family:
        yield family


def gates(graph):
    return [node for node in chains(graph) if any(one in GATES for one in node.args[4:])]


class SwiGLU(nn.Module):
    def __init__(self, biased=True, activation=F.silu):
        super().__init__()
        self.gate, self.up = (ksopt.KSLinear(32, 64, CHAIN, bias=biased) for _ in range(2))
        self.down = ksopt.KSLinear(64, 32, BACK, bias=biased)
        self.activation = activation

    def forward(self, x):
        return self.down(self.activation(self.gate(x)) * self.up(x))


@pytest.mark.sweep
@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
def test_a_gate_is_one_operator(biased, dynamic, toy):
    model, x = SwiGLU(biased), torch.randn(2, 5, 32)
    with torch.no_grad():
        y, graph, report = graphs_of(model, x, dynamic=dynamic)
        torch.testing.assert_close(y, model(x))
    gate, down = chains(graph)
    assert gate.args[4] == "silu_gate"
    assert gate.args[6] == 2
    assert len(gate.args[1]) == 4
    assert (gate.args[2] is not None) == biased
    assert down.args[0] is gate
    assert not any("silu" in one or "mul" in one for one in targets(graph))
    assert report.passes["gates_in_one_launch"] == 1
    assert report.passes["layers_in_one_launch"] == 2  # the last one is a call as it was
    assert report.passes["mlps_in_one_launch"] == 0
    first = toy.launches[0]
    assert (first.siblings, first.epilogue.activation) == (2, "silu_gate")


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("activation", "name"),
    [
        (F.relu, "relu_gate"),
        (F.gelu, "gelu_gate"),
        (lambda y: F.gelu(y, approximate="tanh"), "gelu_tanh_gate"),
        (lambda y: y * torch.sigmoid(y), "silu_gate"),
    ],
)
def test_every_gate_in_either_order(activation, name):
    model, x = SwiGLU(), torch.randn(5, 32)

    def turned(x):
        return model.up(x) * activation(model.gate(x))

    with torch.no_grad():
        y, graph, _ = graphs_of(turned, x)
        torch.testing.assert_close(y, turned(x))
    (node,) = chains(graph)
    assert node.args[4] == name


@pytest.mark.sweep
@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.gate(x) * m.up(x),  # without an activation
        lambda m, x: F.silu(m.gate(x)) * m.up(x + 1),  # two inputs
        lambda m, x: F.silu(m.gate(x)) * F.relu(m.up(x)),
        lambda m, x: F.silu(m.gate(x)) + m.up(x),
        lambda m, x: (lambda g: F.silu(g) * m.up(x) + g)(m.gate(x)),  # read elsewhere, too
        lambda m, x: (lambda g: g * g)(F.silu(m.gate(x))),
        lambda m, x: F.silu(m.gate(x)).unsqueeze(0) * m.up(x),
        lambda m, x: F.silu(m.gate(x)) * m.up(x).double(),
        lambda m, x: F.silu(m.gate(x)) * m.down(m.up(x)).sum(),
    ],
)
def test_what_is_no_gate_stays(function):
    model, x = SwiGLU(), torch.randn(5, 32)
    with torch.no_grad():
        y, graph, report = graphs_of(lambda x: function(model, x), x)
        torch.testing.assert_close(y, function(model, x))
    assert not gates(graph)
    assert report.passes["gates_in_one_launch"] == 0


def test_a_gate_where_gradients_are_recorded_stays():
    model, x = SwiGLU(), torch.randn(5, 32)
    y, graph, _ = graphs_of(model, x)
    torch.testing.assert_close(y, model(x))
    assert not gates(graph)


def test_layers_of_other_patterns_stay_apart():
    model, x = SwiGLU(), torch.randn(5, 32)
    model.up = ksopt.KSLinear(32, 64, "(1,8,4,8)*(4,8,8,1)")
    with torch.no_grad():
        y, graph, report = graphs_of(model, x)
        torch.testing.assert_close(y, model(x))
    assert len(chains(graph)) == 3
    assert report.passes["gates_in_one_launch"] == 0


def test_two_gates_of_one_model(toy):
    """The second layer reads the first one's replacement."""
    one, other, x = SwiGLU(), SwiGLU(), torch.randn(5, 32)

    def model(x):
        return x + other(one(x))

    with torch.no_grad():
        y, graph, report = graphs_of(model, x)
        torch.testing.assert_close(y, model(x))
    assert [node.args[4] for node in chains(graph)] == ["silu_gate", "none", "silu_gate", "none"]
    assert report.passes["gates_in_one_launch"] == 2


def test_a_gate_is_compared_with_one_launch_before_it(toy, monkeypatch):
    """Siblings in one launch and Inductor's kernel behind them may be faster."""
    epilogue = Epilogue(True, "silu_gate")
    problem = Problem(Chain.parse(CHAIN), "float32", False, epilogue=epilogue, siblings=2)
    device, behind = torch.device("cpu"), elementwise_us(3 * 4 * 16 * 64, 1)
    whole = {True: behind + 0.05}

    def predicted(self, one, config, batch, device):
        return whole[one.epilogue.is_gated] if one.siblings == 2 else 1e3

    monkeypatch.setattr(toy_chains.ToyChain, "predicted_us", predicted)
    for us, is_whole in ((0.0, False), (0.1, True)):
        whole[False] = us
        plan_autotuner.forget()
        assert whole_layer.is_whole(problem, 16, device, tune="model") == is_whole


def test_a_gate_that_is_not_faster_stays(monkeypatch):
    seen = []

    def is_whole(problem, *how):
        seen.append(problem)
        return not problem.epilogue.is_gated

    model, x = SwiGLU(), torch.randn(5, 32)
    with torch.no_grad():
        fused, y = [], None

        def backend(gm, example_inputs):
            fused.extend(fuse(gm, is_whole))
            gm.recompile()
            return gm.forward

        y = torch.compile(model, backend=backend, fullgraph=True)(x)
        torch.testing.assert_close(y, model(x))
    assert any(problem.epilogue.is_gated for problem in seen)
    assert {one.problem.epilogue.activation for one in fused if not one.by_author} == {"silu"}


def judged_by(is_whole, model):
    """The model, compiled without Inductor; ``is_whole`` judges its layers."""

    def backend(gm, example_inputs):
        judge = ksopt.compile.backend.judge(example_inputs, "off")
        passes.rewrite_graph(gm, example_inputs, judge, is_whole=is_whole)
        return gm.forward

    return torch.compile(model, backend=backend, fullgraph=True)


@pytest.mark.parametrize(
    ("reader", "activates"),
    [
        (lambda g, x: g * x, True),
        (lambda g, x: g - 1, True),
        (lambda g, x: g @ x.T, False),
        (lambda g, x: (g, x), False),
        (lambda g, x: (g * x, g + x), False),  # it is in memory for both
    ],
)
def test_an_activation_whose_reader_can_activate_is_compared_without(reader, activates, toy):
    """A launch that activates takes longer than Inductor's kernel behind it does by activating."""
    seen = {}

    def is_whole(problem, rows, device, weights, beside_reader):
        seen[problem.epilogue.activation] = beside_reader
        return beside_reader is None

    layer, x = ByEinsum(), torch.randn(5, 32)

    def model(x):
        return reader(F.silu(layer(x)), x)

    with torch.no_grad():
        torch.testing.assert_close(judged_by(is_whole, model)(x), model(x))
    assert seen["silu"] == (EMPTY if activates else None)
    assert ("none" in seen) == activates  # then the layer is judged without its activation


@pytest.mark.parametrize(
    ("reader", "adds"),
    [
        (lambda y: F.layer_norm(y, (32,)), True),
        (lambda y: (F.layer_norm(y, (32,)), y), True),
        (lambda y: 2 * y, True),
        (lambda y: y @ y.T, False),
        (lambda y: y, False),
    ],
)
def test_a_residual_whose_readers_kernel_can_add_it_is_compared_without(reader, adds, toy):
    seen = {}

    def is_whole(problem, rows, device, weights, beside_reader):
        seen[problem.epilogue.names] = beside_reader
        return False

    layer, x = ByEinsum(), torch.randn(5, 32)
    with torch.no_grad():
        judged_by(is_whole, lambda x: reader(layer(x) + x))(x)
    assert seen["bias", "residual"] == (Epilogue(True) if adds else None)
    assert seen["bias",] == EMPTY  # the sum's kernel adds the bias, too


def test_products_alone_are_compared_with_where_the_reader_activates(toy, monkeypatch):
    problem = Problem(Chain.parse(CHAIN), "float32", False, epilogue=Epilogue(True, "silu"))
    device, of_kernel = torch.device("cpu"), {"silu": 0.2, "none": 0.1}

    def predicted(self, one, config, batch, device):
        return of_kernel[one.epilogue.activation]

    monkeypatch.setattr(toy_chains.ToyChain, "predicted_us", predicted)
    for beside_reader in (None, EMPTY):
        actual = whole_layer.is_whole(problem, 16, device, "stored", beside_reader, "model")
        assert actual == (beside_reader is None)
    of_kernel["none"] = 0.3
    plan_autotuner.forget()
    assert whole_layer.is_whole(problem, 16, device, "stored", EMPTY, "model")


def test_by_the_backend(toy):
    model, x = SwiGLU(), torch.randn(5, 32)
    with torch.no_grad():
        y = torch.compile(model, backend="ksopt")(x)
        torch.testing.assert_close(y, model(x))
    assert {one.epilogue.activation for one in toy.launches} == {"silu_gate", "none"}


def test_its_sites_say_so():
    one, other, x = ByEinsum(), ByEinsum(), torch.randn(5, 32)
    with torch.no_grad():
        _, _, report = graphs_of(lambda x: F.silu(one(x)) * other(x), x)
    assert [site.one_launch for site in report.sites] == [("bias", "silu_gate")] * 2
    words = f"bias, silu_gate, and the layer it is multiplied with, {OF_EINSUM}."
    assert all(site.reason.endswith(words) for site in report.sites)
