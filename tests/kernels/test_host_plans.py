"""Layers that the host library runs on a CPU: what Python gives without it, and no Python.

The library is the real one; which way multiplies is set here, not measured.
"""

import gc
import shutil
import threading

import pytest
import torch
from seen_products import as_close, without_library
from torch.utils._python_dispatch import TorchDispatchMode

import ksopt
from ksopt import KSLinear, ks_linear, ops
from ksopt.epilogue import ACTIVATIONS, GATES
from ksopt.jit import host
from ksopt.kernels import host_plans, layer_plans, plan_autotuner, weight_scopes
from ksopt.kernels.backends import cpu
from ksopt.kernels.backends.cpu import CpuBackend
from ksopt.kernels.families.common import pytorch_ops
from ksopt.kernels.problem import Problem, bits_of
from ksopt.patterns.chain import Chain, Pattern

CHAIN = Chain.parse("(1,6,4,3)*(3,4,5,1)")
PATTERNS = [
    *(Pattern(1, 6, 4, 3), Pattern(3, 4, 5, 1), Pattern(2, 3, 4, 5), Pattern(1, 7, 9, 1)),
    *(Pattern(1, 1, 6, 2), Pattern(4, 6, 1, 2), Pattern(3, 1, 5, 4), Pattern(1, 1, 8, 1)),
]


class Calls:
    """How often Python decides of a plan, or multiplies by a factor."""

    def __init__(self, monkeypatch):
        self.count = 0
        monkeypatch.setattr(layer_plans, "whole_call", self.counted(layer_plans.whole_call))
        monkeypatch.setattr(CpuBackend, "run", staticmethod(self.counted(cpu.run)))

    def counted(self, function):
        def call(*args, **kwargs):
            self.count += 1
            return function(*args, **kwargs)

        return call


@pytest.fixture(scope="module", autouse=True)
def library():
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler on this machine")
    assert host.load() is None


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setenv("KSOPT_TUNE", "off")
    cpu.forget()
    plan_autotuner.forget()
    yield
    cpu.forget()
    plan_autotuner.forget()


@pytest.fixture
def calls(monkeypatch):
    return Calls(monkeypatch)


@pytest.fixture
def by_python(monkeypatch):
    """A function's result where nothing is known to the library."""

    def result(function, *args, **kwargs):
        with monkeypatch.context() as patch:
            without_library(patch)
            return function(*args, **kwargs)

    return result


def close(actual, expected, summed=None):
    as_close(actual, expected, summed)
    assert actual.is_contiguous()


def operands(chain=CHAIN, batch=(8,), last=False, siblings=1, dtype=torch.float32):
    def rows(features):
        return torch.randn((features, *batch) if last else (*batch, features)).to(dtype)

    weights = [torch.randn(p.weight_shape).to(dtype) for _ in range(siblings) for p in chain]
    features = siblings * chain.out_features
    bias = torch.randn(features).to(dtype)
    return rows(chain.in_features), weights, bias, rows(features)


@torch.no_grad()
@pytest.mark.parametrize("batch", [(8,), (1,), (2, 3), ()], ids=str)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_every_way_gives_what_it_gives_in_python(pattern, last, batch, by_python):
    problem = Problem.of_factor(pattern, "float32", last)
    x, (weight,), *_ = operands(Chain((pattern,)), batch, last)
    rows = x.numel() // pattern.in_features
    key = (weight.shape, x.dtype, last, bits_of(rows), torch.get_num_threads())
    infinite = x.clone()
    infinite.view(-1)[0] = torch.inf
    for name in pytorch_ops.names(problem, "cpu"):
        cpu.forget()
        cpu._decisions[key] = cpu._decision(problem, name, "rule")
        transposed = weight.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
        for one in (x, x * 1e30, infinite):
            for of in (weight, transposed):
                expected = by_python(cpu.run, one, of, last)
                summed = by_python(cpu.run, one.abs(), of.abs(), last)
                close(cpu.run(one, of, last), expected, summed)
                # Stored zeros times infinity are no results.
                is_known = one is not infinite or name not in pytorch_ops.FILLED
                assert (cpu.run_known(one, of, last) is not None) == is_known
                out = torch.full_like(expected, torch.nan)
                y = cpu.run(one, of, last, out)
                assert y.data_ptr() == out.data_ptr()
                close(out, expected, summed)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("siblings", [1, 3])
@pytest.mark.parametrize("last", [False, True])
def test_a_layer_is_pythons_and_takes_no_python(last, siblings, dtype, calls, by_python):
    for text in ("(1,6,4,3)*(3,4,5,1)", "(2,3,7,1)", "(1,5,3,2)*(2,3,7,1)*(14,1,1,1)"):
        for batch in ((8,), (2, 3)):
            x, weights, bias, residual = operands(Chain.parse(text), batch, last, siblings, dtype)
            for activation in ACTIVATIONS:
                for around in ((None, None), (bias, None), (None, residual), (bias, residual)):
                    layer = (x, weights, *around, activation, last, siblings)
                    expected = by_python(ops.chain, *layer)
                    ops.chain(*layer)
                    ops.chain(*layer)  # of a factor that is chosen for only then
                    ops.ks_chain_inner(*layer)  # one bare factor is a product in eager calls
                    calls.count = 0
                    close(ops.chain(*layer), expected)
                    close(ops.ks_chain_inner(*layer), expected)
                    out = torch.full_like(expected, torch.nan)
                    ops.ks_chain_out(*layer, out=out)
                    close(out, expected)
                    assert calls.count == 0


