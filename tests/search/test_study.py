"""Searches run for real, are killed, resumed, interrupted and refused."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch

from ksopt import ops
from ksopt.errors import InvalidInputError
from ksopt.search import finals, replay, study, worker_pool
from ksopt.search.objectives import Objective
from ksopt.search.options import STUDY
from ksopt.search.request import SearchRequest
from ksopt.search.results import SearchResult, TrialRecord, Verdict
from ksopt.search.study_store import FILE

pytestmark = pytest.mark.usefixtures("brief")

Search = Callable[..., SearchResult]

# Runs a search in a process of its own.
SCRIPT = """
import sys
from ksopt.search import SearchRequest, run_search
out, trials = sys.argv[1], int(sys.argv[2])
class Print:
    def note(self, text): print(text, flush=True)
    def start(self, total, done): print("start", total, done, flush=True)
    def trial(self, record, best): print("trial", record.number, flush=True)
    def close(self): pass
result = run_search(SearchRequest("32x64", budgets=("50%",), batch=16, device="cpu", trials=trials,
                                  out=out), Print())
print("stopped", result.stopped)
"""


def start(out: Path, trials: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(out), str(trials)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_trials(process: subprocess.Popen[str], count: int) -> list[str]:
    assert process.stdout is not None
    seen: list[str] = []
    while sum(line.startswith("trial") for line in seen) < count:
        line = process.stdout.readline()
        assert line, f"it ended early: {seen}"
        seen.append(line)
    return seen


def stored(out: Path) -> optuna.Study:
    return optuna.load_study(study_name=STUDY, storage=f"sqlite:///{out / FILE}")


def chains(result: SearchResult) -> list[str]:
    return [str(t.facts.chain) for t in result.layers[0].trials if t.state != "lost"]


@pytest.mark.slow
def test_every_trial_is_another_chain_within_the_budget(search: Search) -> None:
    result = search(trials=15)
    assert len(result.layers[0].trials) == 15
    assert len(set(chains(result))) == 15
    assert result.layers[0].sampler == "TPE"
    for trial in result.layers[0].trials:
        assert trial.state == "complete", trial.reason
        assert trial.facts.chain.shape == (64, 32)
        assert 512 <= trial.facts.nnz <= 1024
        assert trial.error is not None
        assert trial.error < 1e-5
        assert trial.latency is not None
        assert trial.latency.repeats >= 3


@pytest.mark.slow
def test_priors_come_first(search: Search) -> None:
    result = search(trials=30)
    origins = [trial.origin for trial in result.layers[0].trials]
    assert origins[0] == "largest rho"
    assert "Monarch" in origins[:8]
    assert origins[-1] == "TPE"


def test_a_space_that_fits_is_measured_whole_and_once(search: Search) -> None:
    result = search(dims="12x8", budgets=("60%",), trials=50)
    assert result.layers[0].sampler == "exhaustive"
    assert (
        len(result.layers[0].trials)
        == result.layers[0].space.candidates
        == len(set(chains(result)))
    )
    assert result.layers[0].space.complete


def test_trials_are_readable_in_optuna(search: Search) -> None:
    result = search()
    trial = stored(result.folder).trials[0]
    assert trial.user_attrs["chain"] == str(result.layers[0].trials[0].facts.chain)
    known, outcome = trial.user_attrs["facts"], trial.user_attrs["outcome"]
    assert trial.values == [outcome["latency"]["median_us"], known["nnz"]]
    assert {"rho", "d_rho", "device"} <= known.keys()
    assert {"efficiency", "dense_ratio", "seconds"} <= outcome.keys()
    assert {"origin", "claim"} <= trial.user_attrs.keys()
    assert stored(result.folder).metric_names == ["latency_us", "parameters"]


def test_more_trials_go_on_where_it_stopped(search: Search) -> None:
    first = search(trials=3)
    again = search(trials=7)
    assert [t.run for t in again.layers[0].trials] == [1, 1, 1, 2, 2, 2, 2]
    assert chains(again)[:3] == chains(first)
    assert len(set(chains(again))) == 7
    assert [t.latency for t in again.layers[0].trials[:3]] == [
        t.latency for t in first.layers[0].trials
    ]
    assert len(again.layers[0].runs) == 2


@pytest.mark.slow
def test_the_largest_seed_goes_on_too(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = 2**32 - 1
    assert len(search(seed=seed, trials=2).layers[0].trials) == 2
    assert len(search(seed=seed, trials=3).layers[0].trials) == 3
    tasks: list[Any] = []
    monkeypatch.setattr(
        worker_pool.worker_processes, "run", lambda arguments, *_: tasks.extend(arguments) or True
    )
    search(seed=seed, trials=5, workers=2)
    seeds = [share["seed"] for task in tasks for share in task["shares"]]
    assert seeds == [2, 2 + worker_pool._SEEDS_APART]


def test_nothing_left_to_do_times_the_finalists_again(search: Search) -> None:
    first, again = search(), search()
    assert chains(again) == chains(first)
    assert all(finalist.retimed for finalist in again.layers[0].finalists)
    times = [{f.dense for f in result.layers[0].finalists} for result in (first, again)]
    assert len(times[0]) == len(times[1]) == 1
    assert times[0] != times[1]


def test_a_killed_search_resumes_with_nothing_lost(tmp_path: Path, search: Search) -> None:
    out = tmp_path / "killed"
    process = start(out, trials=500)
    wait_for_trials(process, 3)
    process.kill()
    process.wait()
    before = [t for t in stored(out).trials if t.state == optuna.trial.TrialState.COMPLETE]
    assert len(before) >= 3
    result = search(out=out, trials=len(before) + 3)
    saved = {t.number: t for t in result.layers[0].trials}
    for trial in before:
        assert str(saved[trial.number].facts.chain) == trial.user_attrs["chain"]
        latency = saved[trial.number].latency
        assert latency is not None
        assert latency.median_us == trial.values[0]
    complete = [t for t in result.layers[0].trials if t.state == "complete"]
    assert len(complete) == len(before) + 3
    assert len({t.facts.chain for t in complete}) == len(complete)
    assert not any(t.state == optuna.trial.TrialState.RUNNING for t in stored(out).trials)


@pytest.mark.slow
def test_a_trial_cut_off_is_redone_first(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a kill in the middle of a measurement leaves it: running, with a chain."""
    with monkeypatch.context() as patched:
        patched.setattr(Objective, "measure", _exit)
        with pytest.raises(SystemExit):
            search()
    result = search()
    cut, redone = result.layers[0].trials[:2]
    assert (cut.state, redone.state) == ("lost", "complete")
    assert cut.facts.chain == redone.facts.chain
    assert cut.origin == redone.origin
    assert "cut off" in (cut.reason or "")
    assert sum(t.state == "complete" for t in result.layers[0].trials) == 4
    assert [t.state for t in search().layers[0].trials] == [
        t.state for t in result.layers[0].trials
    ]


