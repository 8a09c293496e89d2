"""Measurements of `ksopt bench paper` beside products: modules, and energy on a stand-in device."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ksopt.bench import benchmark
from ksopt.bench.benchmark import Bench
from ksopt.bench.prepared_implementations import PreparedImplementations
from ksopt.bench.reproduction import (
    energy,
    energy_tables,
    models,
    module_cases,
)
from ksopt.bench.reproduction.energy import Energies, EnergyBench
from ksopt.bench.reproduction.models import Case, Subject
from ksopt.bench.reproduction.options import PaperOptions
from ksopt.bench.reproduction.products import FIRST, LAST
from ksopt.bench.reproduction.request import PaperRequest
from ksopt.bench.request import BenchRequest
from ksopt.measure import device as devices
from ksopt.measure.energy import PerCall
from ksopt.measure.roofline import Roofline
from ksopt.measure.timing import Measurement


@pytest.fixture(autouse=True)
def quick(brief: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A synthetic roofline and the fewest repeats: the tests are not about the numbers."""
    invented = Roofline("cpu", "float32", 1e10, 1e11, 0, 0, "made up")
    monkeypatch.setattr(benchmark, "measure_roofline", lambda device, dtype: invented)
    monkeypatch.setattr(benchmark, "_SECONDS", 0.001)
    monkeypatch.setattr(benchmark, "_FEWEST", 3)
    monkeypatch.setattr(models, "_SECONDS", 0.001)


# The modules.


@pytest.mark.parametrize("name", module_cases.names("modules"))
def test_the_versions_of_a_module_compute_the_same(name: str) -> None:
    built = module_cases.build(name, torch.float64, torch.device("cpu"), small=True)
    with torch.no_grad():
        assert models._faults(built, 1e-12) == {}
    dense = built.versions[module_cases.DENSE](built.inputs[module_cases.DENSE])
    assert dense.shape == built.versions[module_cases.BMM](built.inputs[module_cases.BMM]).shape
    weights = {
        key: sum(one.numel() for one in module.parameters())
        for key, module in built.versions.items()
    }
    assert weights[module_cases.KERNEL] == weights[module_cases.BMM] < weights[module_cases.DENSE]


def test_the_papers_chains_stand_in_a_vit_s_16() -> None:
    built = module_cases.build("Block", torch.float32, torch.device("meta"), small=False)
    kernel = built.versions[module_cases.KERNEL]
    chains = [str(one.chain) for one in kernel.modules() if hasattr(one, "chain")]
    assert chains.count("(1,192,48,2)*(2,48,192,1)") == 3
    assert chains.count("(1,768,192,2)*(6,64,64,1)") == 1
    assert len(chains) == 5


def test_a_wrong_kernel_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    real = module_cases.by_ks_linear

    def wrong(layer: torch.nn.Module) -> torch.nn.Module:
        layer_ks = real(layer)
        layer_ks.weights[0].data[0] *= 1.01
        return layer_ks

    monkeypatch.setattr(module_cases, "by_ks_linear", wrong)
    request = PaperRequest.of(PaperOptions(table=(7,), device="cpu"))
    case = models.measure_case(request, Subject("Linear N x N", "float32"), "cpu")
    assert set(case.times) == {module_cases.DENSE, module_cases.BMM}
    assert "relative error" in case.faults[0]


def test_a_case_is_read_as_it_was_stored() -> None:
    case = Case(Subject("Block", "float16"), {"bmm": Measurement(1.0, 0.9, 1.1, 7)}, ("a fault",))
    assert Case.of_json(json.loads(json.dumps(case.to_json()))) == case


# Energy, on a device that a test plays.


