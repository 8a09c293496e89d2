"""A device is one module: a backend that registers from outside computes, chooses and records."""

import json

import pytest
import torch

from ksopt import KSLinear
from ksopt.cli import main
from ksopt.errors import InvalidInputError
from ksopt.kernels.backends.base import (
    BACKENDS,
    DeviceBackend,
    Unmeasured,
    backend_of,
    register_backend,
)
from ksopt.kernels.explain import choice_report
from ksopt.kernels.problem import Problem
from ksopt.kernels.tuning_cache import Record, Timed, load, save
from ksopt.patterns.chain import Pattern
from ksopt.reference import chain_to_dense, ks_reference

PATTERN = Pattern(2, 8, 8, 2)


class ToyBackend(DeviceBackend):
    """Multiplies on the CPU by the reference alone, and counts its products."""

    device_type = "cpu"

    def __init__(self):
        self.products = 0

    def run(self, x, weight, batch_last, out=None):
        self.products += 1
        y = ks_reference(x, weight, "batch_last" if batch_last else "batch_first")
        return y.contiguous() if out is None else out.copy_(y)

    def tune(self, x, weight, batch_last, budget_s):
        problem = Problem.of_factor(Pattern(*weight.shape), "float32", batch_last)
        key = self.key(problem, x.shape[0])
        timed = Timed("reference", None, "any", None, 7.0, 6.0, 8.0)
        record = Record(key, x.shape[0], (timed,), 0, 0)
        save(self.fingerprint(x.device), record)
        return record

    def fingerprint(self, device):
        return {"device": "toy"}

    def measured(self, key, device, mode, changing):
        record = load(self.fingerprint(device), key)
        return None if record is None else (record, "recorded")

    def unmeasured(self, key, batch, spec, mode):
        return Unmeasured("reference", None, None, "rule", "it has one way")

    def forget(self):
        self.products = 0


@pytest.fixture
def toy(monkeypatch, tmp_path):
    monkeypatch.setenv("KSOPT_CACHE_DIR", str(tmp_path / "cache"))
    before = BACKENDS["cpu"]
    register_backend(ToyBackend)
    yield backend_of("cpu")
    BACKENDS["cpu"] = before


def test_a_layer_is_computed_by_it(toy):
    layer = KSLinear(64, 64, "(1,8,8,8)*(8,8,8,1)")
    x = torch.randn(5, 64, requires_grad=True)
    torch.testing.assert_close(layer(x), x @ chain_to_dense(list(layer.weights)).T + layer.bias)
    assert toy.products == 2
    layer(x).sum().backward()
    assert toy.products == 6  # two forward, and one gradient of each factor's input


def test_a_compiled_model_is_computed_by_it(toy):
    layer = KSLinear(64, 64, "(1,8,8,8)*(8,8,8,1)").requires_grad_(False)
    x = torch.randn(5, 64)
    with torch.no_grad():
        compiled = torch.compile(layer, backend="ksopt")
        torch.testing.assert_close(compiled(x), layer(x))
    assert toy.products >= 4


def test_a_choice_is_explained_and_recorded_by_it(toy, capsys):
    report = choice_report(PATTERN, "float32", 16, device="cpu")
    assert (report.way, report.source, report.reason) == ("reference", "rule", "it has one way")
    words = ["tune", "--pattern", str(PATTERN), "--batch", "16", "--device", "cpu", "--json"]
    assert main.main(words) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["machine"] == {"device": "toy"}
    (choice,) = document["choices"]
    assert (choice["way"], choice["measured_us"]) == ("reference", 7.0)
    assert choice_report(PATTERN, "float32", 16, device="cpu").source == "recorded"


def test_a_device_without_a_backend_is_refused():
    with pytest.raises(InvalidInputError, match="no backend for xpu devices, only for cpu, cuda"):
        backend_of("xpu")