def _exit(*arguments: object) -> None:
    raise SystemExit


@pytest.mark.slow  # the same in this process: the next one
def test_ctrl_c_leaves_a_report(tmp_path: Path) -> None:
    out = tmp_path / "interrupted"
    process = start(out, trials=500)
    wait_for_trials(process, 3)
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0, rest
    assert "stopped interrupted" in rest
    actual = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert actual["stopped"] == "interrupted"
    (layer,) = actual["layers"]
    assert sum(trial["state"] == "complete" for trial in layer["trials"]) >= 3
    assert layer["recommendations"][0]["chosen"]["retimed"] is False
    assert "interrupted" in (out / "report.md").read_text(encoding="utf-8")
    assert (out / "report.html").stat().st_size > 0


def test_ctrl_c_in_the_final_leaves_a_report(
    search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(finals, "final", interrupt)
    result = search()
    assert result.stopped == "interrupted"
    assert len(result.layers[0].trials) == 4
    assert result.layers[0].recommendations[0].chosen is not None
    assert "stopped before the final" in result.layers[0].recommendations[0].sentence


def test_a_timeout_ends_it(search: Search) -> None:
    result = search(trials=500, timeout_s=0.001)
    assert result.stopped == "timeout"
    assert result.layers[0].trials == ()
    assert result.layers[0].recommendations[0].verdict is Verdict.UNKNOWN
    assert "was measured" in result.layers[0].recommendations[0].sentence
    assert (result.folder / "report.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dims": "64x32"}, "dims 32x64 there and 64x32 here"),
        ({"dtype": "bf16"}, "dtype float32 there and bfloat16 here"),
        ({"batch": 8}, "batch 16 there and 8 here"),
        ({"layout": "batch_last"}, "layout batch_first there and batch_last here"),
    ],
)
def test_a_study_of_something_else_is_refused(search: Search, change: dict, words: str) -> None:
    search(trials=1)
    with pytest.raises(InvalidInputError, match=words):
        search(**change)
    # Other budgets ask the same measurements.
    assert search(trials=2, budgets=("60%",)).layers[0].trials[0].run == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loose", "strict"),
    [({"min_rank": 4}, {}), ({"max_factors": 3}, {"max_factors": 2})],
    ids=["rank", "factors"],
)
def test_a_stricter_search_recommends_no_chain_of_the_looser_one(
    search: Search, loose: dict[str, int], strict: dict[str, int]
) -> None:
    first = search(trials=12, **loose)
    second = search(trials=18, **strict)
    request = second.layers[0].request
    assert len(second.layers[0].trials) == 18  # they are kept, and shown
    outside = [one for one in first.layers[0].trials if not request.admits(one.facts.chain)]
    assert outside
    assert second.layers[0].finalists
    assert all(request.admits(one.facts.chain) for one in second.layers[0].finalists)
    again = replay(str(second.folder))
    assert [one.facts.chain for one in again.layers[0].finalists] == [
        one.facts.chain for one in second.layers[0].finalists
    ]


