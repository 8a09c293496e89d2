"""Decisions on sites by measured, stored or predicted times."""

import dataclasses
import json
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from ksopt.compile.lowering import benchmark, decide
from ksopt.compile.lowering.benchmark import measured_times
from ksopt.compile.lowering.decide import by_times, measured
from ksopt.compile.lowering.site_times import SiteCase, SiteRecord, Times
from ksopt.compile.sites import Place, Site, Verdict
from ksopt.errors import InvalidInputError
from ksopt.jit import cache
from ksopt.kernels import planner, tuning_cache
from ksopt.kernels.backends import cpu
from ksopt.kernels.problem import Problem, is_exact
from ksopt.measure.interleaved import EntryResult
from ksopt.measure.measurement import Measurement
from ksopt.patterns.chain import Chain
from ksopt.reference import ks_reference

CPU = torch.device("cpu")
CHAIN = Chain.parse("(1,8,4,4)*(4,4,8,1)")


def case_of(chain, dtype, batch, **how):
    return SiteCase(Problem(chain, dtype, False, is_exact(dtype)), batch, **how)


def path_of(case):
    return tuning_cache.path_of(cpu.fingerprint(), case.key)


def site(batch=64):
    return Site("n", Place(), "bmm", Verdict.NOT_LOWERED, "", CHAIN, batch, "float32")


def test_the_faster_one_is_taken_and_a_tie_is_lowered():
    assert by_times(Times(10.0, 20.0), measured=True).lower
    assert by_times(Times(20.3, 20.0), measured=True).lower
    slower = by_times(Times(21.0, 20.0), measured=False)
    assert not slower.lower
    assert slower.reason == "Predicted 21.0 us, slower than 20.0 us under Inductor."
    assert (slower.predicted, slower.measured) == (Times(21.0, 20.0), None)


def test_a_site_is_measured_once_and_stored():
    calls = []

    def timer(case, device):
        calls.append(case)
        return Times(5.0, 8.0)

    for batch in (100, 128, 65):  # one power of two
        assert measured(case_of(CHAIN, "float32", batch), CPU, timer) == Times(5.0, 8.0)
    assert len(calls) == 1
    others = (
        case_of(CHAIN, "float32", 129),
        case_of(CHAIN, "bfloat16", 100),
        case_of(CHAIN, "float32", 100, training=True),
        case_of(CHAIN, "float32", 100, fused=("before",)),
        case_of(CHAIN, "float32", 100, fused=("before", "behind")),
        case_of(CHAIN, "float32", 100, training=True, fused=("behind",)),
        case_of(CHAIN, "float32", 100, to_input=True),
        case_of(CHAIN, "float32", 100, computed=True),
        case_of(CHAIN, "float32", 100, to_input=True, computed=True),
    )
    for case in (*others, *others):
        measured(case, CPU, timer)
    assert calls[1:] == list(others)
    first = case_of(CHAIN, "float32", 100)
    path_of(first).write_text("{broken", encoding="utf-8")
    measured(first, CPU, timer)
    assert calls[-1] == first
    assert len(calls) == 2 + len(others)


def test_of_those_that_ask_at_once_one_measures():
    """Another process has another handle of the lock, as another thread has here."""
    calls, answers = [], []

    def timer(case, device):
        calls.append(case)
        time.sleep(0.3)
        return Times(5.0, 8.0)

    def ask():
        answers.append(measured(case_of(CHAIN, "float32", 7), CPU, timer))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [Times(5.0, 8.0)] * 4
    assert len(calls) == 1


