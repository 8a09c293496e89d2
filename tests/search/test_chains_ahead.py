"""A search has the kernels of the chains that come next compiled while it measures."""

import json
from collections.abc import Callable
from typing import Any

import optuna
import pytest

from ksopt.kernels import compile_ahead
from ksopt.kernels.compile_ahead import Target
from ksopt.kernels.problem import DeviceSpec, ProblemKey
from ksopt.patterns.chain import Chain
from ksopt.search import SearchResult, trial_loop
from ksopt.search.objectives import Objective
from ksopt.search.options import STUDY
from ksopt.search.study_store import FILE

H200 = DeviceSpec((9, 0), 132, 228 * 1024)


class Idle:
    """A process that compiles nothing, and keeps its jobs."""

    def __init__(self) -> None:
        self.jobs: list[dict[str, Any]] = []

    def send(self, job: dict[str, Any]) -> None:
        self.jobs.append(json.loads(json.dumps(job)))

    def close(self) -> None: ...


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> Idle:
    """What a search on this CPU has compiled, as if the CPU were a GPU."""
    process = Idle()
    monkeypatch.setattr(compile_ahead, "_started", lambda target: process)
    monkeypatch.setattr(compile_ahead, "affordable", lambda workers=1: 1)
    target = Target(H200, "sm_90a")
    monkeypatch.setattr(Target, "of", classmethod(lambda cls, device: target))
    return process


@pytest.mark.slow
def test_a_search_has_the_next_chains_compiled(
    search: Callable[..., SearchResult], idle: Idle
) -> None:
    result = search(trials=7)
    (layer,) = result.layers
    assert [trial.state for trial in layer.trials] == ["complete"] * 7
    chains = [trial.facts.chain for trial in layer.trials]
    expected = {*chains, *(Chain((pattern,)) for chain in chains for pattern in chain)}
    assert {ProblemKey.from_json(job["key"]).problem.chain for job in idle.jobs} == expected
    assert len(idle.jobs) == len(expected)  # each once
    assert {job["batch"] for job in idle.jobs} == {16}


@pytest.mark.slow
def test_what_was_only_drawn_is_no_trial_and_is_next(
    search: Callable[..., SearchResult], idle: Idle, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, measured = Objective.measure, []

    def slow(self: Objective, *arguments: object) -> object:
        measured.append(arguments[0])
        if len(measured) == 2:
            raise KeyboardInterrupt
        return right(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Objective, "measure", slow)
    first = search(trials=20)
    assert first.stopped == "interrupted"
    assert [trial.state for trial in first.layers[0].trials] == ["complete", "lost"]
    study = optuna.load_study(study_name=STUDY, storage=f"sqlite:///{first.folder / FILE}")
    drawn = [trial.user_attrs["chain"] for trial in study.trials]
    assert len(drawn) == 1 + trial_loop.CHAINS_AHEAD
    second = search(trials=6)
    assert second.stopped is None
    complete = [trial for trial in second.layers[0].trials if trial.state == "complete"]
    chains = [str(trial.facts.chain) for trial in complete]
    assert chains[:5] == drawn
    assert len(chains) == len(set(chains)) == 6
