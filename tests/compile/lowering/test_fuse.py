"""The operator takes over the operations around a chain where one launch computes all faster."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ksopt
from ksopt.compile import passes
from ksopt.compile.lowering import whole_layer
from ksopt.kernels.families.base import ANY_TYPE
from ksopt.kernels.problem import Epilogue, Problem
from ksopt.patterns.chain import Chain
from tests.kernels import toy_chains

CHAIN = "(1,8,4,4)*(4,4,8,1)"  # 32 -> 16 -> 32


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setenv("KSOPT_TUNE", "model")
    with toy_chains.registered() as family:
        yield family


class ByEinsum(nn.Module):
    """Both factors in an author's spelling, with a bias."""

    def __init__(self):
        super().__init__()
        self.left = nn.Parameter(torch.randn(1, 8, 4, 4) / 2)
        self.right = nn.Parameter(torch.randn(4, 4, 8, 1) / 3)
        self.bias = nn.Parameter(torch.randn(32))

    def product(self, x):
        rows = x.shape[:-1]
        z = torch.einsum("...acd,abcd->...abd", x.view(*rows, 4, 8, 1), self.right)
        z = z.reshape(*rows, 1, 4, 4)
        return torch.einsum("...acd,abcd->...abd", z, self.left).reshape(*rows, 32)

    def forward(self, x):
        return self.product(x) + self.bias


class ByLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = ksopt.KSLinear(32, 32, CHAIN)

    def forward(self, x):
        return self.layer(x)


LAYERS = {"einsum": ByEinsum, "KSLinear": ByLayer}


def graphs_of(function, *inputs, dynamic=None):
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


def targets(graph):
    return [str(node.target) for node in graph.nodes if node.op.startswith("call")]


def chains(graph):
    return [node for node in graph.nodes if "ks_chain" in str(node.target)]


@pytest.mark.sweep
@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", LAYERS)
def test_bias_activation_and_residual_are_one_operator(name, dynamic, toy):
    layer = LAYERS[name]()
    x, r = torch.randn(5, 3, 32), torch.randn(5, 3, 32)

    def model(x, r):
        return r + F.gelu(layer(x))

    with torch.no_grad():
        y, graph, report = graphs_of(model, x, r, dynamic=dynamic)
        expected = model(x, r)
    torch.testing.assert_close(y, expected)
    (node,) = chains(graph)
    assert node.args[4] == "gelu"
    assert None not in (node.args[2], node.args[3])
    assert not any("gelu" in one or "add" in one or "ks_mm" in one for one in targets(graph))
    assert [problem.epilogue.names for problem in toy.launches[:1]] == [
        ("bias", "gelu", "residual")
    ]
    if name == "einsum":
        (site,) = report.sites
        assert site.one_launch == ("bias", "gelu", "residual")
        assert site.reason.endswith("One launch computes all of it, with bias, gelu, residual.")
    assert report.passes["layers_in_one_launch"] == 1


class ByEinsumInOneDtype(ByEinsum):
    def forward(self, x):
        y = self.product(x)
        return y + self.bias.to(y.dtype)


_AUTOCAST = [  # it casts no summand of an einsum
    (ByEinsum, Epilogue()),
    (ByEinsumInOneDtype, Epilogue(True, "gelu")),
    (ByLayer, Epilogue(True, "gelu")),
]


