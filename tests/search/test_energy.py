"""Energy as an objective, with a counter that the products themselves move: no GPU is needed."""

import csv
import io
import json
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
import torch.nn.functional as F

from ksopt import ops
from ksopt.cli.main import main
from ksopt.errors import InvalidInputError, KsoptError
from ksopt.measure import energy
from ksopt.patterns.chain import Chain
from ksopt.search import (
    LayerRequest,
    SearchRequest,
    SearchResult,
    finals,
    layer_pass,
    print_result,
    replay,
    run_search,
    worker,
    worker_pool,
)
from ksopt.search.metrics import ENERGY
from ksopt.search.objectives import Objective
from ksopt.search.options import STUDY
from ksopt.search.pruning import Pruning
from ksopt.search.report import page
from ksopt.search.report.layer_sections import best_in_final
from ksopt.search.report.phrases import millijoules
from ksopt.search.report.plots import metric_plot
from ksopt.search.space.space import build

from test_results import check  # isort: skip

Search = Callable[..., SearchResult]
DENSE_MJ = 7.0


@dataclass
class Counter:
    """A meter that a test moves on, and that is seen to advance in steps."""

    used: float = 0.0
    step: float = 1e-9

    def millijoules(self) -> float:
        return self.used // self.step * self.step

    def synchronize(self) -> None:
        """Nothing is queued."""


def of_call(chain: Chain) -> float:
    """What a call of a chain uses here: the fewer weights, the more."""
    return 1000.0 / chain.nnz


@dataclass
class Played:
    """A device whose energy the products of chains and of the dense layer make.

    Args:
        counter: The device's.
        opened: The devices that a meter was opened for.
    """

    counter: Counter = field(default_factory=Counter)
    opened: list[torch.device] = field(default_factory=list)

    def meter(self, device: torch.device) -> Counter:
        self.opened.append(device)
        return self.counter


@pytest.fixture
def played(quick: None, monkeypatch: pytest.MonkeyPatch) -> Played:
    """Every meter is one of a played device, and measurements are short."""
    actual = Played()

    def chain(
        x: torch.Tensor, weights: Sequence[torch.Tensor], *around: Any, **options: Any
    ) -> torch.Tensor:
        actual.counter.used += 1000.0 / sum(weight.numel() for weight in weights)
        return ops.chain(x, weights, *around, **options)

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        actual.counter.used += DENSE_MJ
        return F.linear(x, weight, bias)

    def after_the_final(
        request: LayerRequest, device: torch.device, chains: Sequence[Chain]
    ) -> dict[str, float]:
        meter: Any = actual.counter
        return Objective(request, device, meter=meter).energy(chains)

    monkeypatch.setattr(layer_pass, "ops", types.SimpleNamespace(chain=chain))
    monkeypatch.setattr(layer_pass, "F", types.SimpleNamespace(linear=linear))
    monkeypatch.setattr(energy, "Meter", actual.meter)
    monkeypatch.setattr(worker, "Meter", actual.meter)
    monkeypatch.setattr(energy, "TRIAL_SECONDS", 0.005)
    monkeypatch.setattr(energy, "FINAL_SECONDS", 0.005)
    monkeypatch.setattr(energy, "_BURST_S", 0.001)
    monkeypatch.setattr(finals, "energy", after_the_final)
    return actual


def read(result: SearchResult) -> dict[str, Any]:
    actual: dict[str, Any] = json.loads((result.folder / "results.json").read_text())
    return actual


def study_of(result: SearchResult) -> optuna.Study:
    return optuna.load_study(study_name=STUDY, storage=f"sqlite:///{result.folder / 'study.db'}")


# The counter.


@dataclass
class Clock:
    """A time that calls move on, with a counter that follows it."""

    meter: Counter
    now: float = 0.0

    def time(self) -> float:
        return self.now

    def call(self, seconds: float, watts: float) -> Callable[[], None]:
        def call() -> None:
            self.now += seconds
            self.meter.used += 1e3 * watts * seconds

        return call


