"""The explanation of a choice in words: measured, recorded, predicted, or by rule."""

import pytest
import stand_ins
import torch
from stand_ins import A100, OnDevice

from ksopt import precision
from ksopt.kernels import tuning_cache
from ksopt.kernels.backends import cpu, cuda
from ksopt.kernels.explain import choice_report, from_record
from ksopt.kernels.families.base import family_of
from ksopt.kernels.problem import DeviceSpec, ProblemKey
from ksopt.patterns.chain import Pattern

mma_tf32x3 = family_of("mma_tf32x3")

PATTERN = Pattern(4, 64, 64, 16)


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    yield stand_ins.install(monkeypatch)
    cuda.forget()


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KSOPT_CACHE_DIR", str(tmp_path / "cache"))
    cpu.forget()
    yield
    cpu.forget()


def product(rows=1000, last=False):
    shape = (PATTERN.in_features, rows) if last else (rows, PATTERN.in_features)
    x = torch.zeros(shape, dtype=torch.float16).as_subclass(OnDevice)
    return cuda.run(x, torch.zeros(PATTERN.weight_shape, dtype=torch.float16), last)


def report(**options):
    return choice_report(PATTERN, "float16", 1000, **options)


def test_before_anything_was_measured_it_predicts_and_runs_nothing(device):
    choice = report()
    assert (choice.source, choice.way, choice.measured_us) == ("model", "mma16", None)
    assert choice.predicted_us is not None
    assert "nothing was measured yet" in choice.reason
    assert device.clock.built == []


def test_what_was_measured_is_reported(device):
    product()
    for source in ("measured", "recorded"):
        choice = report()
        assert (choice.source, choice.way, choice.measured_us) == (source, "mma16", 1000.0)
        assert choice.best_pytorch_us == 3000.0
        assert "3.00 times as fast as the best of PyTorch, bmm (3000.0 us)" in choice.reason
        assert next(iter(choice.rivals)) == "mma16"
        assert choice.rivals["bmm_paper"] == 8000.0
        assert choice.to_json()["key"]["batch_up_to"] == 1024
        cuda.forget()
    device.clock.calls.clear()
    assert report(batch_last=True).source == "model"
    assert device.clock.calls == []


def test_where_pytorch_is_faster_it_says_what_the_kernels_take(device):
    device.ms["bmm"] = 0.5
    product()
    choice = report()
    assert choice.is_pytorch
    assert "the best of ksopt's kernels, mma16, takes 1000.0 us" in choice.reason


def test_a_tie_is_called_one(device):
    device.ms["bmm"] = 1.009
    product()
    assert "not told apart from mma16 (1000.0 us)" in report().reason


def test_weights_that_change_have_their_own_report(device):
    device.ms |= {"bmm": 0.5, "mma16": [0.9]}
    device.preparing_ms = {"bmm": 1.0}
    product()
    stored, repacked = report(), report(repacked=True)
    assert (stored.way, repacked.way) == ("bmm", "mma16")
    assert "its weight is prepared once a version" in stored.reason
    assert "1.67 times as fast as the best of PyTorch, bmm (1500.0 us)" in repacked.reason


def test_the_model_decides_alone_if_it_is_set_to(device, monkeypatch):
    product()
    cuda.forget()
    monkeypatch.setenv("KSOPT_TUNE", "model")
    choice = report()
    assert (choice.source, choice.measured_us) == ("model", None)
    assert "measured" not in choice.reason
    assert product() == "mma16 0"  # and the product takes what the report says
    assert cuda.choice_for(*_operands(), False).candidate.config == choice.config


def test_deterministic_products_are_reported_as_they_are_taken(device, monkeypatch):
    device.ms["mma16"] = [2.0, 1.0]
    assert product() == "mma16 1"
    pattern = Pattern(2, 8, 8, 2)
    cpu.tune(torch.randn(40, 32), torch.randn(pattern.weight_shape), False, 0.02)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    for _ in range(2):
        choice = report()
        assert (choice.source, choice.measured_us) == ("model", None)
        assert product() == "mma16 0"
    on_cpu = choice_report(pattern, "float32", 40, device="cpu")
    assert (on_cpu.source, on_cpu.way) == ("rule", cpu.rule(pattern))
    assert "torch.use_deterministic_algorithms" in on_cpu.reason