def test_nothing_is_timed_where_algorithms_must_be_deterministic(monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    monkeypatch.setattr(decide, "measured", None)
    for tune in (None, "measure", "model"):
        decision = decide.decide(site(), CPU, tune)
        assert (decision.lower, decision.measured) == (True, None)
    monkeypatch.setattr(decide, "predicted", lambda *_: Times(9.0, 3.0))
    assert decide.decide(site(), torch.device("cuda"), "measure").reason == (
        "Predicted 9.0 us, slower than 3.0 us under Inductor."
    )


def test_the_question_says_how_a_site_is_run(monkeypatch):
    calls = []

    def predicted(case, device):
        calls.append(case)
        return Times(2.0, 1.0)

    monkeypatch.setattr(decide, "predicted", predicted)
    reasons = []
    for how in ({"training": True}, {"to_input": True}, {"computed": True}, {}):
        one = dataclasses.replace(site(), **how)
        reasons.append(decide.decide(one, torch.device("cuda"), "model").reason)
    assert [(q.with_gradients, q.repacked) for q in calls] == [
        (True, True), (True, False), (False, True), (False, False)
    ]  # fmt: skip
    assert [reason.removesuffix(", slower than 1.0 us under Inductor.") for reason in reasons] == [
        "Predicted 2.0 us with its gradients",
        "Predicted 2.0 us with the gradient of its input",
        "Predicted 2.0 us",
        "Predicted 2.0 us",
    ]


def test_a_measurement_is_of_one_precision_and_one_version_of_the_code(monkeypatch):
    calls = []

    def timer(case, device):
        calls.append(case)
        return Times(5.0, 8.0)

    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "high", "highest", "high"):
            torch.set_float32_matmul_precision(precision)
            measured(case_of(CHAIN, "float32", 5000), CPU, timer)
    finally:
        torch.set_float32_matmul_precision(before)
    assert len(calls) == 2
    case = case_of(CHAIN, "float32", 5000)
    monkeypatch.setattr(SiteRecord, "depends_on", lambda: {"code of sites": "another"})
    measured(case, CPU, timer)
    measured(case, CPU, timer)
    assert len(calls) == 3


def ran_out(*_):
    raise torch.OutOfMemoryError("CUDA out of memory.")


def only_the_first_ran(entries, *_):
    first, *others = entries
    ran = EntryResult(first, (1.0,), Measurement.of([1.0]))
    return [ran, *(EntryResult(entry, (), None) for entry in others)]


@pytest.mark.parametrize(
    ("name", "stand_in"), [("medians_us", ran_out), ("race", only_the_first_ran)]
)
def test_what_cannot_be_timed_does_not_end_the_compilation(name, stand_in, monkeypatch, caplog):
    monkeypatch.setattr(benchmark, name, stand_in)
    chain = Chain.parse("(3,4,8,1)")
    decision = decide.decide(
        Site("n", Place(), "bmm", Verdict.NOT_LOWERED, "", chain, 4, "float32"), CPU, "measure"
    )
    assert (decision.lower, decision.measured) == (True, None)  # what a CPU does without times
    assert "whether (3,4,8,1) is faster lowered was not measured" in caplog.text


def test_a_long_compilation_leaves_time_for_more_than_one_sample(monkeypatch):
    now_s = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now_s[0])
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now_s[0] * 1e9)

    def taking(*seconds):
        left = list(seconds)

        def call():
            now_s[0] += left.pop(0) if len(left) > 1 else left[0]

        return call

    compiled_then_disturbed = taking(3.0, 0.001, 0.009, 0.001)
    actual = benchmark.medians_us({"one": compiled_then_disturbed, "other": taking(0.002)}, CPU)
    assert actual == pytest.approx({"one": 1_000.0, "other": 2_000.0})


@pytest.mark.slow
def test_timing_is_no_recompilation_of_the_users():
    with torch._dynamo.config.patch(error_on_recompile=True):
        for text in ("(3,4,8,1)", "(3,8,4,1)"):
            assert measured_times(case_of(Chain.parse(text), "float32", 16), CPU).ksopt_us > 0


@pytest.mark.slow
def test_timing_inside_a_compilation_leaves_the_outer_one_as_it_was(compiled_by_eager):
    layer = torch.nn.Conv1d(6, 9, 1, groups=3)
    compiled = torch.compile(layer, backend="ksopt", options={"tune": "measure"})
    x = torch.randn(5, 6, 4)
    with torch.device("meta"):
        y = compiled(x)
        assert torch.empty(1).is_meta  # the default device is still the user's
        compiled(x)
    (actual,) = [site for report in compiled_by_eager.reports for site in report.sites]
    assert actual.measured is not None
    assert actual.predicted is None
    torch.testing.assert_close(y, layer(x))


