"""A device is one module: a backend that registers from outside computes, chooses and records."""

import json

import pytest
import torch

from ksopt import KSLinear
from ksopt.bench.run import devices_of
from ksopt.cli import main
from ksopt.errors import InvalidInputError, UnavailableError
from ksopt.kernels.backends.base import (
    BACKENDS,
    backend_of,
    register_backend,
    unregister_backend,
)
from ksopt.kernels.explain import choice_report
from ksopt.measure import device as devices
from ksopt.measure.device_types import DeviceFacts, type_of
from ksopt.measure.timed_call import TimedCall
from ksopt.measure.timers import Timer
from ksopt.measure.timing import measure
from ksopt.patterns.chain import Pattern
from ksopt.reference import chain_to_dense
from ksopt.system.device_names import refuse_absent
from tests.kernels.toy_backend import ToyBackend

PATTERN = Pattern(2, 8, 8, 2)
XPU = torch.device("xpu:0")


class OnCpu(ToyBackend):
    """In the place of the CPU's own."""

    device_type = "cpu"


class OnXpu(ToyBackend):
    """For a type that torch knows and ksopt does not: what measuring needs, without its tensors."""

    device_type = "xpu"

    def __init__(self):
        super().__init__()
        self.waits = 0

    def available(self):
        return ["xpu:0", "xpu:1"]

    def facts(self, device):
        return DeviceFacts("Toy 1", 12.5, "7.1")

    def synchronize(self, device):
        self.waits += 1


def race_timer(device: torch.device) -> Timer:
    return type_of(device).race_timer(device)


@pytest.fixture
def toy(monkeypatch, tmp_path):
    monkeypatch.setenv("KSOPT_CACHE_DIR", str(tmp_path / "cache"))
    register_backend(OnCpu)
    yield backend_of("cpu")
    unregister_backend("cpu")


@pytest.fixture
def xpu():
    register_backend(OnXpu)
    yield backend_of("xpu")
    unregister_backend("xpu")


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


def test_a_type_is_timed_named_and_recorded_by_its_backend(xpu):
    assert devices.resolve("xpu") == XPU
    assert devices.available()[-2:] == ["xpu:0", "xpu:1"]
    refuse_absent("xpu:1")
    record = devices.record("xpu:0")
    assert (record.type, record.name, record.driver) == ("xpu", "Toy 1", "7.1")
    assert record.memory_gib == 12.5
    assert devices_of("xpu:0", 2) == ["xpu:0", "xpu:1"]
    with pytest.raises(InvalidInputError, match="from xpu:1 on there is 1 device"):
        devices_of("xpu:1", 2)

    times = measure({"nothing": lambda: None}, XPU, max_seconds=0.01, cold=False)
    assert times["nothing"].median_us > 0
    assert race_timer(XPU) is race_timer(XPU)
    before = xpu.waits
    assert race_timer(XPU).called(lambda: None)[0] > 0
    TimedCall(lambda: None, XPU)()
    assert xpu.waits == before + 4  # before and after each call


def test_a_backend_may_have_a_timer_of_its_own(xpu, monkeypatch):
    own = race_timer(torch.device("cpu"))
    monkeypatch.setattr(OnXpu, "timer", lambda self, device, cold: own)
    assert race_timer(torch.device("xpu:1")) is own


def test_unregistering_puts_back_what_was_there_before(toy):
    register_backend(OnCpu)
    assert backend_of("cpu") is not toy
    unregister_backend("cpu")
    assert backend_of("cpu") is toy


def test_a_device_without_a_backend_is_refused():
    register_backend(OnXpu)
    unregister_backend("xpu")
    assert "xpu" not in BACKENDS
    for refused in (
        lambda: backend_of("xpu"),
        lambda: unregister_backend("xpu"),
    ):
        with pytest.raises(InvalidInputError, match="no backend for xpu devices, only for cpu, c"):
            refused()
    for refused in (lambda: devices.resolve("xpu"), lambda: refuse_absent("xpu")):
        with pytest.raises(InvalidInputError, match="device 'xpu' is not available"):
            refused()
    for refused in (lambda: race_timer(XPU), lambda: measure({"nothing": id}, XPU)):
        with pytest.raises(InvalidInputError, match="or of a type that has a backend"):
            refused()


def test_a_type_that_torch_does_not_know_is_refused():
    class Unknown(ToyBackend):
        device_type = "toy"

    with pytest.raises(UnavailableError, match="torch knows no devices of type 'toy'"):
        register_backend(Unknown)