def test_energy_is_shared_out_over_the_calls() -> None:
    clock = Clock(Counter())
    actual = energy.millijoules(
        {"small": clock.call(0.01, 200.0), "large": clock.call(0.3, 400.0)},
        clock.meter,  # type: ignore[arg-type]
        clock=clock.time,
    )
    assert actual == {"small": pytest.approx(2e3), "large": pytest.approx(120e3)}
    assert 2.0 <= clock.now < 4.0


@pytest.mark.parametrize("step_s", [0.02, 0.045, 0.1])
def test_the_steps_of_the_counter_are_no_error(step_s: float) -> None:
    """A step of 0.1 s is a fifth of the time, and so might two looks at any time err."""
    watts = 300.0
    for begun_s in (0.0, 0.3 * step_s, 0.8 * step_s):
        counter = Counter(used=1e3 * watts * begun_s, step=1e3 * watts * step_s)
        clock = Clock(counter)
        actual = energy.millijoules(
            {"chain": clock.call(50e-6, watts)},
            counter,  # type: ignore[arg-type]
            seconds=energy.TRIAL_SECONDS,
            clock=clock.time,
        )
        assert actual["chain"] == pytest.approx(1e3 * watts * 50e-6, rel=0.01)
        # What the documentation says a trial pays.
        assert clock.now < energy.TRIAL_SECONDS + 0.1 + 2 * step_s


def test_a_counter_that_stands_still_is_an_error() -> None:
    clock = Clock(Counter(step=1e12))
    with pytest.raises(
        energy.EnergyError, match=r"the energy counter stood still at 0 mJ for 1\.0 s"
    ):
        energy.millijoules(
            {"chain": clock.call(0.001, 100.0)},
            clock.meter,  # type: ignore[arg-type]
            clock=clock.time,
        )


def test_a_counter_that_cannot_be_read_says_why() -> None:
    class NVMLError(Exception):
        pass

    def lost(handle: object) -> int:
        raise NVMLError("GPU is lost")

    meter = object.__new__(energy.Meter)
    meter._nvml = types.SimpleNamespace(
        NVMLError=NVMLError, nvmlDeviceGetTotalEnergyConsumption=lost
    )
    meter._handle = None
    with pytest.raises(energy.EnergyError, match="cannot be read: NVML says GPU is lost"):
        meter.millijoules()


def test_energy_of_a_cpu_is_refused(search: Search, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidInputError, match="energy is read from the counter of an NVIDIA GPU"):
        search(energy=True)
    words = ["search", "--dims", "32x64", "--device", "cpu", "--energy"]
    assert main(words) == 2
    assert "leave --energy out" in capsys.readouterr().err


# A search.