def _operands():
    x = torch.zeros(1000, PATTERN.in_features, dtype=torch.float16).as_subclass(OnDevice)
    return x, torch.zeros(PATTERN.weight_shape, dtype=torch.float16)


def test_off_is_pytorch(device, monkeypatch):
    monkeypatch.setenv("KSOPT_TUNE", "off")
    choice = report()
    assert (choice.source, choice.way) == ("rule", "bmm")
    assert "KSOPT_TUNE=off" in choice.reason


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("last", [False, True], ids=["batch_first", "batch_last"])
@pytest.mark.parametrize("exact", [True, False])
def test_machines_that_are_not_here_can_be_explained(dtype, last, exact):
    """Nothing of CUDA is called: this is a machine without it."""
    for capability in ((7, 5), (8, 0), (9, 0), (12, 0)):
        machine = DeviceSpec(capability, 100, 100 * 1024)
        choice = choice_report(PATTERN, dtype, 4096, batch_last=last, exact=exact, spec=machine)
        assert choice.source == "model"
        assert choice.predicted_us is not None
        if capability == (7, 5) or dtype == "float64":
            assert choice.is_pytorch


def test_predictions_grow_with_the_batch():
    times = [
        choice_report(PATTERN, "float16", batch, spec=A100).predicted_us
        for batch in (16, 1000, 25_088, 200_000)
    ]
    assert times == sorted(times)


def test_the_precision_is_torchs_unless_it_is_passed(monkeypatch):
    monkeypatch.setattr(precision, "is_exact", lambda: False)
    for exact, expected in ((None, False), (True, True)):
        choice = choice_report(PATTERN, "float32", 1000, exact=exact, spec=A100)
        assert choice.key.problem.exact is expected


@pytest.mark.parametrize("mode", ["measure", "model", "off"])
def test_on_a_cpu_it_is_the_rule_until_it_was_tuned(mode, monkeypatch):
    monkeypatch.setenv("KSOPT_TUNE", mode)
    pattern = Pattern(2, 8, 8, 2)
    choice = choice_report(pattern, "float32", 40, device="cpu")
    assert (choice.source, choice.way) == ("rule", cpu.rule(pattern))
    record = cpu.tune(torch.randn(40, 32), torch.randn(pattern.weight_shape), False, 0.02)
    choice = choice_report(pattern, "float32", 40, device="cpu")
    if mode == "measure":
        assert (choice.source, choice.way) == ("recorded", record.chosen(repacked=True).way)
        assert set(choice.rivals) >= {"bmm", "expand"}
    else:
        assert f"KSOPT_TUNE={mode}" in choice.reason


def test_a_tuned_cpu_does_not_time_again(monkeypatch):
    pattern, x = Pattern(2, 8, 8, 2), torch.randn(40, 32)
    weight = torch.randn(pattern.weight_shape)
    way = cpu.tune(x, weight, False, 0.02).chosen(repacked=True).way

    def never(*_):
        raise AssertionError("it was timed again")

    cpu.forget()
    monkeypatch.setattr(cpu, "_fastest", never)
    cpu.run(x, weight, False)
    assert list(cpu.chosen().values()) == [way]
    # A way that is gone is not taken: the record is set aside, and the product is timed.
    cpu.forget()
    key = ProblemKey.of(pattern, "float32", 40, False, exact=True)
    record = tuning_cache.load(cpu.fingerprint(), key)
    assert record is not None
    gone = tuning_cache.Timed("gone", None, "any", None, 1.0, 1.0, 1.0)
    tuning_cache.save(cpu.fingerprint(), tuning_cache.Record(key, 40, (gone,), 0, 0))
    with pytest.raises(AssertionError, match="timed again"):
        cpu.run(x, weight, False)


@pytest.mark.parametrize(("host_us", "words"), [(4.0, "where this takes 4.0"), (None, "not told")])
def test_the_hosts_time_is_named_where_it_decided_and_is_known(host_us, words):
    """A way that was given up before it was timed has none."""
    timed = (
        tuning_cache.Timed("bmm", None, "any", None, 10.0, 10.0, 10.0, host_us=12.0),
        tuning_cache.Timed("naive", None, "any", None, 10.2, 10.0, 10.3, host_us=host_us),
    )
    key = ProblemKey.of(PATTERN, "float16", 40, False)
    record = tuning_cache.Record(key, 40, timed, cached=1, repacked=1)
    assert words in from_record(record, "recorded").reason
