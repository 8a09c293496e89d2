"""Layers whose weights are trained, by the host library: as the operators that they are made of."""

import shutil

import pytest
import torch
from seen_products import Python

from ksopt import KSLinear, ks_linear, ops
from ksopt.errors import InvalidInputError
from ksopt.jit import host
from ksopt.kernels import weight_cache
from ksopt.kernels.backends import cpu
from ksopt.ops import trained
from ksopt.patterns.chain import Chain

CHAINS = ["(1,6,4,3)*(3,4,5,1)", "(2,3,7,1)", "(1,5,3,2)*(2,3,7,1)*(14,1,1,1)"]


@pytest.fixture(scope="module", autouse=True)
def library():
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler on this machine")
    assert host.load() is None


@pytest.fixture(autouse=True)
def no_old_choices(monkeypatch):
    monkeypatch.setenv("KSOPT_TUNE", "off")
    cpu.forget()
    yield
    cpu.forget()


class Layer:
    """Operands of a layer, all of which require gradients."""

    def __init__(self, text, last=False, siblings=1, around=True, dtype=torch.float64):
        chain = Chain.parse(text)
        generator = torch.Generator().manual_seed(0)

        def leaf(*shape):
            result = torch.randn(shape, generator=generator, dtype=torch.float64)
            return result.to(dtype).requires_grad_()

        def rows(features):
            return leaf(features, 2, 3) if last else leaf(2, 3, features)

        features = siblings * chain.out_features
        self.around = (last, siblings)
        self.x = rows(chain.in_features)
        self.weights = [leaf(*one.weight_shape) for _ in range(siblings) for one in chain]
        self.summands = [leaf(features), rows(features)] if around else [None, None]

    @property
    def leaves(self):
        return [one for one in (self.x, *self.weights, *self.summands) if one is not None]

    def of(self, function, activation, leaves=None):
        x, *others = self.leaves if leaves is None else leaves
        weights, summands = others[: len(self.weights)], others[len(self.weights) :]
        return function(x, weights, *(summands or (None, None)), activation, *self.around)


def composed(*arguments):
    return torch.ops.ksopt.ks_chain(*arguments)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("around", [False, True], ids=["plain", "summands"])
@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("siblings", [1, 3])
@pytest.mark.parametrize("last", [False, True], ids=["batch_first", "batch_last"])
@pytest.mark.parametrize("text", CHAINS)
def test_results_and_gradients_are_those_of_its_operators(
    text, last, siblings, activation, around, dtype
):
    layer = Layer(text, last, siblings, around, dtype)
    for _ in range(2):  # the second time the library knows the products
        y, expected = layer.of(trained.run, activation), layer.of(composed, activation)
        torch.testing.assert_close(y, expected)
        grad = torch.randn(y.shape).to(dtype)
        actual = torch.autograd.grad(y, layer.leaves, grad)
        for one, other in zip(
            actual, torch.autograd.grad(expected, layer.leaves, grad), strict=True
        ):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("text", "last", "siblings"),
    [
        ("(1,3,2,2)*(2,2,3,1)", False, 2),
        pytest.param(CHAINS[1], True, 1, marks=pytest.mark.slow),
        pytest.param(CHAINS[2], False, 1, marks=pytest.mark.slow),
    ],
)
def test_gradients_have_gradients(text, last, siblings):
    layer = Layer(text, last, siblings)

    def function(*leaves):
        return layer.of(trained.run, "gelu", leaves)

    assert torch.autograd.gradcheck(function, layer.leaves)
    assert torch.autograd.gradgradcheck(function, layer.leaves)


def test_a_module_that_is_trained_takes_it():
    layer = KSLinear(24, 24, "(1,6,4,4)*(4,4,6,1)", activation="gelu")
    y = layer(torch.randn(5, 24))
    assert "TrainedLayer" in type(y.grad_fn).__name__ or "TrainedLayer" in y.grad_fn.name()


