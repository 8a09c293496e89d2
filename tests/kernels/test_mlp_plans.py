"""Plans of two layers: a plan each, or one launch of a family that takes both, as is faster."""

import math
from dataclasses import replace

import pytest
import torch
from toy_chains import SPEC, ToyChain, toy_device, with_mlps

from ksopt.errors import InvalidInputError
from ksopt.kernels import (
    by_layers,
    mergeable,
    mlp_plans,
    plan_autotuner,
    planner,
    registry,
    tuning_cache,
)
from ksopt.kernels.backends import cpu
from ksopt.kernels.by_layers import ByLayers
from ksopt.kernels.families.chain_mma import ChainMma
from ksopt.kernels.mlp_plans import Mlp
from ksopt.kernels.operands import Operands, key_of
from ksopt.kernels.planner import plan_of
from ksopt.kernels.problem import Epilogue, Problem, ProblemKey, SecondLayer
from ksopt.patterns.chain import Chain
from ksopt.reference import chain_reference

UP = Chain.parse("(1,64,8,2)*(2,8,16,1)")  # 32 -> 16 -> 128
DOWN = Chain.parse("(1,16,16,2)*(2,16,64,1)")  # 128 -> 32 -> 32
PROBLEM = Problem(
    *(UP, "float32", False),
    epilogue=Epilogue(True, "gelu"),
    second=SecondLayer(DOWN, Epilogue(True, "none", True)),
)
MLP = Mlp(2, "gelu")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("KSOPT_CACHE_DIR", str(tmp_path / "cache"))
    plan_autotuner.forget()


@pytest.fixture
def toy(monkeypatch):
    with with_mlps() as family:
        monkeypatch.setattr(family, "us", 1e-3)
        monkeypatch.setattr(family, "fault", 0.0)
        yield family


def operands(rows=32):
    def draw(*size):
        return torch.randn(*size)

    weights = tuple(draw(*p.weight_shape) / p.c**0.5 for chain in (UP, DOWN) for p in chain)
    return Operands(draw(rows, 32), weights, draw(32), draw(rows, 32), draw(128))


def expected(inputs):
    hidden = chain_reference(inputs.x, inputs.weights[:2]) + inputs.hidden_bias
    hidden = torch.nn.functional.gelu(hidden)
    return chain_reference(hidden, inputs.weights[2:]) + inputs.bias + inputs.residual


def test_a_key_of_two_layers_is_read_back_and_has_a_file_of_its_own():
    key = ProblemKey.of_problem(PROBLEM, 100)
    assert ProblemKey.from_json(key.to_json()) == key
    first, second = PROBLEM.layers()
    assert (first.chain, first.epilogue, first.second) == (UP, PROBLEM.epilogue, None)
    assert (second.chain, second.epilogue) == (DOWN, PROBLEM.second.epilogue)
    assert PROBLEM.out_features == 32
    assert not PROBLEM.is_factor
    alone = ProblemKey.of_problem(first, 100)
    assert tuning_cache.path_of({}, key) != tuning_cache.path_of({}, alone)
    assert "second" not in alone.to_json()
    assert str(PROBLEM) == f"{UP} bias gelu then {DOWN} bias residual float32 batch_first"


def test_what_is_no_mlp_is_refused():
    with pytest.raises(InvalidInputError, match="reads 32 features, but the first one gives 128"):
        Problem(UP, "float32", False, second=SecondLayer(UP))
    for other in ({"siblings": 2}, {"epilogue": Epilogue(residual=True)}):
        with pytest.raises(InvalidInputError, match="no siblings, no residual and no cast"):
            Problem(UP, "float32", False, second=SecondLayer(DOWN), **other)


def test_without_a_family_that_takes_both_each_layer_has_its_plan(monkeypatch):
    in_tf32 = replace(PROBLEM, exact=False)
    assert plan_of(in_tf32, 100, spec=SPEC).ways == ("chain_mma",)
    monkeypatch.setattr(ChainMma, "takes_mlps", False)
    monkeypatch.setattr(registry, "_best_of", registry._best_of.__wrapped__)
    assert len(plan_of(in_tf32, 100, spec=SPEC).ways) == 2
    # Each is one launch, which has the layer's epilogue.
    plan = plan_of(PROBLEM, 100, spec=SPEC)
    assert len(plan.ways) == 2
    assert set(plan.ways) <= {"merged", "chain_mma"}
    assert plan.between.is_empty
    assert plan.behind.is_empty
    monkeypatch.setattr(mergeable, "can_merge", lambda _: False)
    with toy_device():
        plan = plan_of(PROBLEM, 100, spec=SPEC)
        one, two = (plan_of(layer, 100, spec=SPEC) for layer in PROBLEM.layers())
    assert plan.launches == (*one.launches, *two.launches)
    assert (plan.between, plan.behind) == (PROBLEM.epilogue, PROBLEM.second.epilogue)
    assert not plan.is_whole
    assert mlp_plans.whole_call(operands(), MLP) is None