def by_the_final(layer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The trials of results.json; a finalist's latency over dense is that of the final."""
    final = {one["trial"]: one["latency_over_dense"] for one in layer["finalists"]}
    return [
        {**one, "latency_over_dense": final.get(one["number"], one["latency_over_dense"])}
        for one in layer["trials"]
    ]


def beaten(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether a trial of results.json is beaten by another, by the definition."""
    pairs = [(one[key], other[key]) for key in ("latency_over_dense", "parameters", "energy_mj")]
    return all(b <= a for a, b in pairs) and any(b < a for a, b in pairs)


def test_energy_is_an_objective(search: Search, played: Played) -> None:
    result = search(energy=True, trials=5)
    assert len(played.opened) == 1  # one meter a process, however many trials
    study = study_of(result)
    assert study.metric_names == ["latency_us", "parameters", "energy_mj"]
    assert study.directions == [optuna.study.StudyDirection.MINIMIZE] * 3
    for trial, known in zip(study.trials, result.layers[0].trials, strict=True):
        assert known.values["energy_mj"] == pytest.approx(of_call(known.facts.chain))
        assert (
            trial.user_attrs["outcome"]["energy_mj"] == trial.values[2] == known.values["energy_mj"]
        )

    (value,) = check(result)["layers"]
    assert [trial["energy_mj"] for trial in value["trials"]] == [
        t.values["energy_mj"] for t in result.layers[0].trials
    ]
    rows = list(csv.DictReader(io.StringIO((result.folder / "trials.csv").read_text())))
    assert [float(row["energy_mj"]) for row in rows] == [
        t.values["energy_mj"] for t in result.layers[0].trials
    ]

    # The front is what its definition says, and with the most weights the least energy is on it.
    assert value["front"]["metrics"] == ["latency_us", "parameters", "energy_mj"]
    trials = by_the_final(value)
    alone = [one for one in trials if not any(beaten(one, other) for other in trials)]
    assert set(value["front"]["trials"]) == {one["number"] for one in alone}
    least = min(result.layers[0].trials, key=lambda trial: trial.values["energy_mj"] or 0.0)
    assert least.number in value["front"]["trials"]
    assert least.number in [finalist.trial for finalist in result.layers[0].finalists]
    for finalist in result.layers[0].finalists:
        assert finalist.values["energy_mj"] == pytest.approx(of_call(finalist.facts.chain))
        assert finalist.dense_values.get("energy_mj") == pytest.approx(DENSE_MJ)


def test_energy_is_reported(search: Search, played: Played) -> None:
    result = search(energy=True, trials=5)
    chosen = result.layers[0].recommendations[0].chosen
    assert chosen is not None
    assert chosen.values["energy_mj"] is not None
    used = millijoules(chosen.values["energy_mj"])
    assert f"A call of it uses {used}, one of the dense layer 7.00 mJ." in (
        result.layers[0].recommendations[0].sentence
    )
    text = io.StringIO()
    print_result(result, text)
    table = text.getvalue().split("Fastest chain of each budget")[1]
    assert "energy" in table
    assert used in table
    markdown = page.markdown(result)
    sections = {part.partition("\n")[0]: part for part in markdown.split("\n## ")[1:]}
    front = sections["Pareto front"]
    assert "equals or beats in latency, weights and energy together" in front
    shown = [
        trial
        for trial in result.layers[0].trials
        if str(trial.facts.chain) in front.replace("\\", "")
    ]
    assert [t.number for t in shown] == sorted(read(result)["layers"][0]["front"]["trials"])
    for trial in shown:
        assert millijoules(trial.values["energy_mj"] or 0.0) in front
    assert "In a trial it is taken over" in sections["How it was measured"]
    assert "the dense layer uses 7.00 mJ a call" in sections["How it was measured"]
    assert "Energy against latency" in page.html(result)
    drawn = metric_plot(result.layers[0], ENERGY, 800, 340)
    assert drawn.count('class="point"') == 5
    assert drawn.count('class="chosen"') == drawn.count('class="front"') == 1
    assert drawn.count('class="dense"') == 2

    again = replay(str(result.folder), out=result.folder / "again")
    assert [trial.values["energy_mj"] for trial in again.layers[0].trials] == [
        t.values["energy_mj"] for t in result.layers[0].trials
    ]
    assert again.layers[0].finalists == result.layers[0].finalists
    assert page.markdown(again).count("## Pareto front") == 1


def test_a_finalist_of_less_energy_is_named(search: Search, played: Played) -> None:
    result = search(energy=True, trials=3)
    answer = result.layers[0].recommendations[0]
    chosen, other = (
        replace(result.layers[0].finalists[0], values={"energy_mj": mj}) for mj in (2.0, 0.5)
    )
    other = replace(other, facts=result.layers[0].trials[-1].facts)
    at_two = replace(answer, chosen=chosen)
    (sentence,) = best_in_final(at_two, [chosen, other])
    assert f"the best energy of the chains in the final is that of {other.facts.chain}" in sentence
    assert "0.500 mJ against 2.00 mJ of the fastest" in sentence
    assert best_in_final(at_two, [chosen, replace(other, values={"energy_mj": 3.0})]) == []
    large = replace(other, facts=replace(other.facts, nnz=answer.budget.parameters + 1))
    assert best_in_final(at_two, [chosen, large]) == []
    assert best_in_final(replace(at_two, chosen=None), [other]) == []


def test_without_energy_nothing_is_reported_of_it(search: Search) -> None:
    result = search(trials=3)
    assert metric_plot(result.layers[0], ENERGY, 800, 340) == ""
    assert "Energy" not in page.html(result)
    markdown = page.markdown(result)
    assert "mJ" not in markdown
    assert "Energy" not in markdown
    assert "equals or beats in latency and weights together" in markdown
    (value,) = read(result)["layers"]
    assert value["front"]["metrics"] == ["latency_us", "parameters"]
    assert [trial["energy_mj"] for trial in value["trials"]] == [None] * 3


@pytest.mark.slow
def test_a_study_with_energy_goes_on_with_it_alone(
    search: Search, played: Played, tmp_path: Path
) -> None:
    search(energy=True, trials=1)
    assert len(search(energy=True, trials=2).layers[0].trials) == 2
    with pytest.raises(
        InvalidInputError,
        match=r"trials of the study to resume have energy, and none is asked for here "
        r"\(energy True there and False here\)",
    ):
        search(trials=3)
    other = tmp_path / "other"
    search(trials=1, out=other)
    with pytest.raises(
        InvalidInputError,
        match=r"trials of the study to resume have no energy, and it is asked for here "
        r"\(energy False there and True here\).*another --out",
    ):
        search(energy=True, trials=2, out=other)


@pytest.mark.slow
def test_a_users_function_knows_the_energy(
    search: Search, played: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_energy.py").write_text(
        "def cost(known):\n    return known.energy_mj * known.latency_us\n"
    )
    monkeypatch.chdir(tmp_path)
    result = search(energy=True, score="of_energy:cost", objective="latency", train=True, trials=2)
    # Both are beside any objective.
    assert study_of(result).metric_names == ["latency_us", "energy_mj", "score"]
    assert "--energy" in result.request.command.split()
    for trial in result.layers[0].trials:
        assert trial.latency is not None
        assert trial.values["score"] == pytest.approx(
            (trial.values["energy_mj"] or 0.0) * trial.latency.median_us
        )


def test_a_chain_that_is_slow_may_use_little() -> None:
    options: dict[str, Any] = {"budgets": ("50%",), "objective": "latency"}
    study = optuna.create_study(directions=["minimize"] * 2)
    space = build(LayerRequest("32x64", **options))
    *rivals, chain = space.candidates[:4]
    for rival in rivals:
        known = {"facts": {"nnz": rival.nnz}, "outcome": {"dense_ratio": 0.1}}
        attrs = {"chain": str(rival), **known}
        study.add_trial(optuna.create_trial(values=[1.0, 1.0], user_attrs=attrs))
    without, with_energy = (
        Pruning(study, space.steps, LayerRequest("32x64", energy=requested, **options))
        for requested in (False, True)
    )
    assert without.limit(chain, "TPE") is not None
    assert with_energy.limit(chain, "TPE") is None


def test_a_counter_that_fails_fails_its_trial(
    search: Search, played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(energy, "_STILL_S", 0.0)
    played.counter.step = 1e12
    result = search(energy=True, trials=1)
    assert result.layers[0].trials[0].state == "failed"
    assert (result.layers[0].trials[0].reason or "").startswith(
        "EnergyError: the energy counter stood still"
    )
    assert check(result)["layers"][0]["front"]["trials"] == []


def test_a_counter_that_fails_after_the_final_costs_no_final(
    search: Search, played: Played, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def failing(*arguments: object) -> dict[str, float]:
        raise KsoptError("the energy: NVML says GPU is lost")

    monkeypatch.setattr(finals, "energy", failing)
    with pytest.raises(KsoptError, match="GPU is lost"):
        search(energy=True, trials=3)
    again = replay(str(tmp_path / "report"))
    assert again.stopped is None
    assert all(finalist.retimed for finalist in again.layers[0].finalists)
    # What is known of the finalists is what their trials saw.
    for finalist in again.layers[0].finalists:
        assert finalist.values["energy_mj"] == pytest.approx(of_call(finalist.facts.chain))
        assert finalist.dense_values.get("energy_mj") is None
    markdown = page.markdown(again)
    assert "In a trial it is taken over" in markdown
    assert "the dense layer uses" not in markdown


def test_every_worker_measures_energy(
    search: Search, played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_this_process(
        tasks: Sequence[Mapping[str, Any]], on_trial: Callable[[int, int], None], note: object
    ) -> bool:
        answers: list[Mapping[str, Any]] = []
        for task in tasks:
            worker.TASKS["trials"](json.loads(json.dumps(task)), answers.append)
        for answer in answers:
            if "trial" in answer:
                on_trial(answer["share"], answer["trial"])
        return True

    monkeypatch.setattr(worker_pool.worker_processes, "run", in_this_process)
    result = search(energy=True, workers=2, trials=3)
    assert len(played.opened) == 3  # of the one that asks, and of each worker
    for trial in result.layers[0].trials:
        assert trial.values["energy_mj"] == pytest.approx(of_call(trial.facts.chain))


def test_energy_after_the_final_is_a_task(played: Played) -> None:
    request = LayerRequest("32x64", budgets=("50%",), batch=16, device="cpu", energy=True)
    chains = [Chain.monarch(32, 64, p=4), Chain.monarch(32, 64, p=8)]
    answers: list[Mapping[str, Any]] = []
    task = {"request": request.to_json(), "device": "cpu", "chains": [str(one) for one in chains]}
    worker.TASKS["energy"](json.loads(json.dumps(task)), answers.append)
    expected = {str(one): pytest.approx(of_call(one)) for one in chains}
    assert answers == [{"millijoules": {**expected, "dense": pytest.approx(DENSE_MJ)}}]


@pytest.mark.slow
def test_sizes_have_their_energy(played: Played, tmp_path: Path) -> None:
    request = SearchRequest(
        ("32x64", "64x32"),
        budgets=("50%",),
        batch=16,
        device="cpu",
        trials=2,
        energy=True,
        out=tmp_path / "report",
    )
    result = run_search(request)
    assert len(played.opened) == 1
    for one in result.layers:
        for trial in one.trials:
            assert trial.values["energy_mj"] == pytest.approx(of_call(trial.facts.chain))
        assert [f.dense_values.get("energy_mj") for f in one.finalists] == pytest.approx(
            [DENSE_MJ] * len(one.finalists)
        )
    rows = list(csv.DictReader(io.StringIO((result.folder / "trials.csv").read_text())))
    assert all(float(row["energy_mj"]) > 0 for row in rows)
    written = page.html(result)
    first = written.partition("<h2>32x64</h2>")[2].partition("<h2>64x32</h2>")[0]
    assert "Energy against latency" in first
    assert "64x32: pareto front" in page.markdown(result)
    again = replay(str(result.folder))
    assert [one.trials for one in again.layers] == [one.trials for one in result.layers]
    with pytest.raises(InvalidInputError, match="energy True there and False here"):
        run_search(replace(request, energy=False))


def test_a_pruned_trial_has_no_energy(played: Played) -> None:
    """A caller may give up on a chain, as the search does not with energy."""
    request = LayerRequest("32x64", budgets=("50%",), batch=16, device="cpu", energy=True)
    meter: Any = played.counter
    slow = Objective(request, torch.device("cpu"), meter=meter)
    actual = slow.measure(Chain.monarch(32, 64, p=4), limit=1e-9)
    assert actual.latency.given_up
    assert "energy_mj" not in actual.values