@pytest.mark.parametrize("frozen", ["weights", "x", "bias"])
def test_what_needs_no_gradient_gets_none(frozen):
    layer = Layer(CHAINS[0])
    for one in {"weights": layer.weights[:1], "x": [layer.x], "bias": layer.summands[:1]}[frozen]:
        one.requires_grad_(False)
    around = (layer.weights, *layer.summands, "gelu", *layer.around)
    y = ops.chain(layer.x, *around)
    y.sum().backward()
    expected = composed(layer.x, *around)
    trainable = [one for one in layer.leaves if one.requires_grad]
    for leaf, grad in zip(trainable, torch.autograd.grad(expected.sum(), trainable), strict=True):
        torch.testing.assert_close(leaf.grad, grad)
    assert all(one.grad is None for one in layer.leaves if not one.requires_grad)


def freeze(layer, which):
    """Freeze some weights: all, or the last factor's, or the first one's."""
    for weight in {"all": layer.weights, "right": layer.weights[-1:], "left": layer.weights[:1]}[
        which
    ]:
        weight.requires_grad_(False)
    return [one for one in layer.leaves if one.requires_grad]


@pytest.mark.sweep
@pytest.mark.parametrize("which", ["all", "right", "left"])
@pytest.mark.parametrize("activation", ["none", "gelu"])
@pytest.mark.parametrize("siblings", [1, 3])
@pytest.mark.parametrize("last", [False, True], ids=["batch_first", "batch_last"])
@pytest.mark.parametrize("text", CHAINS)
def test_gradients_pass_through_frozen_weights(text, last, siblings, activation, which):
    layer = Layer(text, last, siblings)
    trainable = freeze(layer, which)
    for step in range(3):
        y, expected = layer.of(trained.run, activation), layer.of(composed, activation)
        torch.testing.assert_close(y, expected)
        grad = torch.randn(y.shape, dtype=y.dtype)
        for one, other in zip(
            torch.autograd.grad(y, trainable, grad),
            torch.autograd.grad(expected, trainable, grad),
            strict=True,
        ):
            torch.testing.assert_close(one, other)
        if step == 1:  # what was cached is of other values
            with torch.no_grad():
                layer.weights[0].mul_(2)


@pytest.mark.parametrize("which", ["all", "right"])
@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_gradients_through_frozen_weights_have_gradients(activation, which):
    layer = Layer("(1,3,2,2)*(2,2,3,1)", siblings=2)
    trainable = freeze(layer, which)

    def function(*leaves):
        values = iter(leaves)
        return layer.of(
            trained.run,
            activation,
            [next(values) if one.requires_grad else one for one in layer.leaves],
        )

    assert torch.autograd.gradcheck(function, trainable)
    assert torch.autograd.gradgradcheck(function, trainable)


@pytest.mark.parametrize(("activation", "rows"), [("none", 0), ("gelu", 1)])
def test_a_frozen_layer_saves_what_a_dense_one_does(activation, rows):
    layer = Layer(CHAINS[0])
    freeze(layer, "all")
    saved, y = saved_by(lambda: layer.of(trained.run, activation))
    weights = {weight.data_ptr() for weight in layer.weights}
    others = [one for one in saved if one is not None and one.data_ptr() not in weights]
    assert sum(one.numel() for one in others) == rows * y.numel()


def test_no_python_runs_below_a_frozen_layer():
    layer = KSLinear(24, 24, "(1,6,4,4)*(4,4,6,1)", activation="gelu").requires_grad_(False)
    x = torch.randn(5, 24, requires_grad=True)
    for _ in range(3):
        layer(x).sum().backward()
    y = layer(x).sum()
    with Python() as python:
        y.backward()
    assert not python.entered