def test_a_family_of_single_layers_is_no_candidate_for_two(toy):
    assert ToyChain().unsupported_reason(PROBLEM, SPEC) == "it computes one layer at most"
    assert toy().unsupported_reason(PROBLEM.layers()[0], SPEC) is not None


def test_the_faster_plan_is_predicted(toy):
    plan = plan_of(PROBLEM, 100, spec=SPEC)
    assert plan.is_whole
    assert plan.ways == ("toy_mlp",)
    toy.us = 1e9
    plan = plan_of(PROBLEM, 100, spec=SPEC)
    assert plan.ways == ("toy_chain", "toy_chain")
    assert plan.predicted_us == pytest.approx(2e-3)
    layers, *_ = registry.plain(PROBLEM, 100, SPEC)
    assert (layers.name, layers.predicted_us) == ("layers", pytest.approx(2e-3))


def test_what_is_predicted_is_launched_where_nothing_may_be_measured(toy, monkeypatch):
    monkeypatch.setenv("KSOPT_TUNE", "model")
    inputs = operands()
    call = mlp_plans.whole_call(inputs, MLP)
    torch.testing.assert_close(call(*inputs.arguments(PROBLEM)), expected(inputs))
    assert toy.launches == [PROBLEM]
    for mode, us in (("model", math.inf), ("off", 1e-3)):
        plan_autotuner.forget()
        monkeypatch.setenv("KSOPT_TUNE", mode)
        toy.us = us
        assert mlp_plans.whole_call(inputs, MLP) is None
        torch.testing.assert_close(ByLayers(PROBLEM)(*inputs.arguments(PROBLEM)), expected(inputs))


def test_plans_race_and_the_winner_is_recorded(toy):
    inputs = operands()
    call = mlp_plans.whole_call(inputs, MLP)
    assert toy.launches  # whoever has won
    assert ToyChain.launches  # the layers' plans were chosen first
    record = tuning_cache.load(cpu.fingerprint(), key_of(PROBLEM, inputs.x))
    assert {one.way for one in record.timed} == {"layers", "toy_mlp"}
    assert {one.weight for one in record.timed if one.way == "layers"} == {"cached", "repacked"}
    won = record.chosen(repacked=False).way
    assert (call is None) == (won == "layers")
    for layer in PROBLEM.layers():
        key = ProblemKey.of_problem(layer, 32)
        assert tuning_cache.load(cpu.fingerprint(), key) is not None
    plan = plan_of(PROBLEM, 32, device="cpu")
    assert plan.is_whole == (won == "toy_mlp")
    assert mlp_plans.whole_call(inputs, MLP) is call
    toy.launches.clear()
    plan_autotuner.forget()  # as in another process
    assert (mlp_plans.whole_call(inputs, MLP) is None) == (won == "layers")
    assert not toy.launches


@pytest.mark.parametrize("won", ["layers", "toy_mlp"])
def test_a_record_decides(toy, won):
    inputs = operands()
    record = plan_autotuner.tuned(PROBLEM, 32, torch.device("cpu"))
    at = [one.way for one in record.timed].index(won)
    record = tuning_cache.Record(record.key, record.batch, record.timed, at, at)
    tuning_cache.save(cpu.fingerprint(), record)
    plan_autotuner.forget()
    call = mlp_plans.whole_call(inputs, MLP)
    assert (call is None) == (won == "layers")
    whole = planner.whole_choice(PROBLEM, 32, torch.device("cpu"))
    assert (whole.way, whole.source) == (won, "recorded")
    if call is not None:
        torch.testing.assert_close(call(*inputs.arguments(PROBLEM)), expected(inputs))
        assert "times as fast as one plan per layer" in whole.reason


def test_a_kernel_with_a_wrong_result_cannot_be_chosen(toy):
    toy.fault = 0.5
    with pytest.warns(RuntimeWarning, match="toy_mlp.*is left out: its result is wrong"):
        assert mlp_plans.whole_call(operands(), MLP) is None


def test_it_is_checked_on_random_numbers_where_the_operands_say_nothing(toy):
    inputs = operands()
    inputs.hidden_bias.fill_(math.nan)
    toy.fault = 0.5
    with pytest.warns(RuntimeWarning, match="its result is wrong"):
        assert mlp_plans.whole_call(inputs, MLP) is None


def test_no_rows_take_the_layers(toy):
    assert mlp_plans.whole_call(operands(rows=0), MLP) is None


@torch.no_grad()
def test_two_layers_by_a_plan_each_take_no_python_once_these_are_known(monkeypatch):
    monkeypatch.setenv("KSOPT_TUNE", "off")
    inputs, call = operands(), ByLayers(PROBLEM)
    arguments = inputs.arguments(PROBLEM)
    for _ in range(3):
        y = call(*arguments)
    monkeypatch.setattr(by_layers.layer_plans, "whole_call", None)
    out = torch.full_like(y, torch.nan)
    for result in (call(*arguments), call(*arguments, out)):
        torch.testing.assert_close(result, expected(inputs), rtol=1e-4, atol=1e-4)
    assert result.data_ptr() == out.data_ptr()