def test_a_study_of_another_device_is_refused(search: Search) -> None:
    result = search(trials=1)
    identity = stored(result.folder).user_attrs["identity"]
    stored(result.folder).set_user_attr("identity", {**identity, "device name": "a toaster"})
    with pytest.raises(InvalidInputError, match="device name a toaster there"):
        search(trials=2)


def test_a_study_of_another_format_is_refused(search: Search) -> None:
    result = search(trials=1)
    identity = stored(result.folder).user_attrs["identity"]
    before = {name: value for name, value in identity.items() if name != "format"}
    stored(result.folder).set_user_attr("identity", before)
    with pytest.raises(InvalidInputError, match="in format 1 where this one reads 2"):
        search(trials=2)
    with pytest.raises(InvalidInputError, match="in format 1 where this one reads 2"):
        replay(str(result.folder))


@pytest.mark.slow
def test_a_wrong_kernel_gets_no_time(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ops.chain

    def wrong(x: torch.Tensor, weights: list[torch.Tensor], *around: Any, op: str) -> torch.Tensor:
        y = right(x, weights, *around, op=op).clone()
        if len(weights) == 2:
            y[..., -1] *= 1.01
        return y

    monkeypatch.setattr(ops, "chain", wrong)
    result = search(trials=8)
    states = {len(t.facts.chain): t for t in result.layers[0].trials}
    assert set(states) == {2, 3}
    for trial in result.layers[0].trials:
        assert trial.state == ("failed" if len(trial.facts.chain) == 2 else "complete")
    failed = states[2]
    assert failed.latency is None
    assert "relative error" in (failed.reason or "")
    assert all(len(finalist.facts.chain) == 3 for finalist in result.layers[0].finalists)


def test_not_finite_is_wrong(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "chain", lambda *_, **__: torch.full((16, 64), float("nan")))
    result = search(trials=2)
    assert [t.reason for t in result.layers[0].trials] == [
        "WrongResultError: its product is not finite"
    ] * 2
    assert result.layers[0].recommendations[0].verdict is Verdict.UNKNOWN


@pytest.mark.sweep
@pytest.mark.parametrize("layout", ["batch_first", "batch_last"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_each_dtype_and_layout(search: Search, dtype: str, layout: str) -> None:
    result = search(dtype=dtype, layout=layout, trials=2)
    assert [t.state for t in result.layers[0].trials] == ["complete"] * 2, result.layers[0].trials


def test_an_output_folder_that_cannot_be_is_refused(search: Search, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InvalidInputError, match=r"output folder .*file/report cannot be written"):
        search(out=tmp_path / "file" / "report")


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_an_output_folder_without_permission_is_refused(search: Search, tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(InvalidInputError, match="cannot be written"):
        search(out=tmp_path / "closed")


def test_misuse_makes_no_folder(search: Search, tmp_path: Path) -> None:
    for change in ({"budgets": ("1",)}, {"device": "cuda:77"}):
        with pytest.raises(InvalidInputError):
            search(**change)
    assert not (tmp_path / "report").exists()


@pytest.mark.slow
def test_two_searches_do_not_share_a_folder(tmp_path: Path, search: Search) -> None:
    process = start(tmp_path / "report", trials=500)
    try:
        wait_for_trials(process, 1)
        with pytest.raises(InvalidInputError, match="another search is at work"):
            search()
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("storage", "words"),
    [
        ("study.db", "give a URL"),
        ("nosuchdb://x", "cannot be used"),
        ("sqlite:////no/such/folder/x.db", "cannot be used"),
    ],
)
def test_a_storage_that_cannot_be_used(search: Search, storage: str, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        search(storage=storage)


@pytest.mark.slow
def test_a_storage_of_ones_own(search: Search, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'mine.db'}"
    result = search(storage=url)
    assert not (result.folder / FILE).exists()
    assert len(optuna.load_study(study_name=STUDY, storage=url).trials) == 4


def test_optunas_log_level_is_left_alone(search: Search) -> None:
    before = optuna.logging.get_verbosity()
    search(trials=1)
    assert optuna.logging.get_verbosity() == before


def test_progress_hears_of_every_trial(search: Search) -> None:
    class Heard:
        events: list[object] = []  # noqa: RUF012

        def note(self, text: str) -> None: ...
        def start(self, total: int, done: int) -> None:
            self.events.append((total, done))

        def trial(self, record: TrialRecord, best: TrialRecord | None) -> None:
            self.events.append(record.number)

        def close(self) -> None:
            self.events.append("closed")

    search(progress=Heard())
    assert Heard.events == [(4, 0), 0, 1, 2, 3, "closed"]


def test_the_default_folder_says_what_is_in_it() -> None:
    request = SearchRequest("768x3072", device="cuda:0", batch=64)
    assert str(study._default_folder(request)) == (
        "ksopt-report-768x3072-cuda0-float32-batch_first-64"
    )


def test_a_study_with_a_broken_page_is_refused(search: Search) -> None:
    file = search(trials=1).folder / FILE
    with closing(sqlite3.connect(file)) as database:
        (size,) = database.execute("pragma page_size").fetchone()
        query = "select rootpage from sqlite_master where name = 'trial_user_attributes'"
        (page,) = database.execute(query).fetchone()
    with file.open("rb+") as pages:
        pages.seek((page - 1) * size)
        pages.write(b"\xff" * 8)
    with pytest.raises(InvalidInputError, match=r"cannot be (read|used)"):
        replay(str(file.parent))