@pytest.mark.slow
def test_a_training_step_that_is_timed_is_compiled_once(compiled_by_eager):
    layer = torch.nn.Conv1d(6, 9, 1, groups=3)
    compiled = torch.compile(layer, backend="ksopt", options={"tune": "measure"})
    for _ in range(3):
        compiled(torch.randn(5, 6, 4)).sum().backward()
    assert len(compiled_by_eager.graphs) == 1


def test_a_folder_that_cannot_be_written_is_no_failure(monkeypatch):
    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(tuning_cache.os, "fsync", full)
    monkeypatch.setattr(cache, "_warned", set())
    with pytest.warns(RuntimeWarning, match="no space left"):
        times = measured(case_of(CHAIN, "float16", 3), CPU, lambda *_: Times(1.0, 2.0))
    assert times == Times(1.0, 2.0)


@pytest.mark.parametrize(
    "values",
    [
        *({"kind": "choice"}, {"ksopt_us": float("nan")}, {"ksopt_us": 0.0}, {"unfused_us": "x"}),
        *({"key": None}, {"key": {"product": {}, "conditions": []}}, {"schema": 0}),
    ],
)
def test_a_damaged_record_is_measured_again(values, tmp_path, monkeypatch):
    monkeypatch.setenv("KSOPT_CACHE_DIR", str(tmp_path / "cache"))
    case = case_of(CHAIN, "float32", 64, training=True, fused=("behind",))
    measured(case, CPU, lambda *_: Times(1.0, 2.0))
    (record,) = tuning_cache.load_all(cpu.fingerprint(), SiteRecord)
    assert record == SiteRecord(case.key, 64, Times(1.0, 2.0))
    assert tuning_cache.load_all(cpu.fingerprint()) == []
    path = path_of(case)
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    assert tuning_cache.load_all(cpu.fingerprint(), SiteRecord) == []
    assert measured(case, CPU, lambda *_: Times(4.0, 3.0)) == Times(4.0, 3.0)


def test_what_others_could_have_written_is_measured_again(tmp_path, monkeypatch):
    monkeypatch.setenv("KSOPT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_warned", set())
    case = case_of(CHAIN, "float32", 5000)
    measured(case, CPU, lambda *_: Times(1.0, 2.0))
    path_of(case).chmod(0o666)
    with pytest.warns(RuntimeWarning, match="writable by other users"):
        assert measured(case, CPU, lambda *_: Times(4.0, 3.0)) == Times(4.0, 3.0)


def test_on_a_cpu_the_model_lowers_and_the_clock_decides(monkeypatch):
    assert decide.decide(site(), CPU).lower
    assert decide.decide(site(), CPU, "off").reason == (
        "Every recognised site is lowered: tune is off."
    )
    monkeypatch.setattr(decide, "measured", lambda *_: Times(9.0, 3.0))
    stored = decide.decide(site(), CPU, "measure")
    assert (stored.lower, stored.measured) == (False, Times(9.0, 3.0))


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"training": True}, {"to_input": True}, {"computed": True}])
def test_the_clock_times_both_ways(how):
    times = measured_times(case_of(CHAIN, "float32", 16, fused=("before", "behind"), **how), CPU)
    assert times.ksopt_us > 0
    assert times.unfused_us > 0


@pytest.fixture
def nothing_predicted():
    decide._predicted_once.cache_clear()
    yield
    decide._predicted_once.cache_clear()


def test_measured_times_are_reported_beside_predicted_ones(monkeypatch, nothing_predicted):
    calls = []

    def predicted(case, device):
        calls.append(case)
        return Times(7.0, 14.0)

    monkeypatch.setattr(decide, "predicted", predicted)
    monkeypatch.setattr(decide, "measured", lambda *_: Times(9.0, 3.0))
    cuda = torch.device("cuda")
    stored = decide.decide(site(), cuda, "measure")
    assert (stored.lower, stored.predicted, stored.measured) == (
        False,
        Times(7.0, 14.0),
        Times(9.0, 3.0),
    )
    assert stored.reason == "Measured 9.0 us, slower than 3.0 us under Inductor."
    off = decide.decide(site(), cuda, "off")
    assert (off.lower, off.predicted, off.measured) == (True, Times(7.0, 14.0), None)
    assert len(calls) == 1  # the same layer again
    by_model = decide.decide(site(), cuda, "model")
    assert (by_model.predicted, by_model.measured) == (Times(7.0, 14.0), None)
    assert decide.decide(site(), CPU, "measure").predicted is None  # no model
    assert len(calls) == 2


