"""Pairs of kernels for two factors: they race with the plans of their chain, and may win."""

import json
from dataclasses import replace

import pytest
import torch
from toy_chains import SPEC, toy_device

import ksopt
from ksopt import KSLinear
from ksopt.cli import main
from ksopt.compile.lowering import whole_layer
from ksopt.kernels import (
    autotuner,
    factor_pairs,
    layer_plans,
    mergeable,
    plan_autotuner,
    plan_race,
    registry,
    tuning_cache,
)
from ksopt.kernels.backends import cpu
from ksopt.kernels.by_factors import ByPair
from ksopt.kernels.labels import PAIR
from ksopt.kernels.operands import Operands, key_of, random_operands
from ksopt.kernels.planner import plan_of
from ksopt.kernels.problem import Epilogue, Problem
from ksopt.kernels.tuning_cache import Record, Timed
from ksopt.measure.interleaved import EntryResult
from ksopt.measure.measurement import Measurement
from ksopt.patterns.chain import Chain
from ksopt.reference import chain_reference

CHAIN = Chain.parse("(1,16,8,2)*(2,8,16,1)")
ROWS = 200
PROBLEM = Problem(CHAIN, "float32", False, epilogue=Epilogue(True, "relu"))
CPU = torch.device("cpu")
# Of each factor's candidates alone: bmm is chosen, conv is far behind.
ALONE = {"bmm": 10.0, "einsum": 10.5, "bmm_paper": 11.0, "bmm_loop": 11.2, "conv": 40.0}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("KSOPT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("KSOPT_TUNE", "measure")
    torch._dynamo.reset()
    monkeypatch.setattr(mergeable, "can_merge", lambda _: False)  # nothing computes it as a whole
    with toy_device():
        for factor in PROBLEM.factors():
            tuning_cache.save(cpu.fingerprint(), record_of(factor))
        yield
    torch._dynamo.reset()


def record_of(factor, **times_us):
    timed = tuple(
        Timed(way, None, "cached" if way == "bmm" else "any", None, us, us, us)
        for way, us in (times_us or ALONE).items()
    )
    return Record(cpu.CpuBackend().key(factor, ROWS), ROWS, timed, 0, 0)


@pytest.fixture
def raced(monkeypatch):
    """The names of what races; a way takes what ``times`` has of its name, others 20 us."""
    names, times = [], {}

    def race(entries, timer, rules):
        names.extend(entry.name for entry in entries)
        results = []
        for entry in entries:
            entry.call()
            us = times.get(entry.name, 20.0)
            results.append(EntryResult(entry, (us,), Measurement.of((us,)), 0.0))
        return results

    monkeypatch.setattr(autotuner, "race", race)
    return names, times


BEST = "pair(einsum then bmm_paper)"


def operands(problem=PROBLEM, rows=ROWS):
    return random_operands(problem, rows, CPU)


def tuned():
    return plan_autotuner.tuned(PROBLEM, ROWS, CPU, alone=True)


def call_of(inputs):
    return layer_plans.whole_call(inputs, "relu", batch_last=False, siblings=1)


def expected(inputs):
    return torch.relu(chain_reference(inputs.x, inputs.weights) + inputs.bias)


def test_the_fastest_of_each_factor_make_the_pairs():
    several = factor_pairs.candidates(key_of(PROBLEM, operands().x), ROWS, CPU)
    assert [one.label for one in several] == [
        *("pair(bmm then einsum)", "pair(einsum then bmm)", "pair(bmm then bmm_paper)"),
        *("pair(einsum then einsum)", "pair(bmm_paper then bmm)", BEST),
    ]
    assert len(several) == factor_pairs.MOST_PAIRS
    left, right = PROBLEM.factors()
    assert {(one.tile.first.problem, one.tile.second.problem) for one in several} == {(right, left)}
    for one in several:
        assert registry.restored(PROBLEM, one.name, one.config, ROWS, SPEC) == one


@pytest.mark.parametrize(
    "problem",
    [
        replace(PROBLEM, batch_last=True),
        replace(PROBLEM, siblings=2),
        Problem(Chain.parse("(1,16,8,2)*(2,8,8,1)*(1,16,16,1)"), "float32", False),
    ],
)
def test_other_problems_have_none(problem):
    assert not registry.takes_pair(problem)
    assert factor_pairs.candidates(key_of(problem, operands(problem).x), ROWS, CPU) == []


def test_few_rows_and_factors_that_were_not_measured_have_none():
    assert factor_pairs.candidates(key_of(PROBLEM, operands(rows=128).x), 128, CPU) == []
    assert factor_pairs.candidates(key_of(PROBLEM, operands(rows=999).x), 999, CPU) == []


def test_a_factor_without_a_near_rival_is_in_all_pairs():
    _, right = PROBLEM.factors()
    tuning_cache.save(cpu.fingerprint(), record_of(right, bmm=10.0, einsum=12.0))
    several = factor_pairs.candidates(key_of(PROBLEM, operands().x), ROWS, CPU)
    labels = [one.label for one in several]
    assert labels == ["pair(bmm then einsum)", "pair(bmm then bmm_paper)"]


def test_a_pair_wins_and_computes_all_later_calls(raced, monkeypatch):
    names, times = raced
    times[BEST] = 15.0
    record = tuned()
    assert names[0] == "factors"
    assert names.count(BEST) == 1
    assert len(names) == 2 + factor_pairs.MOST_PAIRS  # factors with weights that change, too
    assert record.chosen(repacked=False).label == BEST
    assert record.chosen(repacked=True).way == "factors"

    def race(*_):
        raise AssertionError("what was tuned is timed again")

    monkeypatch.setattr(plan_race, "race", race)
    for _ in range(2):
        inputs = operands()
        call = call_of(inputs)
        assert isinstance(call, ByPair)
        assert (call.first.name, call.second.name) == ("einsum", "bmm_paper")
        y = call(inputs.x, inputs.weights, inputs.bias)
        torch.testing.assert_close(y, expected(inputs))
        out = torch.empty_like(y)
        assert call(inputs.x, inputs.weights, inputs.bias, None, out) is out
        torch.testing.assert_close(out, y)
        plan = plan_of(PROBLEM, ROWS, device="cpu")
        assert plan.ways == (PAIR,)
        assert plan.is_one_operator
        assert plan.measured_us == 15.0
        plan_autotuner.forget()  # as in another process
    trained = plan_of(PROBLEM, ROWS, device="cpu", repacked=True)
    assert len(trained.launches) == 2


def test_the_factors_own_choices_stay_where_no_pair_is_faster(raced):
    _, times = raced
    times[BEST] = 19.9
    assert tuned().chosen(repacked=False).way == "factors"
    assert call_of(operands()) is None
    assert len(plan_of(PROBLEM, ROWS, device="cpu").launches) == 2
    plan_autotuner.forget()
    assert call_of(operands()) is None


def test_a_call_alone_measures_nothing(raced):
    names, _ = raced
    assert call_of(operands()) is None
    assert not names


def test_a_call_that_measures_plans_measures_pairs(raced, monkeypatch):
    names, times = raced
    times[BEST] = 15.0
    monkeypatch.setattr(plan_autotuner, "has_rivals", lambda *_: True)
    assert isinstance(call_of(operands()), ByPair)
    assert names.count(BEST) == 1


def test_a_pair_stays_where_it_is_not_beaten(raced):
    names, times = raced
    times[BEST] = 15.0
    tuned()
    times["factors"] = 15.0
    record = plan_autotuner.tune(operands(), PROBLEM, 0.01)
    assert record.chosen(repacked=False).label == BEST
    assert names.count(BEST) == 2


def broken(config):
    return {"first": {"way": "bmm", "config": None}, "second": config}


@pytest.mark.parametrize(
    "config",
    [
        None,
        {},
        {"first": {"way": "bmm", "config": None}},
        broken({"way": "bmm"}),
        broken({"way": 3, "config": None}),
        broken({"way": "bmm", "config": 3}),
        broken({"way": PAIR, "config": broken({"way": "bmm", "config": None})}),
        broken("bmm"),
        broken({"way": "no such way", "config": None}),
        broken({"way": "mma16", "config": {"bm": -1}}),
        broken({"way": "factors", "config": None}),
        broken({"way": "merged", "config": None}),
    ],
)
def test_a_broken_record_counts_as_missing(raced, config):
    _, times = raced
    times[BEST] = 15.0
    record = tuned()
    path = tuning_cache.path_of(cpu.fingerprint(), record.key)
    values = json.loads(path.read_text())
    values["timed"][values["cached"]]["config"] = config
    path.write_text(json.dumps(values))
    plan_autotuner.forget()
    assert call_of(operands()) is None
    assert len(plan_of(PROBLEM, ROWS, device="cpu").launches) == 2
    assert tuned().chosen(repacked=False).label == BEST


def test_it_is_explained_and_listed(raced, capsys):
    _, times = raced
    times[BEST] = 15.0
    choice = plan_of(PROBLEM, ROWS, device="cpu").launches[0].choice
    words = ["tune", "--chain", str(CHAIN), "--epilogue", "bias", "relu", "--batch", str(ROWS)]
    assert main.main([*words, "--device", "cpu", "--seconds", "0.01"]) == 0
    assert "pair of einsum and bmm_paper" in capsys.readouterr().out
    choice = plan_of(PROBLEM, ROWS, device="cpu").launches[0].choice
    assert choice.name == "pair of einsum and bmm_paper"
    fastest = (
        "1.33 times as fast as the kernels that are the fastest of each factor alone (20.0 us)"
    )
    assert choice.reason == f"measured 15.0 us at batch {ROWS}; {BEST}; {fastest}"
    how = whole_layer.in_words(PROBLEM, ROWS, CPU, "stored")
    assert how == "One launch per factor, tuned as a pair of einsum and bmm_paper,"
    assert whole_layer.in_words(PROBLEM, ROWS, CPU, "computed") == "One launch per factor"
    assert whole_layer.launch_times(PROBLEM, ROWS, CPU, "stored").measured_us == 15.0


@pytest.mark.parametrize("wins", [True, False])
def test_a_graph_has_one_operator_where_a_pair_was_chosen(raced, wins):
    _, times = raced
    times[BEST] = 5.0 if wins else 20.0
    tuned()
    layer = KSLinear(CHAIN.in_features, CHAIN.out_features, CHAIN, activation="relu")
    x = torch.randn(ROWS, CHAIN.in_features)
    with torch.no_grad():
        explanation = ksopt.explain(layer, x)
        y = torch.compile(layer, backend="ksopt", fullgraph=True)(x)
        torch.testing.assert_close(y, expected(Operands(x, tuple(layer.weights), layer.bias)))
    (site,) = explanation.sites
    assert ("tuned as a pair of einsum and bmm_paper, computes all of it" in site.reason) == wins
    assert (site.one_launch == ("bias", "relu")) == wins