@pytest.mark.parametrize(("make", "epilogue"), _AUTOCAST)
def test_inference_under_autocast_is_one_launch_in_its_dtype(
    make, epilogue, toy, compiled_by_eager, monkeypatch
):
    monkeypatch.setattr(toy, "dtypes", ANY_TYPE)
    layer, x = make(), torch.randn(6, 32)

    def model(x):
        return F.gelu(layer(x))

    compiled = torch.compile(model, backend="ksopt", fullgraph=True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            ys = [function(x) for function in (compiled, model)]
            torch.testing.assert_close(*ys, rtol=0.02, atol=0.02)
            next(layer.parameters()).mul_(2)  # what it was cast to is outdated
    problem = Problem(ksopt.Chain.parse(CHAIN), "bfloat16", False, epilogue=epilogue)
    assert toy.launches[0] == problem


def test_what_follows_autocast_leaves_a_layer_its_dtype(toy, monkeypatch):
    monkeypatch.setattr(toy, "dtypes", ANY_TYPE)
    layer, x = ByLayer(), torch.randn(6, 32)

    def model(x):
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
        return F.gelu(y)

    with torch.no_grad():
        y, _, _ = graphs_of(model, x)
        torch.testing.assert_close(y, model(x), rtol=0, atol=0)
    assert y.dtype == torch.bfloat16
    assert {problem.dtype for problem in toy.launches} == {"bfloat16"}


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (F.relu, "relu"),
        (torch.relu, "relu"),
        (lambda y: y.relu(), "relu"),
        (F.silu, "silu"),
        (lambda y: F.gelu(y, approximate="tanh"), "gelu_tanh"),
    ],
)
def test_every_activation(function, name):
    layer, x = ByEinsum(), torch.randn(6, 32)
    with torch.no_grad():
        y, graph, _ = graphs_of(lambda x: function(layer(x)), x)
        torch.testing.assert_close(y, function(layer(x)))
    (node,) = chains(graph)
    assert node.args[4] == name


def gpt2s_gelu(y):
    return 0.5 * y * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * torch.pow(y, 3.0))))


SPELLED = {
    "GPT-2's": (gpt2s_gelu, "gelu_tanh"),
    "by x * x": (
        lambda y: y * 0.5 * (1 + torch.tanh(y * 0.7978845608 * (1 + 0.044715 * y * y))),
        "gelu_tanh",
    ),
    "by erf": (lambda y: y.mul(0.5) * (1 + torch.erf(y / math.sqrt(2))), "gelu"),
    "by sigmoid": (lambda y: y * torch.sigmoid(y), "silu"),
    "by exp": (lambda y: y / (1 + (-y).exp()), "silu"),
    "by clamp": (lambda y: y.clamp(min=0), "relu"),
}


@pytest.mark.parametrize("name", SPELLED)
def test_activations_that_are_spelled_out(name):
    function, activation = SPELLED[name]
    layer, x = ByEinsum(), torch.randn(6, 32)
    with torch.no_grad():
        y, graph, _ = graphs_of(lambda x: x + function(layer(x)), x)
        torch.testing.assert_close(y, x + function(layer(x)))
    (node,) = chains(graph)
    assert node.args[4] == activation
    assert node.args[3] is not None  # the residual behind it
    assert not any("mul" in one or "add" in one for one in targets(graph))


@pytest.mark.parametrize(
    "function",
    [
        lambda y: y * torch.sigmoid(1.702 * y),  # another function
        lambda y: y * torch.sigmoid(y + y.mean()),  # not elementwise
        lambda y: y * torch.sigmoid(y[:, :1]),  # broadcast
        lambda y: (gpt2s_gelu(y), y),  # read elsewhere, too
        lambda y: y.float().sigmoid().double() * y,  # rounded between
    ],
)
def test_what_is_no_activation_of_an_epilogue_stays(function):
    layer, x = ByEinsum(), torch.randn(6, 32)
    with torch.no_grad():
        y, graph, _ = graphs_of(lambda x: function(layer(x)), x)
        torch.testing.assert_close(y, function(layer(x)))
    (node,) = chains(graph)
    assert node.args[4] == "none"
    assert node.args[2] is not None


def test_what_is_read_elsewhere_too_stays(toy):
    layer, x = ByEinsum(), torch.randn(6, 32)

    def model(x):
        y = layer(x)
        return F.gelu(y), y

    with torch.no_grad():
        graphs, graph, _ = graphs_of(model, x)
        for one, other in zip(graphs, model(x), strict=True):
            torch.testing.assert_close(one, other)
    (node,) = chains(graph)
    assert node.args[4] == "none"
    assert node.args[2] is not None
    assert any("gelu" in target for target in targets(graph))


def test_a_residual_before_the_activation_is_no_residual():
    layer, x = ByEinsum(), torch.randn(6, 32)

    def model(x):
        return F.relu(layer(x) + x)

    with torch.no_grad():
        y, graph, _ = graphs_of(model, x)
        torch.testing.assert_close(y, model(x))
    (node,) = chains(graph)
    assert node.args[4] == "none"
    assert any("relu" in target for target in targets(graph))


