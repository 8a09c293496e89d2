"""Plans: one launch per factor, or one by a family that takes the whole chain: the faster."""

import math
from dataclasses import replace

import pytest
import torch
from toy_chains import SPEC, ToyChain, registered, toy_device

from ksopt.kernels import layer_plans, plan_autotuner, registry, tuning_cache
from ksopt.kernels.backends import cpu
from ksopt.kernels.operands import Operands, key_of
from ksopt.kernels.planner import plan_of
from ksopt.kernels.problem import EMPTY, Epilogue, Problem
from ksopt.patterns.chain import Chain, Pattern
from ksopt.reference import chain_reference

CHAIN = Chain.parse("(1,192,48,2)*(2,48,192,1)")
LONGER = Chain.parse("(16,2,2,1)*(1,4,4,8)*(16,2,2,1)")  # its product is no factor
PROBLEM = Problem(CHAIN, "float32", False, epilogue=Epilogue(True, "relu"))


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("KSOPT_CACHE_DIR", str(tmp_path / "cache"))
    plan_autotuner.forget()


@pytest.fixture
def toy(monkeypatch):
    with registered() as family:
        monkeypatch.setattr(family, "us", 1e-3)
        monkeypatch.setattr(family, "fault", 0.0)
        yield family


def operands(chain=CHAIN, rows=32):
    x = torch.randn(rows, chain.in_features)
    weights = tuple(torch.randn(p.weight_shape) / p.c**0.5 for p in chain)
    return Operands(x, weights, torch.randn(chain.out_features))


def expected(inputs):
    return torch.relu(chain_reference(inputs.x, inputs.weights) + inputs.bias)


def call_of(inputs, activation="relu"):
    return layer_plans.whole_call(inputs, activation, batch_last=False, siblings=1)


def test_without_a_family_that_takes_chains_a_plan_is_a_launch_a_factor():
    with toy_device():
        check_launches_a_factor()


def check_launches_a_factor():
    plan = plan_of(PROBLEM, 100, spec=SPEC)
    assert [one.problem for one in plan.launches] == list(reversed(PROBLEM.factors()))
    assert (plan.within, plan.behind) == (PROBLEM.epilogue, EMPTY)  # in the last launch
    assert not plan.is_whole
    times = [launch.choice.predicted_us for launch in plan.launches]
    assert plan.predicted_us == pytest.approx(sum(times))
    assert plan.measured_us is None
    batch_last = plan_of(replace(PROBLEM, batch_last=True), 100, spec=SPEC)
    assert (batch_last.within, batch_last.behind) == (EMPTY, PROBLEM.epilogue)
    siblings = Problem(CHAIN, "float32", False, siblings=3)
    assert plan_of(siblings, 100, spec=SPEC).predicted_us == pytest.approx(3 * sum(times))
    assert call_of(operands()) is None


def test_a_factor_is_a_plan_of_one_launch():
    problem = Problem.of_factor(Pattern(4, 64, 64, 16), "float16", False)
    plan = plan_of(problem, 1000, spec=SPEC)
    assert plan.is_whole
    assert plan.ways == ("wgmma16_streamed",)


def test_a_plan_on_a_cpu_has_no_predictions():
    plan = plan_of(PROBLEM, 100, device="cpu")
    assert (plan.predicted_us, plan.measured_us) == (None, None)
    assert len(plan.launches) == 2


def test_a_family_that_takes_the_chain_gives_a_plan_of_one_launch(toy):
    plan = plan_of(PROBLEM, 100, spec=SPEC)
    assert plan.is_whole
    assert plan.ways == ("toy_chain",)
    assert plan.predicted_us == 1e-3
    assert plan.behind == EMPTY
    longer = Problem(LONGER, "float32", False)
    assert toy().unsupported_reason(longer, SPEC) == "it takes chains of 2 factors, and this has 3"
    assert len(plan_of(longer, 100, spec=SPEC).launches) == 3
    toy.us = 1e9
    assert len(plan_of(PROBLEM, 100, spec=SPEC).launches) == 2


