"""Two layers become one operator, where one launch computes both faster and nobody else looks."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ksopt
from ksopt.compile import passes
from ksopt.compile.lowering import whole_layer
from ksopt.compile.sites import LaunchTimes
from ksopt.kernels import plan_autotuner
from ksopt.kernels.problem import Epilogue, Problem, SecondLayer
from ksopt.patterns.chain import Chain
from tests.kernels import toy_chains

UP = "(1,32,4,4)*(4,4,8,1)"  # 32 -> 16 -> 128
DOWN = "(1,8,8,4)*(4,8,32,1)"  # 128 -> 32 -> 32


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setenv("KSOPT_TUNE", "model")
    with toy_chains.with_mlps() as family:
        monkeypatch.setattr(family, "us", 1e-3)
        yield family


class Factors(nn.Module):
    """A layer in an author's spelling, with a bias."""

    def __init__(self, text, biased=True):
        super().__init__()
        left, right = Chain.parse(text)
        self.sizes = (right.a, right.c), (left.c, left.d), left.out_features
        self.left = nn.Parameter(torch.randn(left.weight_shape) / left.c**0.5)
        self.right = nn.Parameter(torch.randn(right.weight_shape) / right.c**0.5)
        self.bias = nn.Parameter(torch.randn(left.out_features)) if biased else None

    def forward(self, x):
        rows = x.shape[:-1]
        (a, c), (middle, d), features = self.sizes
        z = torch.einsum("...acd,abcd->...abd", x.view(*rows, a, c, 1), self.right)
        z = z.reshape(*rows, 1, middle, d)
        y = torch.einsum("...acd,abcd->...abd", z, self.left).reshape(*rows, features)
        return y if self.bias is None else y + self.bias


def by_einsum(text, biased=True):
    return Factors(text, biased)


def by_layer(text, biased=True):
    chain = Chain.parse(text)
    return ksopt.KSLinear(chain.in_features, chain.out_features, chain, bias=biased)


MAKERS = {"einsum": by_einsum, "KSLinear": by_layer}


def graph_of(function, *inputs, dynamic=None):
    """The result of a rewritten function, its graph and its report."""
    seen = []

    def backend(gm, example_inputs):
        report = passes.rewrite_graph(
            gm, example_inputs, ksopt.compile.backend.judge(example_inputs, "off"),
            is_whole=whole_layer.is_whole,
        )  # fmt: skip
        seen.append((gm.graph, report))
        return gm.forward

    y = torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)(*inputs)
    ((graph, report),) = seen
    return y, graph, report


def named(graph, name):
    return [node for node in graph.nodes if name in str(node.target)]


@pytest.mark.sweep
@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("name", MAKERS)
def test_two_layers_are_one_operator(name, biased, dynamic, toy):
    up, down = MAKERS[name](UP, biased), MAKERS[name](DOWN, biased)
    x = torch.randn(5, 3, 32)

    def model(x):
        return x + down(F.gelu(up(x)))

    with torch.no_grad():
        y, graph, report = graph_of(model, x, dynamic=dynamic)
        torch.testing.assert_close(y, model(x))
    (node,) = named(graph, "ks_mlp")
    assert not named(graph, "ks_chain")
    assert not named(graph, "gelu")
    assert not named(graph, "add")
    assert node.args[6:8] == ("gelu", "none")
    assert (node.args[3] is not None) == (node.args[4] is not None) == biased
    assert node.args[5] is not None
    last = SecondLayer(Chain.parse(DOWN), Epilogue(biased, "none", True))
    problem = Problem(Chain.parse(UP), "float32", False, True, Epilogue(biased, "gelu"), 1, last)
    assert toy.launches[0] == problem
    assert report.passes["layers_in_one_launch"] == 2
    assert report.passes["mlps_in_one_launch"] == 1


def test_the_report_says_so():
    up, down, x = by_einsum(UP), by_einsum(DOWN), torch.randn(6, 32)

    def model(x):
        h = F.gelu(up(x))
        return down(h)

    with torch.no_grad():
        _, _, report = graph_of(model, x)
    first, second = report.sites
    assert first.reason.endswith(
        f"One launch computes all of it, with bias, gelu, and the layer behind it, {DOWN}."
    )
    assert second.reason.endswith(
        f"One launch computes all of it, with bias, and the layer ahead of it, {UP}."
    )
    assert (first.one_launch, second.one_launch) == (("bias", "gelu"), ("bias",))
    assert first.launch_times == second.launch_times == LaunchTimes(predicted_us=1e-3)  # of both