@pytest.mark.parametrize("shape", [(32,), (1, 32), (1, 1, 32), (6, 1), (1,)])
def test_only_one_value_for_each_feature_is_a_bias(shape):
    layer, x, other = ByEinsum(), torch.randn(6, 32), torch.randn(shape)
    bare = lambda x: layer(x) - layer.bias + other  # noqa: E731

    def product(x):
        z = torch.einsum("...acd,abcd->...abd", x.view(-1, 4, 8, 1), layer.right)
        y = torch.einsum("...acd,abcd->...abd", z.reshape(-1, 1, 4, 4), layer.left)
        return y.reshape(-1, 32) + other

    with torch.no_grad():
        y, graph, _ = graphs_of(product, x)
        torch.testing.assert_close(y, bare(x), rtol=1e-4, atol=1e-4)
    (node,) = chains(graph)
    # With one dim more the sum has another shape than the product.
    assert (node.args[2] is not None) == (shape[-1] == 32 and len(shape) < 3)


def test_the_product_and_its_bias_are_fused_where_gradients_are_recorded():
    """The backward pass reads the input of the activation."""
    layer, x = ByEinsum(), torch.randn(6, 32)
    _, graph, report = graphs_of(lambda x: F.gelu(layer(x)) + x, x)
    (node,) = chains(graph)
    assert node.args[2] is not None
    assert (node.args[3], node.args[4]) == (None, "none")
    assert any("gelu" in one for one in targets(graph))
    assert report.passes["layers_in_one_launch"] == 1


def test_nothing_is_fused_where_a_frozen_weight_passes_gradients_on():
    layer, x = ByEinsum().requires_grad_(False), torch.randn(6, 32, requires_grad=True)
    _, graph, report = graphs_of(lambda x: F.gelu(layer(x)), x)
    assert not chains(graph)
    assert report.passes["layers_in_one_launch"] == 0


def test_nothing_is_fused_where_a_launch_a_factor_is_faster(toy, monkeypatch):
    monkeypatch.setattr(toy, "us", 1e6)
    layer, x = ByEinsum(), torch.randn(6, 32)
    with torch.no_grad():
        _, graph, _ = graphs_of(lambda x: F.gelu(layer(x)), x)
    assert not chains(graph)


def test_nothing_is_fused_of_a_graph_that_writes_in_place():
    layer, x = ByEinsum(), torch.randn(6, 32)

    def model(x):
        y = layer(x)
        x.mul_(2)
        return F.gelu(y)

    with torch.no_grad():
        y, graph, _ = graphs_of(model, x.clone())
        torch.testing.assert_close(y, model(x.clone()))
    assert not chains(graph)


IN_FLOAT32 = {
    "float": lambda y: y.float(),
    "to": lambda y: y.to(torch.float32),
    "to, by name": lambda y: y.to(dtype=torch.float32),
}


@pytest.mark.parametrize("name", IN_FLOAT32)
@pytest.mark.parametrize("function", [lambda y: y, F.gelu])
def test_a_cast_of_what_the_graph_returns_is_in_the_launch(function, name, toy, monkeypatch):
    monkeypatch.setattr(toy, "dtypes", ANY_TYPE)
    cast, layer = IN_FLOAT32[name], ByEinsum().bfloat16()
    x = torch.randn(6, 32).bfloat16()

    def model(x):
        return cast(function(layer(x)))

    with torch.no_grad():
        y, graph, report = graphs_of(model, x)
        torch.testing.assert_close(y, model(x), rtol=0.02, atol=0.05)
    assert y.dtype == torch.float32
    (node,) = chains(graph)
    assert node.args[8:] == (True,)
    assert not any("float" in one or one == "to" for one in targets(graph))
    assert toy.launches[0].epilogue.in_float32
    assert report.sites[0].reason.endswith("float32.")