def test_what_is_predicted_is_launched_where_nothing_may_be_measured(toy, monkeypatch):
    monkeypatch.setenv("KSOPT_TUNE", "model")
    inputs = operands()
    y = call_of(inputs)(inputs.x, inputs.weights, inputs.bias)
    torch.testing.assert_close(y, expected(inputs))
    assert toy.launches == [PROBLEM]
    plan_autotuner.forget()
    toy.us = math.inf
    assert call_of(inputs) is None
    plan_autotuner.forget()
    monkeypatch.setenv("KSOPT_TUNE", "off")
    toy.us = 1e-3
    assert call_of(inputs) is None


def test_plans_race_and_the_winner_is_recorded(toy):
    inputs = operands()
    call = call_of(inputs)
    assert toy.launches  # whoever has won
    toy.launches.clear()
    key = key_of(PROBLEM, inputs.x)
    record = tuning_cache.load(cpu.fingerprint(), key)
    assert {one.way for one in record.timed} == {"factors", "toy_chain"}
    won = record.chosen(repacked=False).way
    assert (call is None) == (won == "factors")
    assert call_of(inputs) is call
    plan = plan_of(PROBLEM, 32, device="cpu")
    assert plan.is_whole == (won == "toy_chain")
    plan_autotuner.forget()  # as in another process
    assert (call_of(inputs) is None) == (won == "factors")
    assert not toy.launches


@pytest.mark.parametrize("won", ["factors", "toy_chain"])
def test_a_record_decides(toy, won):
    inputs = operands()
    record = plan_autotuner.tune(inputs, PROBLEM, 0.01)
    names = [one.way for one in record.timed]
    at = names.index(won)
    record = tuning_cache.Record(record.key, record.batch, record.timed, at, at)
    tuning_cache.save(cpu.fingerprint(), record)
    plan_autotuner.forget()
    toy.launches.clear()
    call = call_of(inputs)
    assert (call is None) == (won == "factors")
    plan = plan_of(PROBLEM, 32, device="cpu")
    if call is None:
        assert len(plan.launches) == 2
        return
    torch.testing.assert_close(call(inputs.x, inputs.weights, inputs.bias), expected(inputs))
    (launch,) = plan.launches
    assert launch.choice.source == "recorded"
    assert launch.us == plan.measured_us == record.timed[at].median_us
    assert "times as fast as one launch per factor" in launch.choice.reason


def test_a_kernel_with_a_wrong_result_cannot_be_chosen(toy):
    toy.fault = 0.5
    inputs = operands()
    with pytest.warns(RuntimeWarning, match="toy_chain.*is left out: its result is wrong"):
        assert call_of(inputs) is None


def test_a_factor_has_nothing_to_tune_as_a_whole(toy):
    longer = Problem(LONGER, "float32", False)
    assert plan_autotuner.tune(operands(longer.chain), longer, 0.01) is None


def test_no_rows_take_the_factors(toy):
    assert call_of(operands(rows=0)) is None
    assert isinstance(toy(), ToyChain)


@pytest.mark.parametrize(
    ("text", "way", "within", "behind"),
    [
        ("(1,64,32,2)*(2,32,64,1)", "decode_mma16", ("bias", "gelu", "residual"), ()),
        ("(1,64,32,2)*(2,32,64,1)", "gather_mma", (), ("bias", "gelu", "residual")),
        ("(1,128,32,1)*(1,32,128,1)", "bmm", (), ("bias", "gelu", "residual")),
    ],
)
def test_what_the_last_launch_of_several_computes(text, way, within, behind):
    after = Epilogue(True, "gelu", True)
    problem = Problem(Chain.parse(text), "bfloat16", False, epilogue=after)
    parts = registry.within(problem, way)
    assert tuple(one.names for one in parts) == (within, behind)
    assert registry.within(replace(problem, siblings=2), way)[0] == EMPTY


def test_a_plan_says_what_its_last_launch_adds():
    chain = Chain.parse("(1,512,128,2)*(2,128,512,1)")
    problem = Problem(chain, "bfloat16", False, epilogue=Epilogue(True))
    plan = plan_of(problem, 16, spec=SPEC)
    assert plan.ways == ("decode_mma16", "decode_mma16")
    assert (plan.within.names, plan.behind) == (("bias",), EMPTY)
    assert not plan.is_whole
