"""The choice of an implementation on a CUDA device, with stand-ins for the device."""

import warnings

import pytest
import stand_ins
import torch
from stand_ins import OnDevice

from ksopt import precision
from ksopt.errors import CompilationError, InvalidInputError, UnavailableError
from ksopt.kernels import autotuner, host_products, tuning_cache, weight_cache, weight_scopes
from ksopt.kernels.backends import cuda
from ksopt.kernels.families.base import family_of
from ksopt.kernels.families.common import pytorch_ops
from ksopt.kernels.problem import DeviceSpec
from ksopt.measure import timers
from ksopt.patterns.chain import Chain, Pattern

PATTERN = Pattern(4, 64, 64, 16)


@pytest.fixture(autouse=True)
def device(monkeypatch, tmp_path):
    monkeypatch.setenv("KSOPT_CACHE_DIR", str(tmp_path / "cache"))
    yield stand_ins.install(monkeypatch)
    cuda.forget()


def operands(dtype=torch.float16, rows=1000, last=False, pattern=PATTERN):
    shape = (pattern.in_features, rows) if last else (rows, pattern.in_features)
    x = torch.zeros(shape, dtype=dtype).as_subclass(OnDevice)
    return x, torch.zeros(pattern.weight_shape, dtype=dtype)


def never(*_):
    raise AssertionError("it was timed or built again")


def in_a_new_process():
    """All that a process knows is gone; what is on disk is not."""
    cuda.forget()


def test_the_fastest_is_taken_and_stored(device):
    device.ms["mma16"] = [2.0, 1.0, 1.5]
    x, weight = operands()
    assert cuda.run(x, weight, False) == "mma16 1"
    choice = cuda.choice_for(x, weight, False)
    assert choice is cuda.choice_for(x, weight, False)
    taken = [us for name, us in choice.times_us if name == "mma16"]
    assert taken[:3] == [2000.0, 1000.0, 1500.0]
    assert choice.source == "measured"


def test_a_kernel_with_a_wrong_result_cannot_be_chosen(device):
    device.ms["mma16"] = [1.0, 2.0]
    device.faults["mma16 0"] = "its result is wrong (by a stand-in)"
    with pytest.warns(RuntimeWarning, match=r"is left out: its result is wrong \(by a stand-in\)"):
        assert cuda.run(*operands(), False) == "mma16 1"


def test_pytorch_is_taken_where_it_is_faster(device):
    device.ms["bmm"] = 0.5
    assert cuda.run(*operands(), False) == "bmm"


@pytest.mark.parametrize(
    ("rows", "pattern", "products"),
    [
        (129, PATTERN, 1),
        (128, PATTERN, 8),  # of 32 MiB as dense matrices
        (1, Pattern(64, 64, 64, 1), 8),
        (1, Pattern(4, 2752, 1024, 1), 2),
        (1, Pattern(64, 256, 256, 1), 1),
    ],
)
def test_a_few_rows_are_timed_by_the_series(device, rows, pattern, products):
    """By weights of their own, so that each is read from memory."""
    device.ms["bmm"] = 0.5
    x, weight = operands(rows=rows, pattern=pattern)
    choice = cuda.choice_for(x, weight, False)
    assert choice.name == "bmm"
    assert dict(choice.times_us)["bmm"] == pytest.approx(500.0)
    chain = Chain((pattern,))
    assert autotuner.products_in_series([chain], rows, weight.element_size()) == products
    calls = device.clock.calls.count("bmm")
    assert calls % products == 0
    assert calls // products >= 3 + 2  # rounds, after the warm-up


def test_what_was_not_distinguished_goes_to_the_simpler_way(device):
    device.ms["bmm"] = 1.008
    assert cuda.run(*operands(), False) == "bmm"
    cuda.forget()
    device.ms["bmm"] = 1.015
    assert cuda.run(*operands(rows=3000), False).startswith("mma16")


def test_what_is_hopeless_is_timed_no_longer(device):
    cuda.run(*operands(), False)
    # One is compared, one warms it up, its weight cached, and one fresh: far behind.
    assert device.clock.calls.count("transpose_bmm 0") == 3
    # Two to warm up and two rounds, for one alone may be a hiccup; its weight cached, and fresh.
    assert device.clock.calls.count("bmm") == 2 * (2 + 2)
    assert device.clock.calls.count("mma16 0") > 5


def test_a_first_call_that_loads_for_long_drops_nothing(device, monkeypatch):
    """A library's first call takes the host long; its device waits, and the way is fast."""
    device.clock.hiccups["mma16 0", 2] = 500.0  # it was called once to be compared
    now = iter(range(10**9))
    monkeypatch.setattr(
        timers.time, "perf_counter_ns", lambda: device.clock.now_ms * 1e6 + next(now)
    )
    assert cuda.run(*operands(), False) == "mma16 0"