@pytest.mark.parametrize(
    "behind",
    [
        lambda y: y.float().exp(),  # Inductor's kernel casts what it reads
        lambda y: (y.float(), y),
        lambda y: y.double(),
        lambda y: y.half(),
        lambda y: y.float()[:, :2],
    ],
)
def test_other_casts_stay(behind, toy, monkeypatch):
    monkeypatch.setattr(toy, "dtypes", ANY_TYPE)
    layer, x = ByEinsum().bfloat16(), torch.randn(6, 32).bfloat16()
    with torch.no_grad():
        y, graph, _ = graphs_of(lambda x: behind(layer(x)), x)
        torch.testing.assert_close(y, behind(layer(x)), rtol=0.02, atol=0.05)
    (node,) = chains(graph)
    assert len(node.args) == 8


def test_a_call_with_its_cast_stays_one_or_is_taken_apart(toy, monkeypatch):
    monkeypatch.setattr(toy, "dtypes", ANY_TYPE)
    layer, x = ksopt.KSLinear(32, 32, CHAIN).bfloat16(), torch.randn(6, 32).bfloat16()

    def model(x):
        return ksopt.ks_linear(x, list(layer.weights), layer.bias, out_dtype=torch.float32)

    compiled = torch.compile(model, backend="ksopt", fullgraph=True)
    with torch.no_grad():
        for us in (1e-3, 1e6):
            monkeypatch.setattr(toy, "us", us)
            torch._dynamo.reset()
            y = compiled(x)
            assert y.dtype == torch.float32
            torch.testing.assert_close(y, model(x), rtol=0.02, atol=0.05)
    y = compiled(x)  # with gradients
    assert y.dtype == torch.float32
    y.square().sum().backward()
    assert layer.bias.grad.dtype == torch.bfloat16


def test_by_the_backend(toy):
    layer, x = ByEinsum(), torch.randn(6, 32)
    compiled = torch.compile(lambda x: F.gelu(layer(x)), backend="ksopt")
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(6, 32)
            torch.testing.assert_close(compiled(x), F.gelu(layer(x)))
    assert len(toy.launches) >= 3
    assert toy.launches[-1].epilogue.names == ("bias", "gelu")


class Attention(nn.Module):
    """Queries, keys and values of one input, each as its reader wants it."""

    def __init__(self, biased=True):
        super().__init__()
        make = lambda: ksopt.KSLinear(32, 32, CHAIN, bias=biased)  # noqa: E731
        self.q, self.k, self.v = make(), make(), make()

    def forward(self, x):
        batch, length, _ = x.shape

        def heads(y):
            return y.view(batch, length, 4, 8).transpose(1, 2)

        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, 32)


@pytest.mark.sweep
@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
def test_siblings_are_one_launch(biased, dynamic, toy):
    model, x = Attention(biased), torch.randn(2, 5, 32)
    with torch.no_grad():
        y, graph, report = graphs_of(model, x, dynamic=dynamic)
        torch.testing.assert_close(y, model(x))
    (node,) = chains(graph)
    assert node.args[6] == 3
    assert len(node.args[1]) == 6
    assert report.passes["layers_in_one_launch"] == 3
    assert toy.launches[0].siblings == 3


def test_siblings_whose_weights_are_parts_of_one_parameter():
    """Each part reads the same split, which moves ahead of the first sibling once."""
    chain = Chain.parse(CHAIN)
    sizes = [pattern.nnz for pattern in chain] + [32]
    each = [torch.randn(sum(sizes)) / 4 for _ in range(3)]
    x = torch.randn(5, 32)

    def layer(x, parameter):
        *weights, bias = parameter.split(sizes)
        shaped = [w.view(p.weight_shape) for w, p in zip(weights, chain, strict=True)]
        return ksopt.ks_linear(x, shaped, bias)

    def function(x, *each):
        q, k, v = (layer(x, one) for one in each)
        return torch.softmax(q @ k.T, -1) @ v

    with torch.no_grad():
        y, graph, _ = graphs_of(function, x, *each)
        torch.testing.assert_close(y, function(x, *each))
    (node,) = chains(graph)
    assert node.args[6] == 3


def test_a_sibling_that_an_attribute_transposes():
    model, x = Attention(), torch.randn(2, 5, 32)

    def function(x):
        return torch.softmax(model.q(x) @ model.k(x).mT, -1) @ model.v(x)

    with torch.no_grad():
        y, graph, _ = graphs_of(function, x)
        torch.testing.assert_close(y, function(x))
    (node,) = chains(graph)
    assert node.args[6] == 3