@torch.no_grad()
@pytest.mark.parametrize("siblings", [1, 2])
def test_a_result_in_float32_takes_no_python_either(siblings, calls, by_python):
    x, weights, bias, _ = operands(
        Chain.parse("(1,6,4,3)*(3,4,5,1)"), (8,), False, siblings, torch.bfloat16
    )
    for activation in (*ACTIVATIONS, *(GATES[:1] if siblings == 2 else ())):
        for added in (None, bias):
            layer = (x, weights, added, None, activation, False, siblings)
            expected = by_python(ops.chain, *layer, True)
            assert expected.dtype == torch.float32
            for _ in range(2):
                ops.chain(*layer, True)
                ops.chain(*layer)  # the same in 16 bit has a plan of its own
            calls.count = 0
            for y in (ops.chain(*layer, True), ops.ks_chain_inner(*layer, in_float32=True)):
                assert y.dtype == torch.float32
                close(y, expected)
            assert ops.chain(*layer).dtype == torch.bfloat16
            assert calls.count == 0


def known(x, layer):
    """The layer's result by the table alone."""
    y = host_plans.run(x, list(layer.weights), layer.bias, None, layer.activation, False, 1)
    return None if y is None else y.clone()


@pytest.fixture
def layer():
    created = KSLinear(CHAIN.in_features, CHAIN.out_features, CHAIN, activation="gelu")
    with torch.no_grad():
        yield created


def warm(x, layer):
    for _ in range(3):
        layer(x)
    assert known(x, layer) is not None


def test_batches_of_one_range_have_one_plan(layer, calls):
    warm(torch.randn(8, 15), layer)
    calls.count = 0
    for rows in (5, 7, 8):
        layer(torch.randn(rows, 15))
    assert calls.count == 0
    assert known(torch.randn(9, 15), layer) is None
    assert known(torch.randn(8, 15).double(), layer.double()) is None


