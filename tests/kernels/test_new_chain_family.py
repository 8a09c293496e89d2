"""A family that takes whole chains is one class: layers, operators and graphs launch it."""

import copy
import json

import pytest
import torch
from toy_chains import registered

import ksopt
from ksopt import KSLinear, ks_linear, ops
from ksopt.cli import main
from ksopt.compile.lowering import whole_layer
from ksopt.compile.sites import LaunchTimes
from ksopt.kernels import plan_autotuner, plan_race, weight_cache
from ksopt.kernels.backends import cpu
from ksopt.kernels.families.base import ANY_TYPE
from ksopt.kernels.planner import plan_of
from ksopt.kernels.problem import Epilogue, Problem
from ksopt.patterns.chain import Chain
from ksopt.patterns.size import Dims
from ksopt.reference import chain_reference
from ksopt.search.layer_request import LayerRequest
from ksopt.search.objectives import Objective
from ksopt.tune import TuneRequest, tune

CHAIN = Chain.parse("(1,192,48,2)*(2,48,192,1)")


@pytest.fixture(autouse=True)
def toy(monkeypatch, tmp_path):
    monkeypatch.setenv("KSOPT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("KSOPT_TUNE", "model")
    torch._dynamo.reset()
    with registered() as family:
        monkeypatch.setattr(family, "us", 1e-3)
        yield family
    torch._dynamo.reset()


@pytest.fixture
def layer():
    return KSLinear(CHAIN.in_features, CHAIN.out_features, CHAIN, activation="gelu")


def expected(layer, x):
    y = chain_reference(x, list(layer.weights)) + layer.bias
    return torch.nn.functional.gelu(y).detach()


def test_a_layer_is_one_launch(toy, layer):
    x = torch.randn(7, CHAIN.in_features)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected(layer, x))
    assert toy.launches == [Problem(CHAIN, "float32", False, epilogue=Epilogue(True, "gelu"))]
    with torch.no_grad():
        assert layer(x[:0]).shape == (0, CHAIN.out_features)  # nothing is launched for no rows
    assert len(toy.launches) == 1


def test_the_operator_and_its_out_variant_launch_it_with_siblings_and_residual(toy):
    x = torch.randn(2, 3, CHAIN.in_features)
    weights = [torch.randn(p.weight_shape) for _ in range(2) for p in CHAIN]
    residual = torch.randn(2, 3, 2 * CHAIN.out_features)
    parts = [chain_reference(x, weights[at : at + 2]) for at in (0, 2)]
    target = torch.cat(parts, -1) + residual
    y = ops.ks_chain(x, weights, None, residual, siblings=2)
    torch.testing.assert_close(y, target)
    out = torch.empty_like(y)
    ops.ks_chain_out(x, weights, None, residual, siblings=2, out=out)
    torch.testing.assert_close(out, target)
    epilogue = Epilogue(residual=True)
    assert toy.launches == [Problem(CHAIN, "float32", False, epilogue=epilogue, siblings=2)] * 2


def test_the_weights_may_be_any_sequence(toy, layer):
    x = torch.randn(7, CHAIN.in_features)
    weights = layer.weights.requires_grad_(False)
    bias = layer.bias.detach()
    for several in (weights, tuple(weights)):
        y = ks_linear(x, several, bias, activation="gelu")  # where gradients may be recorded
        torch.testing.assert_close(y, expected(layer, x))
    assert len(toy.launches) == 2


def test_operands_that_do_not_fit_together_are_refused_at_every_call(toy, layer):
    x = torch.randn(7, CHAIN.in_features)
    with torch.no_grad():
        layer(x)
        with pytest.raises(ksopt.InvalidInputError, match="bias has shape"):
            ks_linear(x, list(layer.weights), layer.bias[1:], activation="gelu")
        with pytest.raises(ksopt.InvalidInputError, match="weight is float16"):
            ks_linear(x, [one.half() for one in layer.weights], layer.bias, activation="gelu")
        with pytest.raises(ksopt.InvalidInputError, match="its last dim must be"):
            layer(x[:, 1:])
    assert len(toy.launches) == 1


def test_the_operator_itself_refuses_them_at_every_call_too(toy, layer):
    x, weights = torch.randn(7, CHAIN.in_features), list(layer.weights)
    for _ in range(2):
        with torch.no_grad(), pytest.raises(ksopt.InvalidInputError, match="its last dim must be"):
            ops.ks_chain(x[:, 1:], weights, layer.bias, None, "gelu")
    assert not toy.launches


def test_where_gradients_are_recorded_its_factors_compute_it(toy, layer):
    x = torch.randn(7, CHAIN.in_features, requires_grad=True)
    y = layer(x)
    torch.testing.assert_close(y.detach(), expected(layer, x))
    y.sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())
    assert not toy.launches


def test_under_transforms_its_factors_compute_it(toy, layer):
    x = torch.randn(4, 7, CHAIN.in_features)
    with torch.no_grad():
        torch.testing.assert_close(torch.vmap(layer)(x), expected(layer, x))
    assert not toy.launches