def test_layers_of_a_factor_each():
    """An activation between two factors, as in CoLA: no launch computes either layer."""
    first = ksopt.KSLinear(32, 16, "(4,4,8,1)", bias=False, activation="silu")
    last, x = ksopt.KSLinear(16, 32, "(1,8,4,4)", bias=False), torch.randn(6, 32)

    def model(x):
        return last(first(x)).sin()

    with torch.no_grad():
        y, graph, report = graph_of(model, x)
        torch.testing.assert_close(y, model(x))
    (node,) = named(graph, "ks_mlp")
    assert not named(graph, "ks_chain")
    assert node.args[6] == "silu"
    assert [len(node.args[at]) for at in (1, 2)] == [1, 1]
    assert report.passes["mlps_in_one_launch"] == 1


def test_factors_that_an_author_writes_around_an_activation():
    right, left = torch.randn(4, 4, 8) / 3, torch.randn(8, 4, 4) / 2
    x = torch.randn(6, 32)
    right, left = nn.Parameter(right), nn.Parameter(left)

    def model(x):
        z = F.silu(torch.einsum("nac,abc->nab", x.view(-1, 4, 8), right)).reshape(-1, 4, 4)
        return torch.einsum("ncd,bcd->nbd", z, left).reshape(-1, 32)

    with torch.no_grad():
        y, graph, _ = graph_of(model, x)
        torch.testing.assert_close(y, model(x))
    (node,) = named(graph, "ks_mlp")
    assert node.args[6] == "silu"


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
def test_layers_that_are_reshaped_between(dynamic):
    up, down = by_einsum(UP), by_einsum(DOWN)
    x, r = torch.randn(5, 3, 32), torch.randn(15, 32)

    def model(x, r):
        hidden = F.silu(up(x)).view(-1, 128)
        return (r + down(hidden)).view(5, 3, 4, 8)

    with torch.no_grad():
        y, graph, _ = graph_of(model, x, r, dynamic=dynamic)
        torch.testing.assert_close(y, model(x, r))
    assert len(named(graph, "ks_mlp")) == 1
    assert not named(graph, "ks_chain")


def test_a_chain_of_layers_is_cut_into_pairs():
    layers, x = [by_layer(UP), by_layer(DOWN), by_layer(UP), by_layer(DOWN)], torch.randn(6, 32)

    def model(x):
        for layer in layers:
            x = F.relu(layer(x))
        return x

    with torch.no_grad():
        y, graph, report = graph_of(model, x)
        torch.testing.assert_close(y, model(x))
    assert len(named(graph, "ks_mlp")) == 2
    assert report.passes["mlps_in_one_launch"] == 2


class Block(nn.Module):
    """A transformer's block without its attention: a layer and an MLP, each with a residual."""

    def __init__(self):
        super().__init__()
        self.one, self.up, self.down = map(by_layer, ("(1,8,4,4)*(4,4,8,1)", UP, DOWN))

    def forward(self, x):
        x = x + self.one(F.layer_norm(x, (32,)))
        return x + self.down(F.gelu(self.up(F.layer_norm(x, (32,)))))


def test_blocks_are_computed_once():
    """Each layer's residual is the result of the layer before, which is an operator by then."""
    model, x = nn.Sequential(Block(), Block(), Block()), torch.randn(6, 32)
    with torch.no_grad():
        y, graph, _ = graph_of(model, x)
        torch.testing.assert_close(y, model(x))
    assert len(named(graph, "ks_mlp")) == len(named(graph, "ks_chain")) == 3
    assert not named(graph, "gelu")
    assert not named(graph, "ks_mm")


NOT_ALONE = {
    "returned": lambda up, down, x: (down(h := F.gelu(up(x))), h),
    "read by another": lambda up, down, x: down(h := F.gelu(up(x))) * h.mean(),
    "a residual of the first": lambda up, down, x: down(F.gelu(up(x)) + x.repeat(1, 4)),
    "other features": lambda up, down, x: down(F.gelu(up(x)).view(3, 256)[:, :128]),
    "not the same rows": lambda up, down, x: down(F.gelu(up(x)).flip(0)),
}


@pytest.mark.parametrize("name", NOT_ALONE)
def test_what_is_read_otherwise_stays_two_layers(name, toy):
    up, down, x = by_layer(UP), by_layer(DOWN), torch.randn(6, 32)

    def model(x):
        return NOT_ALONE[name](up, down, x)

    with torch.no_grad():
        y, graph, report = graph_of(model, x)
        torch.testing.assert_close(y, model(x))
    assert not named(graph, "ks_mlp")
    assert len(named(graph, "ks_chain")) == 2
    assert report.passes["mlps_in_one_launch"] == 0
    assert not toy.launches