CHANGES = {
    "in place": lambda layer: layer.weights[1].mul_(-2),
    "unseen": lambda layer: layer.weights[0].data.add_(1),
    "other data": lambda layer: setattr(layer.weights[0], "data", torch.randn(1, 6, 4, 3)),
    "a state_dict": lambda layer: layer.load_state_dict(
        KSLinear(15, 18, CHAIN, activation="gelu").state_dict()
    ),
    "the bias": lambda layer: layer.bias.zero_(),
    "other strides": lambda layer: setattr(
        layer.weights[0], "data", torch.randn(3, 4, 6, 1).permute(3, 2, 1, 0)
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_written_is_multiplied_by(layer, change, calls, by_python):
    x = torch.randn(8, 15)
    warm(x, layer)
    CHANGES[change](layer)
    calls.count = 0
    y = layer(x)
    assert calls.count == 0
    close(y, by_python(layer, x))


def test_a_weight_in_a_freed_ones_place_is_multiplied_by(layer, by_python):
    x = torch.randn(8, 15)
    for _ in range(5):
        warm(x, layer)
        shape = layer.weights[0].shape
        second = layer.weights[1]
        del layer.weights
        gc.collect()
        layer.weights = torch.nn.ParameterList([torch.randn(shape), second])
        close(layer(x), by_python(layer, x))


def test_strided_operands_are_pythons(layer, by_python):
    x = torch.randn(8, 15)
    warm(x, layer)
    wide = torch.randn(8, 31)
    for one in (wide[:, 1:16], wide[:, ::2][:, :15], torch.randn(15, 8).t()):
        assert known(one, layer) is None
        close(layer(one), by_python(layer, one))
    bias = torch.randn(36)[::2]
    y = ks_linear(x, list(layer.weights), bias, activation="gelu")
    close(y, by_python(ks_linear, x, list(layer.weights), bias, activation="gelu"))


def test_out_that_shares_memory_is_written_last(layer):
    x, weights, bias, residual = operands()
    warm(x, layer)
    expected = ops.chain(x, weights, bias, residual, "gelu")
    assert host_plans.run(x, weights, bias, residual, "gelu", False, 1, out=residual) is None
    ops.ks_chain_out(x, weights, bias, residual, "gelu", out=residual)
    close(residual, expected)


def test_misfits_are_refused_as_ever(layer):
    x = torch.randn(8, 15)
    warm(x, layer)
    weights, bias = list(layer.weights), layer.bias
    for change in (
        {"x": torch.randn(8, 14)},
        {"bias": bias[1:]},
        {"bias": bias.double()},
        {"weights": weights[::-1]},
        {"weights": [weights[0].double(), weights[1]]},
        {"weights": [weights[0][0], weights[1]]},
        {"weights": []},
        {"residual": torch.randn(8, 17)},
        {"activation": "tanh"},
        {"siblings": 0},
        {"siblings": 3},
        {"x": torch.randn(8, 15).to_sparse()},
    ):
        whole = {"x": x, "weights": weights, "bias": bias, "residual": None} | change
        with pytest.raises(ksopt.InvalidInputError):
            ops.ks_chain_inner(**whole)


@pytest.mark.parametrize("grad_mode", [False, True])
def test_what_is_no_array_is_refused_as_ever(grad_mode):
    x, weights, *_ = operands()
    others = {
        "sparse_coo": x.to_sparse(),
        "sparse_csr": x.to_sparse_csr(),
        "nested": torch.nested.as_nested_tensor([x, x]),
    }
    with torch.set_grad_enabled(grad_mode):
        for words, other in others.items():
            with pytest.raises(ksopt.InvalidInputError, match=f"x is (stored as|a) {words}"):
                ks_linear(other, weights)
        with pytest.raises(ksopt.InvalidInputError, match="weight is stored as sparse_coo"):
            ks_linear(x, [weights[0], weights[1].to_sparse()])


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def test_a_mode_of_torchs_sees_products_and_no_table():
    x, weights, *_ = operands()
    with torch.no_grad(), Seen() as seen:
        ks_linear(x, weights)
    assert "ksopt.ks_mm_inner.default" in seen.names
    assert not [name for name in seen.names if name.startswith("ksopt_host")]


def test_forgotten_plans_and_choices_are_not_known(layer):
    x = torch.randn(8, 15)
    for forget in (plan_autotuner.forget, cpu.forget):
        warm(x, layer)
        forget()
        assert known(x, layer) is None


def test_deterministic_layers_are_pythons(layer, deterministic):
    x = torch.randn(8, 15)
    warm(x, layer)
    with deterministic():
        assert known(x, layer) is None
        layer(x)


def test_another_number_of_threads_is_another_choice(layer):
    x, threads = torch.randn(8, 15), torch.get_num_threads()
    warm(x, layer)
    torch.set_num_threads(threads + 1)
    try:
        assert known(x, layer) is None
    finally:
        torch.set_num_threads(threads)
    assert known(x, layer) is not None


def test_two_threads_and_a_third_that_forgets(layer):
    x = torch.randn(8, 15)
    layer(x)
    expected, wrong = layer(x), []

    def multiply():
        with torch.no_grad():
            for _ in range(300):
                if not torch.equal(layer(x), expected):
                    wrong.append(1)

    threads = [threading.Thread(target=multiply) for _ in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        plan_autotuner.forget()
        cpu.forget()
    assert not wrong


def test_a_new_family_takes_chains_that_were_computed_by_factors(layer):
    toy_chains = pytest.importorskip("toy_chains")
    x = torch.randn(8, 15)
    warm(x, layer)
    with toy_chains.registered() as family, pytest.MonkeyPatch.context() as patch:
        patch.setenv("KSOPT_TUNE", "model")
        patch.setattr(family, "us", 1e-3)
        for _ in range(3):
            layer(x)
        assert len(family.launches) == 3
    warm(x, layer)


def test_inference_mode_autocast_and_changing_weights(layer, by_python):
    x = torch.randn(8, 15)
    warm(x, layer)
    with torch.inference_mode():
        y = layer(x)
        assert y.is_inference()
        close(y, by_python(layer, x))
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        assert y.dtype == torch.bfloat16
        close(y, by_python(layer, x))
    with weight_scopes.repacked():
        assert known(x, layer) is not None
        close(layer(x), by_python(layer, x))


def test_training_has_the_gradients_of_python(layer, calls, by_python):
    x = torch.randn(8, 15, requires_grad=True)

    def gradients():
        with torch.enable_grad():
            return torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])

    expected = by_python(gradients)
    for _ in range(3):
        gradients()
    calls.count = 0
    for own, theirs in zip(gradients(), expected, strict=True):
        as_close(own, theirs)
    assert calls.count == 0


@pytest.mark.parametrize("backend", ["ksopt", "inductor"])
def test_a_compiled_layer_takes_no_python_of_plans(layer, calls, backend, by_python):
    torch._dynamo.reset()
    x = torch.randn(8, 15)
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    for _ in range(3):
        compiled(x)
    expected = by_python(layer, x)
    calls.count = 0
    torch.testing.assert_close(compiled(x), expected)
    assert calls.count == 0
    torch._dynamo.reset()


def test_no_rows_and_lazily_negated_operands(layer, by_python):
    x = torch.randn(8, 15)
    warm(x, layer)
    assert layer(x[:0]).shape == (0, 18)
    negated = torch._neg_view(x)
    close(layer(negated), by_python(layer, -x))
    weights = [torch._neg_view(layer.weights[0]), layer.weights[1]]
    arguments = (layer.bias, None, "gelu")
    expected = by_python(ops.chain, x, [-layer.weights[0], layer.weights[1]], *arguments)
    for _ in range(3):
        close(ops.chain(x, weights, *arguments), expected)