def test_a_prediction_that_fails_is_not_reported(monkeypatch, nothing_predicted):
    def fails(case, device):
        raise RuntimeError("no such device")

    monkeypatch.setattr(decide, "predicted", fails)
    monkeypatch.setattr(decide, "measured", lambda *_: Times(3.0, 9.0))
    for tune, times in (("measure", Times(3.0, 9.0)), ("off", None)):
        decision = decide.decide(site(), torch.device("cuda"), tune)
        assert (decision.lower, decision.predicted, decision.measured) == (True, None, times)


def test_a_wrong_value_is_refused():
    with pytest.raises(InvalidInputError, match="it must be one of model, measure, off"):
        decide.checked_tune("always")


def test_both_ways_compute_the_same_step():
    shapes = [(2, 3, 4, 5), (1, 8, 3, 1), (1, 3, 7, 1)]
    weights = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    x = torch.randn(6, 7, dtype=torch.float64, requires_grad=True)
    # (2,3,4,5) meets 40 features: repeat what the dense factors give.
    wide = torch.randn(1, 40, 8, 1, dtype=torch.float64, requires_grad=True)
    weights.insert(1, wide)
    before, behind = (torch.rand(n, dtype=torch.float64) for n in (7, 30))
    for around in ((None, None), (before, None), (None, behind), (before, behind)):
        y = x if around[0] is None else x * around[0]
        for weight in reversed(weights):
            y = ks_reference(y, weight)
        y = y if around[1] is None else y * around[1]
        grad = torch.randn_like(y)
        truth = [y, *torch.autograd.grad(y, (*weights, x), grad)]
        with torch.no_grad():
            for multiply, weight_grad in (
                (benchmark.batched_product, benchmark.batched_weight_grad),
                (benchmark.by_repacked, benchmark._weight_grad),
                (benchmark.by_cached, benchmark._weight_grad),
            ):
                actual = benchmark.step(x, grad, weights, around, multiply, weight_grad)
                torch.testing.assert_close(actual, truth)
                actual = benchmark.step(x, grad, weights, around, multiply, None)
                torch.testing.assert_close(actual, [y, truth[-1]])
                actual = benchmark.step(x, None, weights, around, multiply, weight_grad)
                torch.testing.assert_close(actual, [y])


def test_a_step_is_predicted_with_its_gradients(monkeypatch):
    calls = []

    def report(pattern, dtype, batch, *, device, repacked, **_):
        calls.append((str(pattern), repacked))
        return SimpleNamespace(way="bmm", measured_us=None, predicted_us=3.0)

    monkeypatch.setattr(planner, "choice_report", report)
    monkeypatch.setattr(planner, "whole_choice", lambda *_, **__: None)
    monkeypatch.setattr(decide.pytorch_ops, "predicted_us", lambda *_: decide.INDUCTOR_GAIN)
    one = SimpleNamespace(multi_processor_count=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: one)
    cuda = torch.device("cuda")
    assert decide.predicted(case_of(CHAIN, "float32", 64), cuda) == Times(6.0, 2.0)
    assert {repacked for _, repacked in calls} == {False}
    calls.clear()
    assert decide.predicted(case_of(CHAIN, "float32", 64, training=True), cuda) == Times(12.0, 4.0)
    assert calls == [
        ("(1,8,4,4)", True), ("(4,4,8,1)", True), ("(4,8,4,1)", True), ("(1,4,8,4)", True)
    ]  # fmt: skip
    decision = by_times(Times(12.0, 4.0), True, case_of(CHAIN, "float32", 64, training=True))
    assert (
        decision.reason == "Measured 12.0 us with its gradients, slower than 4.0 us under Inductor."
    )