def test_the_hidden_features_as_a_residual_too_stay():
    square = "(1,8,4,4)*(4,4,8,1)"
    one, x = by_layer(square), torch.randn(6, 32)
    left, right = (torch.randn(p.weight_shape) for p in Chain.parse(square))

    def model(x):
        h = F.gelu(one(x))
        return torch.ops.ksopt.ks_chain(h, [left, right], None, h)

    with torch.no_grad():
        y, graph, _ = graph_of(model, x)
        torch.testing.assert_close(y, model(x))
    assert not named(graph, "ks_mlp")


def test_trained_layers_are_one_operator_and_frozen_ones_beside_gradients_are_not():
    up, down, x = by_einsum(UP), by_einsum(DOWN), torch.randn(6, 32)
    y, graph, _ = graph_of(lambda x: down(F.gelu(up(x))), x)
    assert len(named(graph, "ks_mlp")) == 1
    y.sum().backward()
    frozen = (by_einsum(UP).requires_grad_(False), by_einsum(DOWN).requires_grad_(False))
    torch._dynamo.reset()
    _, graph, _ = graph_of(lambda x: frozen[1](F.gelu(frozen[0](x))), x.requires_grad_())
    assert not named(graph, "ks_mlp")


def test_nothing_is_done_in_a_graph_that_writes_in_place():
    up, down, x = by_einsum(UP), by_einsum(DOWN), torch.randn(6, 32)

    def model(x):
        h = F.gelu(up(x))
        x.mul_(2)
        return down(h) + x

    with torch.no_grad():
        y, graph, _ = graph_of(model, x.clone())
        torch.testing.assert_close(y, model(x.clone()))
    assert not named(graph, "ks_mlp")


def test_nothing_is_done_where_a_launch_each_is_faster(toy, monkeypatch):
    monkeypatch.setattr(toy, "us", 1e6)
    up, down, x = by_einsum(UP), by_einsum(DOWN), torch.randn(6, 32)
    with torch.no_grad():
        _, graph, _ = graph_of(lambda x: down(F.gelu(up(x))), x)
    assert not named(graph, "ks_mlp")
    assert len(named(graph, "ks_chain")) == 2


def test_what_was_measured_decides(toy, monkeypatch, tmp_path):
    """Two layers' best times, each measured alone, are compared with, too."""
    monkeypatch.setenv("KSOPT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("KSOPT_TUNE", "measure")
    last = SecondLayer(Chain.parse(DOWN), Epilogue(True))
    problem = Problem(
        Chain.parse(UP), "float32", False, epilogue=Epilogue(True, "gelu"), second=last
    )
    times = {
        **dict.fromkeys(problem.layers(), (3.0, 5.0)),
        problem: (6.5, 9.0),
    }
    monkeypatch.setattr(whole_layer, "_measured", lambda one, *_: times[one])
    cpu = torch.device("cpu")
    assert not whole_layer.is_whole(problem, 64, cpu)
    times[problem] = (5.5, 9.0)
    assert whole_layer.is_whole(problem, 64, cpu)
    times[problem] = (5.5, 5.4)
    assert not whole_layer.is_whole(problem, 64, cpu)


def test_measured_times_are_those_of_the_race(toy, monkeypatch, tmp_path):
    monkeypatch.setenv("KSOPT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("KSOPT_TUNE", "measure")
    plan_autotuner.forget()
    problem = Problem(Chain.parse(UP), "float32", False, second=SecondLayer(Chain.parse(DOWN)))
    cpu = torch.device("cpu")
    judged = (problem, 64, cpu, toy_chains.SPEC)
    whole, apart = whole_layer._measured(*judged, repacked=False, is_within=False)
    record = plan_autotuner.tuned(problem, 64, cpu)
    stored = [one for one in record.timed if one.weight != "repacked"]
    assert apart == min(one.median_us for one in stored if one.way == "layers")
    assert whole == min(one.median_us for one in stored if one.way == "toy_mlp")


@pytest.mark.slow
def test_by_the_backend(toy):
    up, down, x = by_layer(UP), by_einsum(DOWN), torch.randn(6, 32)
    compiled = torch.compile(lambda x: x + down(F.gelu(up(x))), backend="ksopt")
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(6, 32)
            torch.testing.assert_close(compiled(x), x + down(F.gelu(up(x))))
            up.weights[0].mul_(1.1)
    assert len(toy.launches) == 3