def test_siblings_that_are_put_side_by_side_stay_right():
    model, x = Attention(), torch.randn(2, 5, 32)

    def function(x):
        return torch.cat([model.q(x), model.k(x), model.v(x)], -1)

    with torch.no_grad():
        y, graph, _ = graphs_of(function, x)
        torch.testing.assert_close(y, function(x))
    assert len(chains(graph)) == 1
    assert not any("cat" in target for target in targets(graph)[2:])


def test_results_that_are_returned_have_memory_of_their_own():
    model, x = Attention(), torch.randn(2, 5, 32)

    def function(x):
        return model.q(x), model.k(x), F.relu(model.v(x))

    with torch.no_grad():
        graphs, graph, _ = graphs_of(function, x)
        for one, other in zip(graphs, function(x), strict=True):
            torch.testing.assert_close(one, other)
            assert one.is_contiguous()
    assert len(chains(graph)) == 3


def test_views_that_are_returned_lie_as_the_authors():
    """As keys and values that a cache keeps."""
    model, x = Attention(), torch.randn(2, 5, 32)

    def function(x):
        heads = [layer(x).view(2, 5, 4, 8).transpose(1, 2) for layer in (model.q, model.k, model.v)]
        return F.scaled_dot_product_attention(*heads), *heads[1:]

    with torch.no_grad():
        created, graph, _ = graphs_of(function, x)
        for one, other in zip(created, function(x), strict=True):
            torch.testing.assert_close(one, other)
            assert one.stride() == other.stride()
    assert len(chains(graph)) == 3


def test_a_residual_that_is_a_sibling_is_not_computed_once_more():
    model, last, x = Attention(), ByLayer(), torch.randn(2, 5, 32)

    def function(x):
        q, others = model.q(x), torch.sin(model.k(x)) + torch.sin(model.v(x))
        return (q + last(others)) * torch.sin(q)

    with torch.no_grad():
        y, graph, _ = graphs_of(function, x)
        torch.testing.assert_close(y, function(x))
    siblings, behind = chains(graph)
    assert siblings.args[6] == 3
    assert behind.args[3] is not None


@pytest.mark.parametrize("activation", [None, "gelu", "relu", "silu"])
def test_a_call_that_is_slower_as_a_whole_is_taken_apart(monkeypatch, activation, toy):
    """Also where the plan, which calls outside of graphs race for, is one launch."""
    layer = ksopt.KSLinear(32, 32, CHAIN, activation=activation)
    x, r = torch.randn(5, 3, 32), torch.randn(5, 3, 32)

    def model(x, r):
        return F.gelu(layer(x)) + r

    monkeypatch.setattr(whole_layer, "is_whole", lambda *_, **__: False)
    with torch.no_grad():
        expected = model(x, r)
        assert toy.launches  # the plan of eager calls
        y, graph, report = graphs_of(model, x, r)
    torch.testing.assert_close(y, expected)
    assert not chains(graph)
    assert sum("ks_mm" in one for one in targets(graph)) == 2
    assert report.passes["layers_in_one_launch"] == 0
    monkeypatch.setattr(toy, "us", 1e9)  # nor in eager mode
    with torch.no_grad():
        _, graph, _ = graphs_of(model, x, r)
    assert len(chains(graph)) == 1


def test_a_launch_per_factor_is_one_operator_where_the_last_computes_the_epilogue(monkeypatch, toy):
    layer = ByEinsum()
    x = torch.randn(5, 3, 32)

    def model(x):
        return F.gelu(layer(x))

    monkeypatch.setattr(toy, "us", 1e9)
    last = SimpleNamespace(way="decode_fma")
    monkeypatch.setattr(whole_layer.planner, "choice_of_factor", lambda *_: last)
    with torch.no_grad():
        y, graph, report = graphs_of(model, x)
        torch.testing.assert_close(y, model(x))
    (node,) = chains(graph)
    assert node.args[4] == "gelu"
    (site,) = report.sites
    words = "One launch per factor computes all of it, with bias, gelu."
    assert site.reason.endswith(words)