def test_a_gradient_in_any_strides_is_read():
    layer = Layer(CHAINS[0], around=False)
    y, expected = layer.of(trained.run, "none"), layer.of(composed, "none")
    grad = torch.randn(y.shape[::-1], dtype=torch.float64).permute(2, 1, 0)
    for one, other in zip(
        torch.autograd.grad(y, layer.leaves, grad, retain_graph=True),
        torch.autograd.grad(expected, layer.leaves, grad, retain_graph=True),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
    for one, other in zip(
        torch.autograd.grad(y.sum(), layer.leaves),
        torch.autograd.grad(expected.sum(), layer.leaves),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_a_weight_that_is_written_before_the_backward_pass_is_refused():
    layer = Layer(CHAINS[0])
    y = layer.of(trained.run, "gelu")
    with torch.no_grad():
        layer.weights[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_saved_tensors_pass_their_hooks():
    layer = Layer(CHAINS[0])
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda one: saved.append(one) or one, lambda one: one
    ):
        layer.of(trained.run, "gelu").sum().backward()
    # x, what is between the factors, what the activation reads; both weights and the bias.
    assert sum(one is not None for one in saved) == 6


WIDE = "(1,6,8,3)*(3,8,5,1)"
"""Of 15 features it computes 24 between its factors, and has almost as many weights as a matrix."""


def saved_by(function):
    """What a call saves for the backward pass, and its result."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda one: saved.append(one) or one, lambda one: one
    ):
        return saved, function()


@pytest.mark.parametrize("last", [False, True], ids=["batch_first", "batch_last"])
@pytest.mark.parametrize("siblings", [1, 2])
@pytest.mark.parametrize("text", [WIDE, CHAINS[0], CHAINS[2], CHAINS[1]])
def test_it_saves_no_more_than_a_dense_layer(text, siblings, last):
    layer = Layer(text, last, siblings)
    rows = 6
    weights = sum(one.numel() for one in layer.weights)
    dense = siblings * layer.x.numel() // rows * Chain.parse(text).out_features
    saved, y = saved_by(lambda: layer.of(trained.run, "gelu"))
    # What a dense layer saves and stores too is x, what the activation reads, and the bias; and its
    # weight and its gradient.
    own = sum({one.data_ptr(): one.numel() for one in saved if one is not None}.values())
    of_dense = layer.x.numel() + y.numel() + layer.summands[0].numel()
    assert own + weights <= of_dense + 2 * dense
    expected = layer.of(composed, "gelu")
    grad = torch.randn(y.shape, dtype=y.dtype)
    for one, other in zip(
        torch.autograd.grad(y, layer.leaves, grad),
        torch.autograd.grad(expected, layer.leaves, grad),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_what_is_between_the_factors_is_computed_again_only_where_it_takes_more():
    saved, _ = saved_by(lambda: Layer(WIDE, around=False).of(trained.run, "none"))
    assert sum(one is not None for one in saved) == 3  # both weights and x
    saved, _ = saved_by(lambda: Layer(CHAINS[0], around=False).of(trained.run, "none"))
    assert sum(one is not None for one in saved) == 4


def test_gradients_of_a_layer_that_computes_again_have_gradients():
    layer = Layer(WIDE, around=False)

    def function(*leaves):
        return layer.of(trained.run, "none", leaves)

    assert torch.autograd.gradcheck(function, layer.leaves)
    assert torch.autograd.gradgradcheck(function, layer.leaves)


@pytest.mark.parametrize("text", [WIDE, CHAINS[0]])
def test_deterministic_steps_have_the_same_bits(text):
    layer = Layer(text, dtype=torch.float32)
    grads = []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(3):
            y = layer.of(trained.run, "gelu")
            grads.append((y, *torch.autograd.grad(y.square().sum(), layer.leaves)))
    finally:
        torch.use_deterministic_algorithms(False)
    for again in grads[1:]:
        assert all(torch.equal(one, other) for one, other in zip(grads[0], again, strict=True))


@pytest.mark.parametrize("low", [(), ("x",), ("residual",)], ids=["float32", "x", "residual"])
@pytest.mark.parametrize("activation", ["none", "gelu"])
@pytest.mark.parametrize("text", [WIDE, CHAINS[0], CHAINS[2]])
def test_under_autocast_it_is_the_layer_of_cast_operands(text, activation, low):
    layer = Layer(text, dtype=torch.float32)
    if "x" in low:
        layer.x = layer.x.detach().bfloat16().requires_grad_()
    if "residual" in low:
        layer.summands[1] = layer.summands[1].detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = layer.of(trained.run, activation), layer.of(composed, activation)
    assert y.dtype == torch.bfloat16
    assert "TrainedLayer" in y.grad_fn.name()
    torch.testing.assert_close(y, expected)
    grad = torch.randn(y.shape).bfloat16()
    actual = torch.autograd.grad(y, layer.leaves, grad)
    for leaf, one, other in zip(
        layer.leaves, actual, torch.autograd.grad(expected, layer.leaves, grad), strict=True
    ):
        assert one.dtype == leaf.dtype
        torch.testing.assert_close(one, other)


def test_under_autocast_weights_are_cast_inside():
    """No node of autograd's for each cast but that of x, as torch.nn.functional.linear has one."""
    layer = Layer(WIDE, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer.of(trained.run, "gelu")
    names = [node.name() for node, _ in y.grad_fn.next_functions if node is not None]
    assert [name for name in names if "ToCopy" in name] == ["ToCopyBackward0"]
    assert len([name for name in names if "AccumulateGrad" in name]) == len(layer.leaves) - 1


@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_under_autocast_gradients_have_gradients(activation):
    layer = Layer(CHAINS[0], dtype=torch.float32)
    second = []
    for function in (trained.run, composed):
        with torch.autocast("cpu", torch.bfloat16):
            y = layer.of(function, activation)
        (of_x, *others) = torch.autograd.grad(
            y.float().square().sum(), layer.leaves, create_graph=True
        )
        whole = of_x.square().sum() + sum(one.square().sum() for one in others)
        second.append(torch.autograd.grad(whole, layer.leaves, allow_unused=True))
    for leaf, one, other in zip(layer.leaves, *second, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == leaf.dtype
            assert (one - other).norm() <= 0.05 * other.norm()


@pytest.mark.parametrize("autocast", [False, True])
def test_meta_tensors_have_the_results_shape(autocast):
    layer = KSLinear(24, 24, "(1,6,4,4)*(4,4,6,1)", device="meta")
    x = torch.empty(5, 24, device="meta")
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert layer(x).shape == (5, 24)
        with pytest.raises(InvalidInputError, match="ks_mm: "):
            KSLinear(24, 24, "(1,6,4,4)*(4,4,6,1)")(x)


def test_autocast_leaves_float64_alone():
    layer = Layer(CHAINS[0])
    with torch.autocast("cpu", torch.bfloat16):
        y = layer.of(trained.run, "gelu")
    assert y.dtype == torch.float64
    torch.testing.assert_close(y, layer.of(composed, "gelu"))


def test_nothing_that_was_prepared_outlives_a_training_call():
    layer = KSLinear(24, 24, "(1,6,4,4)*(4,4,6,1)")
    for weight in layer.weights:
        weight_cache.prepared(weight.detach(), "double", lambda one: 2 * one)
    layer(torch.randn(5, 24))
    assert not any(
        weight_cache.cached_of(weight, weight_cache.owner_of(weight), "double")
        for weight in layer.weights
    )


def test_what_does_not_fit_is_refused_in_words():
    layer = KSLinear(24, 24, "(1,6,4,4)*(4,4,6,1)")
    with pytest.raises(InvalidInputError, match="23"):
        layer(torch.randn(5, 23))
    with pytest.raises(InvalidInputError, match="bias"):
        ks_linear(torch.randn(5, 24), list(layer.weights), torch.randn(3))
    with pytest.raises(InvalidInputError, match="float64"):
        layer(torch.randn(5, 24, dtype=torch.float64))


def test_an_empty_batch_is_trained():
    layer = KSLinear(24, 24, "(1,6,4,4)*(4,4,6,1)")
    layer(torch.randn(0, 24)).sum().backward()
    assert all(not weight.grad.any() for weight in layer.weights)