def test_a_hiccup_of_one_round_drops_nothing(device):
    device.clock.hiccups["mma16 0", 4] = 100.0  # one is compared, two warm it up, one is timed
    assert cuda.run(*operands(), False) == "mma16 0"


def test_a_problem_is_a_batch_up_to_the_next_power_of_two():
    for rows in (513, 1000, 1024):
        cuda.run(*operands(rows=rows), False)
    assert len(cuda._decisions) == 1
    cuda.run(*operands(rows=1025), False)
    assert len(cuda._decisions) == 2


def test_rows_that_are_not_aligned_are_another_problem():
    x, weight = operands(rows=1000, last=True)
    odd, _ = operands(rows=1001, last=True)
    for other in (x, odd, x.T.contiguous().T):
        cuda.choice_for(other, weight, True)
    actual = {key[4] for key in cuda._decisions}
    assert actual == {"aligned", "unaligned", "scattered"}
    x, weight = operands(rows=1000)
    shifted = torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).as_subclass(OnDevice)
    cuda.choice_for(shifted, weight, False)
    assert [key[4] for key in cuda._decisions if not key[2]] == ["unaligned"]


def test_tf32_is_another_problem_and_another_kernel(monkeypatch):
    requested = []
    stand_ins.set_launchers(
        monkeypatch, lambda family, problem, *_: requested.append(problem.exact) or _noop
    )
    for exact in (True, False):
        monkeypatch.setattr(precision, "is_exact", lambda exact=exact: exact)
        requested.clear()
        cuda.run(*operands(torch.float32), False)
        assert set(requested) == {exact}
    assert {key[3] for key in cuda._decisions} == {True, False}
    cuda.run(*operands(torch.bfloat16), False)
    assert requested[-1] is True  # it means nothing for 16 bit, which must not be chosen for twice


def _noop(x, weight):
    return None


def test_the_weight_is_cached_only_where_that_pays(device):
    """Preparing costs 0.3 ms in one way and 0.02 in another."""
    device.ms |= {"bmm": 0.5, "mma16": [0.9], "bmm_paper": 0.7}
    device.preparing_ms = {"bmm": 0.3, "bmm_paper": 0.02}
    x, weight = operands(torch.float16)
    assert cuda.run(x, weight, False) == "bmm"
    with weight_scopes.repacked():
        assert cuda.run(x, weight, False) == "bmm_paper"
        assert cuda.choice_for(x, weight, False).name == "bmm_paper"
    decision = next(iter(cuda._decisions.values()))
    record = decision.cached.record
    assert record.timed[record.cached].weight == "cached"
    assert record.timed[record.repacked].weight == "repacked"
    cuda.forget()
    device.preparing_ms = {"bmm": 0.005}
    x, weight = operands(torch.float16, rows=3000)
    cuda.run(x, weight, False)
    (decision,) = cuda._decisions.values()
    # Not distinguished: for free.
    assert decision.cached.record.chosen(repacked=False).weight == "cached"
    assert decision.cached.record.chosen(repacked=True).weight == "repacked"


def test_a_first_product_in_training_times_cached_weights_as_cached(device):
    device.ms |= {"bmm": 0.5, "mma16": [0.9]}
    device.preparing_ms = {"bmm": 1.0}
    with weight_scopes.repacked():
        assert cuda.run(*operands(), False) == "mma16 0"
    assert cuda.run(*operands(), False) == "bmm"


def test_timing_leaves_no_prepared_weights_behind(monkeypatch):
    prepare = pytorch_ops.BASELINES["bmm_paper"].prepare

    def multiplier(name, problem):
        def call(x, weight):
            return weight_cache.prepared(weight, name, lambda w: prepare(w, False))

        return call

    monkeypatch.setattr(pytorch_ops, "multiplier", multiplier)
    weight_cache.refresh()
    pattern = Pattern(2, 4, 4, 2)
    x, weight = operands(pattern=pattern)
    cuda.choice_for(x, weight, False)
    assert weight_cache.cached_bytes(torch.device("cpu")) == 0
    with torch.inference_mode():  # a weight that counts no versions stands for one that does
        cuda.choice_for(*operands(pattern=Pattern(2, 4, 4, 4)), False)


def test_a_captured_graph_gets_the_choice_for_weights_that_change(device, monkeypatch):
    device.ms |= {"bmm": 0.5, "mma16": [0.9], "bmm_paper": 0.7}
    device.preparing_ms = {"bmm": 0.3}
    assert cuda.run(*operands(), False) == "bmm"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert cuda.run(*operands(), False) == "bmm_paper"