def test_inference_under_autocast_is_one_launch_in_its_dtype(toy, monkeypatch):
    monkeypatch.setattr(toy, "dtypes", ANY_TYPE)
    chain = Chain.parse("(1,8,4,4)*(4,4,8,1)")
    layer, x = KSLinear(32, 32, chain, activation="gelu"), torch.randn(7, 32)
    problem = Problem(chain, "bfloat16", False, epilogue=Epilogue(True, "gelu"))
    weight_cache.refresh()
    sizes = []
    for _ in range(2):
        layer.weights[1].data.mul_(2)
        ksopt.refresh()  # the cached casts
        for _ in range(2):
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                y = layer(x)
            sizes.append(weight_cache.cached_bytes(x.device))
        assert toy.launches == [problem] * 2
        with torch.no_grad():
            alike = copy.deepcopy(layer).bfloat16()(x.bfloat16())
        torch.testing.assert_close(y, alike, rtol=0, atol=0)
        toy.launches.clear()
    assert set(sizes) == {2 * sum(pattern.nnz for pattern in chain)}
    layer.requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x.requires_grad_())  # a gradient is recorded
    assert y.requires_grad
    assert not toy.launches


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ksopt", "inductor", "aot_eager"])
def test_a_graph_launches_it_once(toy, layer, backend):
    x = torch.randn(7, CHAIN.in_features)
    with torch.no_grad():
        compiled = torch.compile(layer, backend=backend, fullgraph=True)
        y = compiled(x)
        torch.testing.assert_close(y, expected(layer, x))
        assert len(toy.launches) == 1
        torch.testing.assert_close(compiled(2 * x), expected(layer, 2 * x))
    assert len(toy.launches) == 2
    toy.launches.clear()
    y = torch.compile(layer, backend=backend, fullgraph=True)(x)  # gradients are recorded
    torch.testing.assert_close(y.detach(), expected(layer, x))
    y.sum().backward()
    assert not toy.launches


def test_explain_shows_the_chain_as_one_site(toy, layer):
    with torch.no_grad():
        explanation = ksopt.explain(layer, torch.randn(7, CHAIN.in_features))
    (site,) = explanation.sites
    assert (site.chain, site.batch, site.verdict.value) == (CHAIN, 7, "lowered")
    assert site.flops == CHAIN.flops(7)
    assert site.one_launch == ("bias", "gelu")
    assert site.launch_times == LaunchTimes(predicted_us=toy.us)
    assert "One launch computes all of it, with bias, gelu. All of it, us: 0.0 predicted." in str(
        explanation
    )


def test_a_layer_takes_the_faster_plan(toy, layer, monkeypatch):
    problem = Problem(CHAIN, "float32", False, epilogue=Epilogue(True, "gelu"))
    assert plan_of(problem, 7, device="cpu").ways == ("toy_chain",)
    monkeypatch.setattr(toy, "us", 1e9)
    plan = plan_of(problem, 7, device="cpu")
    assert len(plan.launches) == 2
    x = torch.randn(7, CHAIN.in_features)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected(layer, x))
    assert not toy.launches


def test_a_chain_is_tuned_after_its_factors(toy, capsys, monkeypatch):
    monkeypatch.setenv("KSOPT_TUNE", "measure")
    words = ["tune", "--chain", str(CHAIN), "--batch", "8", "--device", "cpu", "--seconds", "0.01"]

    def choices(*more):
        assert main.main([*words, *more, "--json"]) == 0
        return json.loads(capsys.readouterr().out)["choices"]

    measured = choices()
    patterns = [*map(str, CHAIN), str(CHAIN)]
    assert [choice["key"]["pattern"] for choice in measured] == patterns
    assert {timed["way"] for timed in measured[-1]["timed"]} == {"factors", "toy_chain"}
    assert [choice["source"] for choice in choices()] == ["recorded"] * 3
    assert sorted(choice["key"]["pattern"] for choice in choices("--show")) == sorted(patterns)
    problem = Problem(CHAIN, "float32", False, epilogue=Epilogue(True, "gelu"))
    request = TuneRequest((problem,), (8,), torch.device("cpu"), budget_s=0.01)
    *_, whole = tune(request)
    assert whole.key.problem == problem
    assert main.main(words) == 0
    out = capsys.readouterr().out
    assert str(CHAIN) in out


def test_a_layer_finds_the_plan_that_the_command_line_tuned(toy, layer, capsys, monkeypatch):
    monkeypatch.setenv("KSOPT_TUNE", "measure")
    words = ["tune", "--batch", "8", "--device", "cpu", "--seconds", "0.01", "--json"]
    words += ["--chain", str(CHAIN), "--epilogue", "gelu", "bias"]
    assert main.main(words) == 0
    whole = json.loads(capsys.readouterr().out)["choices"][-1]
    assert whole["key"]["epilogue"] == {"bias": True, "activation": "gelu", "residual": False}
    assert main.main([*words, "--show"]) == 0
    (recorded,) = json.loads(capsys.readouterr().out)["choices"]
    assert recorded["key"] == whole["key"]
    assert main.main([*words[:-2], "bias", "--siblings", "3"]) == 0
    assert json.loads(capsys.readouterr().out)["choices"][-1]["key"]["siblings"] == 3
    plan_autotuner.forget()  # as in another process
    cpu.forget()
    toy.launches.clear()

    def race(*_):
        raise AssertionError("what was tuned is timed again")

    monkeypatch.setattr(plan_race, "race", race)
    x = torch.randn(8, CHAIN.in_features)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected(layer, x))
    problem = Problem(CHAIN, "float32", False, epilogue=Epilogue(True, "gelu"))
    assert toy.launches in ([], [problem])  # whichever plan was faster: it launches once or never
    assert ("toy_chain" == whole["way"]) == bool(toy.launches)
    times = whole_layer.launch_times(problem, 8, x.device, "stored")
    assert times.measured_us == whole["measured_us"] > 0


def test_a_search_measures_the_plan(toy):
    request = LayerRequest(Dims(CHAIN.in_features, CHAIN.out_features), batch=8, dtype="float32")
    outcome = Objective(request, torch.device("cpu")).measure(CHAIN)
    assert toy.launches
    assert outcome.factors_us == ()