class Played:
    """A board that draws 50 W, and 250 W more while it computes: its clock moves with calls."""

    def __init__(self) -> None:
        self.now = 0.0
        self.used = 0.0

    def millijoules(self) -> float:
        self.pass_(1e-4, 50.0)  # a look takes its time
        return self.used

    def pass_(self, seconds: float, watts: float) -> None:
        self.now += seconds
        self.used += 1e3 * watts * seconds

    def synchronize(self) -> None:
        """Nothing is queued."""


def test_idle_power_is_measured_and_subtracted(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Played()
    words = {"patterns": ("(1,8,8,2)",), "device": "cpu", "dtype": "float32", "batch": "8",
             "against": "bmm_paper", "layout": "both"}  # fmt: skip
    from ksopt.bench.options import BenchOptions
    from ksopt.measure import energy as meters

    request = BenchRequest.of(BenchOptions(**words))  # type: ignore[arg-type]
    real = meters.per_call, meters.idle_watts
    monkeypatch.setattr(
        meters, "idle_watts",
        lambda meter: real[1](meter, clock=lambda: board.now,
                              sleep=lambda s: board.pass_(s, 50.0)),
    )  # fmt: skip

    def per_call(calls: Any, meter: Any, seconds: float) -> dict[str, PerCall]:
        assert {name.split()[0] for name in calls} == {"kernel", "bmm"}
        for call in calls.values():
            call()
        played = {name: lambda: board.pass_(0.01, 300.0) for name in calls}
        return real[0](played, meter, 0.2, clock=lambda: board.now)

    monkeypatch.setattr(meters, "per_call", per_call)
    energies = EnergyBench(request, board).measure(request.subjects[0])  # type: ignore[arg-type]
    assert energies.idle_w == pytest.approx(50.0, rel=0.01)
    assert set(energies.calls) == {(way, at) for way in ("kernel", "bmm") for at in (FIRST, LAST)}
    used = energies.product()
    key = ("kernel", FIRST)
    assert used.energy_mj[key] == pytest.approx(3000.0, rel=0.02)
    assert used.over_idle_mj[key] == pytest.approx(2500.0, rel=0.03)
    assert Energies.of_json(json.loads(json.dumps(energies.to_json()))) == energies


def test_energies_are_stored_and_drawn(tmp_path: Path) -> None:
    from ksopt.bench.options import BenchOptions

    request = BenchRequest.of(
        BenchOptions(patterns=("(1,8,8,2)",), device="cpu", dtype="float32", batch="8")
    )
    one = Energies(
        request.subjects[0], 50.0,
        {("kernel", FIRST): PerCall(2.0, 1e-3), ("bmm", FIRST): PerCall(4.0, 1e-3)},
    )  # fmt: skip
    with energy.opened(tmp_path, request, devices.record("cpu")) as results:
        results.add(one)
    with energy.opened(tmp_path, request, devices.record("cpu")) as results:
        assert results.measured == {request.subjects[0]: one}
    product = one.product()
    assert product.energy_ratio(over_idle=False) == 0.5
    assert product.energy_ratio(over_idle=True) is None  # less than the idle power remains
    rows = energy_tables.by_way({"float32": [product]}).rows
    # 50 W in a millisecond are 50 mJ; of 8 rows.
    assert rows[0] == ("float32", "kernel", "1", "2", "250", "-48", "-6e+03")
    (line, _) = csv.DictReader(energy_tables.to_csv([product]).splitlines())
    assert (line["way"], float(line["uj_a_token"])) == ("kernel", 250.0)


def test_a_bench_can_be_prepared_without_being_timed() -> None:
    from ksopt.bench.options import BenchOptions

    request = BenchRequest.of(
        BenchOptions(patterns=("(1,8,8,2)",), device="cpu", dtype="float32", batch="8",
                     against="bmm_paper,bsr")
    )  # fmt: skip
    ready = PreparedImplementations()
    with Bench(request).prepared(request.subjects[0], ready):
        assert ("ksopt", FIRST) in ready.calls
        assert ("bmm_paper", LAST) in ready.calls
    assert ready.calls == {}  # their tensors are freed