@pytest.mark.parametrize("mode", ["off", "model"])
def test_without_measuring(device, monkeypatch, mode):
    monkeypatch.setenv("KSOPT_TUNE", mode)
    expected = {"off": "bmm", "model": "mma16 0"}[mode]
    for _ in range(2):
        assert cuda.run(*operands(), False) == expected
    assert device.clock.calls == [expected] * 2
    assert device.clock.built == [expected]  # once, and nothing else was compiled
    assert cuda.choice_for(*operands(), False).source == {"off": "rule", "model": "model"}[mode]


@pytest.mark.parametrize("why", ["deterministic", "capturing", "busy"])
def test_nothing_is_timed_where_it_must_not_be(device, monkeypatch, why):
    if why == "deterministic":
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    elif why == "capturing":
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    else:
        cuda._decider.timing.acquire()
    try:
        for _ in range(2):
            assert cuda.run(*operands(), False) == "mma16 0"
    finally:
        if why == "busy":
            cuda._decider.timing.release()
    assert device.clock.calls == ["mma16 0"] * 2
    assert device.clock.built == ["mma16 0"]
    assert not cuda._decisions  # the next product may be timed


def test_deterministic_products_are_those_predicted_whatever_was_measured(device, monkeypatch):
    device.ms["mma16"] = [2.0, 1.0]
    x, weight = operands()
    monkeypatch.setattr(host_products, "_run_product", lambda *_: "what the host library knows")
    monkeypatch.setattr(torch.ops, "ksopt_host", HostLibrary(), raising=False)
    assert cuda.run(x, weight, False) == "mma16 1"
    assert cuda.run_known(x, weight, False) == "what the host library knows"
    with monkeypatch.context() as patch:
        patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        for _ in range(2):
            assert cuda.run(x, weight, False) == "mma16 0"
    assert cuda.run(x, weight, False) == "mma16 1"


class HostLibrary:
    """Stands in for the operators of csrc/host: records its calls."""

    def __init__(self):
        self.plans = []

    def know(self, x, weight, batch_last, exact, repacked, plan, form, *how):
        self.plans.append((x.shape, batch_last, exact, repacked, plan))

    def forget(self):
        self.plans.clear()


def test_the_host_library_unlearns_a_kernel_that_is_no_longer_the_choice(device, monkeypatch):
    library = HostLibrary()
    monkeypatch.setattr(host_products, "_run_product", lambda *_: None)
    monkeypatch.setattr(torch.ops, "ksopt_host", library, raising=False)
    device.ms["bmm"] = 0.3
    x, weight = operands()
    cuda.tune(x, weight, False, 0.5)
    assert library.plans == [(x.shape, False, True, repacked, -1) for repacked in (False, True)]


def test_what_the_host_library_cannot_do_goes_the_way_that_says_why(monkeypatch):
    def fails(*_):
        raise RuntimeError("ksopt: there is no memory for the result")

    monkeypatch.setattr(host_products, "_run_product", fails)
    monkeypatch.setattr(torch.ops, "ksopt_host", HostLibrary(), raising=False)
    assert cuda.run_known(*operands(), False) is None


def test_without_memory_to_time_in_the_best_predicted_is_taken(device, monkeypatch):
    def too_big(*_):
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(cuda, "checking", too_big)
    for _ in range(2):
        assert cuda.run(*operands(), False) == "mma16 0"
    assert device.clock.calls == ["mma16 0"] * 2
    assert tuning_cache.load_all(stand_ins.IDENTITY) == []


def test_the_next_process_takes_the_choice_without_timing(device):
    device.ms["mma16"] = [2.0, 1.0, 1.5]
    cuda.run(*operands(), False)
    in_a_new_process()
    device.clock.calls.clear()
    device.clock.built.clear()
    assert cuda.run(*operands(), False) == "mma16 1"
    assert device.clock.calls == ["mma16 1"]
    assert device.clock.built == ["mma16 1"]
    choice = cuda.choice_for(*operands(), False)
    assert choice.source == "recorded"
    assert len(choice.times_us) > 5


def test_what_is_recorded_serves_while_a_graph_is_captured(device, monkeypatch):
    device.ms["mma16"] = [2.0, 1.0, 1.5]
    cuda.run(*operands(), False)
    in_a_new_process()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert cuda.run(*operands(), False) == "mma16 1"


@pytest.mark.parametrize("change", ["driver", "code", "device"])
def test_another_machine_or_another_kernel_measures_again(device, monkeypatch, change):
    cuda.run(*operands(), False)
    in_a_new_process()
    device.clock.calls.clear()
    monkeypatch.setattr(cuda, "fingerprint", lambda _: {**stand_ins.IDENTITY, change: "another"})
    cuda.run(*operands(), False)
    assert "bmm" in device.clock.calls


