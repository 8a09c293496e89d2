"""Processes that compile ahead: what they leave in the cache is what a first look asks for."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest
import torch

from ksopt.jit import nvrtc
from ksopt.kernels.problem import DeviceSpec, Problem
from ksopt.kernels.quick_choice import first_look
from ksopt.patterns.chain import Chain
from ksopt.search import LayerRequest, SearchResult, compile_ahead
from ksopt.search.compile_ahead import Compilers, Target
from ksopt.search.objectives import Objective
from ksopt.search.options import STUDY
from ksopt.search.study_store import FILE

H200 = DeviceSpec((9, 0), 132, 228 * 1024)
REQUEST = LayerRequest("128x128", dtype="float16", batch=64)
CHAIN = Chain.parse("(1,16,16,8)*(8,16,16,1)")


def test_on_a_cpu_there_is_nothing_to_compile() -> None:
    assert Target.of(torch.device("cpu")) is None
    with Compilers(None) as compilers:
        compilers.soon([CHAIN], REQUEST)
        assert compilers._processes == []


def test_a_target_is_written_and_read() -> None:
    target = Target(H200, "sm_90a")
    assert Target.from_json(target.to_json()) == target


def test_every_worker_gets_its_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead.os, "sched_getaffinity", lambda pid: set(range(16)))
    assert compile_ahead.affordable() == 4
    assert compile_ahead.affordable(workers=4) == 1
    assert compile_ahead.affordable(workers=8) == 0
    monkeypatch.setattr(compile_ahead.os, "sched_getaffinity", lambda pid: set(range(2)))
    assert compile_ahead.affordable() == 0


@pytest.mark.slow
def test_the_kernels_of_a_chain_are_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvrtc.version()  # a test dependency: not a reason to skip
    monkeypatch.setenv("KSOPT_CACHE_DIR", str(tmp_path))
    with Compilers(Target(H200, "sm_90a"), count=1) as compilers:
        compilers.soon([CHAIN, CHAIN], REQUEST)
        wanted = {
            source
            for pattern in CHAIN
            for source in compile_ahead.sources(Problem(pattern, "float16", False), 64, H200)
        }
        assert len(wanted) >= 4
        until = time.monotonic() + 120
        while len(found := list(tmp_path.glob("*/sm_90a/*/key.json"))) < len(wanted):
            assert time.monotonic() < until, f"{len(found)} of {len(wanted)}"
            time.sleep(0.1)

    def compiles_again(*given: object) -> bytes:
        raise AssertionError("it was not in the cache")

    monkeypatch.setattr(nvrtc, "_compile", compiles_again)
    for source in wanted:
        assert nvrtc.cubin(source, "sm_90a").data


def test_processes_end_when_they_are_closed() -> None:
    compilers = Compilers(Target(H200, "sm_90a"), count=1)
    process = compilers._processes[0]
    compilers.close()
    assert process.poll() is not None
    compilers.soon([CHAIN], REQUEST)


def test_a_first_look_leaves_the_cpu_alone() -> None:
    x, weight = torch.randn(4, 128), torch.randn(8, 16, 16, 1)
    first_look(x, weight, batch_last=False)


class Idle:
    """A process that compiles nothing, and keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.stdin = self

    def write(self, text: str) -> None:
        self.told.append(text)

    def flush(self) -> None: ...
    def kill(self) -> None: ...
    def wait(self) -> None: ...
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
    assert [trial.state for trial in result.layers[0].trials] == ["complete"] * 7
    told = [json.loads(line) for line in idle.told]
    patterns = {
        pattern.weight_shape for trial in result.layers[0].trials for pattern in trial.facts.chain
    }
    assert {tuple(job["pattern"]) for job in told} == patterns
    assert len(told) == len(patterns)  # each once
    assert {job["batch"] for job in told} == {16}


@pytest.mark.slow
def test_what_was_only_drawn_is_no_trial_and_is_next(
    search: Callable[..., SearchResult], idle: Idle, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, measured = Objective.measure, []

    def slow(self: Objective, *given: object) -> object:
        measured.append(given[0])
        if len(measured) == 2:
            raise KeyboardInterrupt
        return right(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(Objective, "measure", slow)
    first = search(trials=20)
    assert first.stopped == "interrupted"
    assert [trial.state for trial in first.layers[0].trials] == ["complete", "lost"]
    study = optuna.load_study(study_name=STUDY, storage=f"sqlite:///{first.folder / FILE}")
    drawn = [trial.user_attrs["chain"] for trial in study.trials]
    assert len(drawn) == 1 + compile_ahead.CHAINS_AHEAD
    second = search(trials=6)
    assert second.stopped is None
    chains = [
        str(trial.facts.chain) for trial in second.layers[0].trials if trial.state == "complete"
    ]
    assert chains[:5] == drawn
    assert len(chains) == len(set(chains)) == 6