@pytest.mark.parametrize("what", ["family", "config", "does not compile"])
def test_a_recorded_way_that_is_no_more_is_measured_again(device, monkeypatch, what):
    cuda.run(*operands(), False)
    in_a_new_process()
    device.clock.calls.clear()
    mma16 = family_of("mma16")
    if what == "family":
        monkeypatch.setattr(cuda.registry, "families", lambda: ())
    elif what == "config":
        real = mma16.configs
        values = tuning_cache.load_all(stand_ins.IDENTITY)[0].chosen(repacked=False).config
        monkeypatch.setattr(
            mma16,
            "configs",
            lambda *args: (c for c in real(*args) if vars(c) != values),
        )
    else:
        failed = []

        def once(*kernel):
            if len(failed) < 2:  # it is read again when it is sure that nobody else measures
                failed.append(kernel)
                raise CompilationError("no")
            return device.kernel(*kernel)

        stand_ins.set_launchers(monkeypatch, once)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        cuda.run(*operands(), False)
    assert "bmm" in device.clock.calls


def tuned():
    x, weight = operands()
    record = cuda.tune(x, weight, False, 0.5)
    return record.timed[record.cached].way


def test_tune_does_not_time_what_is_wrong(device):
    device.faults = {f"mma16 {rank}": "it is wrong" for rank in range(8)}
    device.faults["bmm"] = "PyTorch is what the others are measured by"
    with pytest.warns(RuntimeWarning, match=r"mma16\(.* is left out: it is wrong"):
        assert tuned() == "bmm"
    assert device.clock.calls.count("mma16 0") == 1


def test_tune_measures_again_and_keeps_what_is_not_beaten(device):
    device.ms |= {"bmm": 0.5, "mma16": [0.504]}
    assert cuda.run(*operands(), False) == "bmm"
    device.ms |= {"bmm": 0.504, "mma16": [0.5]}
    assert tuned() == "bmm"
    device.ms |= {"bmm": 0.51, "mma16": [0.3]}
    assert tuned() == "mma16"
    assert cuda.run(*operands(), False) == "mma16 0"
    device.ms |= {"bmm": 0.298, "mma16": [0.3]}
    assert tuned() == "mma16"
    in_a_new_process()
    assert cuda.run(*operands(), False) == "mma16 0"


def test_an_empty_batch_is_not_timed(device):
    cuda.run(*operands(rows=0), False)
    assert device.clock.calls == ["bmm"]
    assert not cuda._decisions  # one row is timed


def test_a_setting_that_is_not_known_is_refused(monkeypatch):
    monkeypatch.setenv("KSOPT_TUNE", "on")
    with pytest.raises(InvalidInputError, match="'off', 'model' or 'measure'"):
        cuda.run(*operands(), False)


def test_without_a_driver_pytorch_does_it_and_says_so_once(device, monkeypatch):
    def missing(*_):
        raise UnavailableError("The package cuda-bindings is not installed.")

    monkeypatch.setattr(DeviceSpec, "of_device", missing)
    monkeypatch.setattr(cuda, "fingerprint", missing)
    stand_ins.set_launchers(monkeypatch, missing)
    with pytest.warns(RuntimeWarning, match="cuda-bindings") as caught:
        actual = cuda.run(*operands(), False)
    assert actual == "bmm"
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cuda.run(*operands(rows=5), False) == "bmm"


def test_a_tile_that_does_not_compile_is_left_out_with_a_warning(device, monkeypatch):
    def fails(family, *kernel):
        if family.name == "mma16":
            raise CompilationError("line 7")
        return device.kernel(family, *kernel)

    stand_ins.set_launchers(monkeypatch, fails)
    with pytest.warns(RuntimeWarning, match=r"mma16\(.* does not compile: line 7"):
        assert cuda.run(*operands(), False) == "bmm"


def test_a_way_that_runs_out_of_memory_is_left_out(device, monkeypatch):
    def too_big(x, weight):
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(
        pytorch_ops,
        "multiplier",
        lambda name, _: too_big if name == "bmm_paper" else device.plain(name),
    )
    x, weight = operands()
    assert cuda.run(x, weight, False) == "mma16 0"
    assert "bmm_paper" not in dict(cuda.choice_for(x, weight, False).times_us)


def test_a_way_that_cannot_run_is_left_out_with_a_warning(device, monkeypatch):
    def refuses(x, weight):
        raise RuntimeError("too many resources requested for launch")

    stand_ins.set_launchers(monkeypatch, lambda *_: refuses)
    with pytest.warns(RuntimeWarning, match="cannot run on this device and is left out"):
        assert cuda.run(*operands(), False) == "bmm"


def test_nothing_that_runs_is_an_error(device, monkeypatch):
    def refuses(x, weight):
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(cuda.registry, "built", lambda actual, *_: [(actual[0], refuses)])
    with pytest.raises(UnavailableError, match="no way to multiply by"):
        cuda.run(*operands(), False)
