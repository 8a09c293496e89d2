"""Searches of several sizes run for real: shared trials, one report, killed, resumed, refused."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.trial import TrialState

from ksopt import Plan
from ksopt.errors import InvalidInputError
from ksopt.search import LayerRequest, SearchRequest, SearchResult, plan_of, replay, run_search
from ksopt.search.options import STUDY
from ksopt.search.report import results_json
from ksopt.search.request import shared
from ksopt.search.study import _default_folder
from ksopt.search.study_store import FILE

pytestmark = pytest.mark.usefixtures("brief")

Sizes = Callable[..., SearchResult]
SIZES = ("32x64", "64x32")

# Runs a search of two sizes in a process of its own.
SCRIPT = """
import sys
from ksopt.search import (SearchRequest, finals, run_search)
finals._MOST_FINALS = 1
out, trials, workers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
class Print:
    def note(self, text): print(text, flush=True)
    def start(self, total, done): print("start", total, done, flush=True)
    def trial(self, record, best):
        print("trial", record.number, record.facts.chain.in_features, flush=True)
    def close(self): pass
request = SearchRequest(("32x64", "64x32"), budgets=("50%",), batch=16, device="cpu",
                           trials=trials, out=out, workers=workers,
                           storage=sys.argv[4] or None)
result = run_search(request, Print())
print("stopped", result.stopped)
"""


@pytest.fixture
def sizes(quick: None, tmp_path: Path) -> Sizes:
    """Runs a search of two sizes, with the passed options."""

    def run(sizes: Any = SIZES, progress: Any = None, **options: Any) -> SearchResult:
        arguments = {
            "budgets": ("50%",),
            "batch": 16,
            "device": "cpu",
            "trials": 6,
            "out": tmp_path / "report",
        }
        return run_search(SearchRequest(sizes, **{**arguments, **options}), progress)

    return run


@pytest.fixture(scope="module")
def cache() -> list[SearchResult]:
    return []


@pytest.fixture
def two(
    sizes: Sizes, cache: list[SearchResult], tmp_path_factory: pytest.TempPathFactory
) -> SearchResult:
    """One search for all tests that only read its files."""
    if not cache:
        cache.append(sizes(out=tmp_path_factory.mktemp("kept") / "report"))
    return cache[0]


def start(out: Path, trials: int, workers: int = 1, storage: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(out), str(trials), str(workers), storage],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "KSOPT_CACHE_DIR": str(out.parent / "cache")},
    )


def wait_for_trials(process: subprocess.Popen[str], count: int) -> list[str]:
    assert process.stdout is not None
    seen: list[str] = []
    while sum(line.startswith("trial") for line in seen) < count:
        line = process.stdout.readline()
        assert line, f"it ended early: {seen}"
        seen.append(line)
    return [line for line in seen if line.startswith("trial")]


def stored(out: Path, size: str) -> optuna.Study:
    return optuna.load_study(study_name=f"{STUDY} {size}", storage=f"sqlite:///{out / FILE}")


def complete(out: Path, size: str) -> dict[int, optuna.trial.FrozenTrial]:
    trials = stored(out, size).get_trials(states=(TrialState.COMPLETE,))
    return {trial.number: trial for trial in trials}


def test_sizes_share_the_trials_and_a_report(sizes: Sizes) -> None:
    result = sizes(trials=7)
    assert [str(one.request.size) for one in result.layers] == list(SIZES)
    assert [len(one.trials) for one in result.layers] == [4, 3]
    for one in result.layers:
        assert {t.facts.chain.shape for t in one.trials} == {
            (one.request.size.out_features, one.request.size.in_features)
        }
        assert len({t.facts.chain for t in one.trials}) == len(one.trials)
        assert all(finalist.retimed for finalist in one.finalists)
    assert result.stopped is None
    names = {"plan.json", "report.html", "report.md", "results.json", "study.db", "trials.csv"}
    assert names | {"plots"} <= {path.name for path in result.folder.iterdir()}
    assert {"latency.svg", "latency-32x64.svg"} <= {
        path.name for path in (result.folder / "plots").iterdir()
    }
    rows = list(csv.DictReader(io.StringIO((result.folder / "trials.csv").read_text("utf-8"))))
    assert Counter(row["dims"] for row in rows) == {"32x64": 4, "64x32": 3}
    plan = Plan.read(result.folder / "plan.json")
    assert [(r.match, r.in_features, r.out_features) for r in plan.rules] == [
        ("*", 32, 64),
        ("*", 64, 32),
    ]
    page = (result.folder / "report.md").read_text("utf-8")
    assert "## 32x64: finalists" in page
    assert "## 64x32: finalists" in page
    assert "ksopt search --dims 32x64 64x32 --budget 50%" in page


def test_the_json_has_each_size_as_its_own_search_does(two: SearchResult) -> None:
    actual = json.loads((two.folder / "results.json").read_text("utf-8"))
    assert actual == json.loads(results_json.to_json(two))
    assert actual["schema"] == "ksopt.search/4"
    assert [one["request"]["dims"] for one in actual["layers"]] == list(SIZES)
    assert actual["request"]["dims"] == list(SIZES)
    assert actual["model"] is actual["plan"] is actual["whole"] is None
    assert actual["budgets"] == []
    assert actual["unmet"] == {}


def test_they_are_measured_in_turns(sizes: Sizes) -> None:
    class Heard:
        sizes: list[int] = []  # noqa: RUF012
        started: list[tuple[int, int]] = []  # noqa: RUF012

        def note(self, text: str) -> None: ...
        def close(self) -> None: ...
        def start(self, total: int, done: int) -> None:
            self.started.append((total, done))

        def trial(self, record: Any, best: Any) -> None:
            assert best is None or best.facts.chain.shape == record.facts.chain.shape
            self.sizes.append(record.facts.chain.in_features)

    sizes(trials=8, progress=Heard())
    assert Heard.started == [(8, 0)]
    assert Heard.sizes == [32, 64] * 4


@pytest.mark.slow
def test_without_a_number_each_size_has_as_many_trials_as_a_search_of_its_own(
    sizes: Sizes,
) -> None:
    """All chains of these sizes are fewer."""
    result = sizes(("12x8", "8x12"), trials=None, budgets=("60%",))
    for one in result.layers:
        assert one.request.trials == LayerRequest.trials
        assert len(one.trials) == one.space.candidates


@pytest.mark.slow
def test_killed_it_resumes_with_nothing_lost(tmp_path: Path, sizes: Sizes) -> None:
    out = tmp_path / "killed"
    process = start(out, trials=500)
    seen = wait_for_trials(process, 5)
    process.kill()
    process.communicate()
    counts = Counter(line.split()[-1] for line in seen)
    assert abs(counts["32"] - counts["64"]) <= 1  # both had come equally far
    before = {size: complete(out, size) for size in SIZES}
    done = sum(map(len, before.values()))
    assert done >= 5
    trials = 2 * max(map(len, before.values())) + 4
    result = sizes(out=out, trials=trials)
    assert len([t for one in result.layers for t in one.trials if t.state == "complete"]) == trials
    for one in result.layers:
        size = str(one.request.size)
        saved = {t.number: t for t in one.trials}
        for number, trial in before[size].items():
            assert str(saved[number].facts.chain) == trial.user_attrs["chain"]
            latency = saved[number].latency
            assert latency is not None
            assert latency.median_us == trial.values[0]
        finished = [t for t in one.trials if t.state == "complete"]
        assert len({t.facts.chain for t in finished}) == len(finished) == trials // 2
        assert not stored(out, size).get_trials(states=(TrialState.RUNNING,))
        assert one.run == 2


@pytest.mark.slow
def test_workers_measure_every_size(tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start(out, trials=10, workers=2)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert "stopped None" in output
    reported = {
        tuple(line.split()[1:]) for line in output.splitlines() if line.startswith("trial ")
    }
    ended = (TrialState.COMPLETE, TrialState.PRUNED)  # workers prune as ever
    measured = {size: stored(out, size).get_trials(states=ended) for size in SIZES}
    assert reported == {
        (str(trial.number), size.partition("x")[0]) for size in SIZES for trial in measured[size]
    }
    for trials in measured.values():
        assert len({trial.user_attrs["chain"] for trial in trials}) == len(trials) == 5


@pytest.mark.slow
def test_two_searches_share_the_studies_of_a_journal(tmp_path: Path) -> None:
    url = f"journal:{tmp_path / 'shared.log'}"
    pair = [start(tmp_path / name, trials=8, storage=url) for name in ("one", "two")]
    for process in pair:
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output
    actual = [json.loads((tmp_path / name / "results.json").read_text()) for name in ("one", "two")]
    for value in actual:
        for one in value["layers"]:
            assert len({trial["chain"] for trial in one["trials"]}) == len(one["trials"]) == 4
            assert len(one["runs"]) == 2
    chains = [[[t["chain"] for t in s["trials"]] for s in value["layers"]] for value in actual]
    assert chains[0] == chains[1]


@pytest.mark.slow
def test_ctrl_c_leaves_a_report(tmp_path: Path) -> None:
    out = tmp_path / "interrupted"
    process = start(out, trials=500)
    wait_for_trials(process, 4)
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0, rest
    assert "stopped interrupted" in rest
    actual = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert actual["stopped"] == "interrupted"
    assert all(len(one["trials"]) >= 2 for one in actual["layers"])
    assert "interrupted" in (out / "report.md").read_text(encoding="utf-8")


def test_a_timeout_ends_all(sizes: Sizes) -> None:
    result = sizes(trials=500, timeout_s=0.001)
    assert result.stopped == "timeout"
    assert [one.trials for one in result.layers] == [(), ()]
    assert (result.folder / "report.html").exists()
    assert all(rule.chains == () for rule in plan_of(result).rules)


def test_it_is_reported_again_without_measuring(two: SearchResult, tmp_path: Path) -> None:
    before = json.loads((two.folder / "results.json").read_text("utf-8"))
    plan = (two.folder / "plan.json").read_text("utf-8")
    again = replay(str(two.folder), out=tmp_path / "again")
    assert again.replayed
    after = json.loads((tmp_path / "again" / "results.json").read_text("utf-8"))
    assert [one["trials"] for one in after["layers"]] == [one["trials"] for one in before["layers"]]
    assert [one["finalists"] for one in after["layers"]] == [
        one["finalists"] for one in before["layers"]
    ]
    assert (tmp_path / "again" / "plan.json").read_text("utf-8") == plan
    assert "Nothing was measured for this report" in (tmp_path / "again" / "report.md").read_text()


def test_one_of_its_layers_is_reported_alone(two: SearchResult, tmp_path: Path) -> None:
    alone = replay(str(two.folder), f"{STUDY} 64x32", tmp_path / "alone")
    (layer,) = alone.layers
    assert layer.trials == two.layers[1].trials
    assert layer.recommendations == two.layers[1].recommendations
    page = (tmp_path / "alone" / "report.md").read_text("utf-8")
    assert page.startswith("# Chains for a 64x32 linear layer")
    assert "--study 'ksopt-search 64x32'" in alone.request.command


def test_what_a_later_version_wrote_is_refused(sizes: Sizes) -> None:
    folder = sizes(trials=2).folder
    index = optuna.load_study(study_name=STUDY, storage=f"sqlite:///{folder / FILE}")
    index.set_user_attr("layers", {**index.user_attrs["layers"], "schema": "ksopt.search/9"})
    with pytest.raises(InvalidInputError, match=r"a later ksopt, as ksopt\.search/9; this one"):
        replay(str(folder))


@pytest.mark.slow
def test_other_sizes_may_join_the_study(sizes: Sizes) -> None:
    first = sizes()
    again = sizes(("64x32", "32x32"), trials=8)
    saved, new = again.layers
    assert [t.latency for t in saved.trials[:3]] == [t.latency for t in first.layers[1].trials]
    assert {t.run for t in new.trials} == {1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "bf16"}, "dtype float32 there and bfloat16 here"),
        ({"batch": 8}, "batch 16 there and 8 here"),
    ],
)
def test_a_study_of_something_else_is_refused(sizes: Sizes, change: dict, words: str) -> None:
    sizes()
    with pytest.raises(InvalidInputError, match=words):
        sizes(**change)


@pytest.mark.slow
def test_one_size_and_several_do_not_share_a_study(
    sizes: Sizes, search: Callable[..., Any], tmp_path: Path
) -> None:
    sizes()
    with pytest.raises(InvalidInputError, match="has the report of a search of several"):
        search()
    search(out=tmp_path / "one")
    with pytest.raises(InvalidInputError, match="has the report of a search of one size, "):
        sizes(out=tmp_path / "one")


def test_a_size_without_a_chain_stays_dense(sizes: Sizes) -> None:
    result = sizes(("32x64", "7x13"), budgets=("40%",))
    assert [str(one.request.size) for one in result.layers] == ["32x64"]
    assert len(result.layers[0].trials) == 6
    ((dims, sentence),) = result.unmet.items()
    assert str(dims) == "7x13"
    assert "the smallest budget that works" in sentence
    assert plan_of(result).rules[1].chains == ()
    assert "The layers of 7x13 stay dense: budget 40%" in (result.folder / "report.md").read_text()
    with pytest.raises(InvalidInputError, match="no chain of at most"):
        sizes(("7x13", "13x7"), budgets=("40%",))


@pytest.mark.slow
def test_a_size_with_fewer_weights_than_any_budget_stays_dense(sizes: Sizes) -> None:
    result = sizes(("8x8", "32x64"), budgets=("1k",), min_rank=16)
    assert [str(one.request.size) for one in result.layers] == ["32x64"]
    assert len(result.layers[0].trials) == 6
    sentence = "The layers of 8x8 stay dense: budget '1k' is more than the dense layer's 64 weights"
    assert sentence in (result.folder / "report.md").read_text()
    assert plan_of(result).rules[0].chains == ()
    again = replay(str(result.folder))
    assert again.unmet == result.unmet


@pytest.mark.slow
def test_the_request_of_a_small_size_is_reported(sizes: Sizes) -> None:
    result = sizes(("16x16", "32x64"), budgets=("60%", "300"), min_rank=24, max_params="900")
    small, large = result.layers
    assert (small.request.rank, large.request.rank) == (16, 24)
    assert [step.parameters for step in small.request.steps] == [153]
    assert [step.parameters for step in large.request.steps] == [300, 900]
    message = (
        "16x16: its chains have full rank, 16, which is less than 24; it has no step of 300, for "
        "its dense layer has 256 weights."
    )
    assert message in (result.folder / "report.md").read_text()
    assert json.loads((result.folder / "results.json").read_text())["notes"] == [message]
    again = replay(str(result.folder))
    assert again.request.notes == (message,)
    assert "--min-rank 24" in result.request.command
    assert "--budget 60% 300" in result.request.command


@pytest.mark.slow
def test_no_report_is_written_over_another_kinds(
    sizes: Sizes, search: Callable[..., Any], tmp_path: Path
) -> None:
    several = sizes()
    before = (several.folder / "results.json").read_bytes()
    own = "ksopt-search 32x64"
    with pytest.raises(InvalidInputError, match=f"study.db --study '{own}' resumes 32x64 there"):
        search(study=own, out=several.folder)
    with pytest.raises(InvalidInputError, match="has the report of a search of several sizes"):
        replay(str(several.folder), own)
    assert (several.folder / "results.json").read_bytes() == before
    storage = f"sqlite:///{several.folder / 'study.db'}"
    apart = search(study=own, storage=storage, out=tmp_path / "one", trials=5)
    assert len(apart.layers[0].trials) == 5  # of which three are those of before
    assert len(replay(str(several.folder), own, tmp_path / "two").layers[0].trials) == 5
    with pytest.raises(InvalidInputError, match="has the report of a search of one"):
        sizes(study="others", out=tmp_path / "one")
    assert len(sizes(trials=12).layers[0].trials) == 6


@pytest.mark.parametrize(
    ("sizes", "options", "words"),
    [
        ((), {}, "at least one layer size"),
        (("32x64", "64"), {}, "INxOUT"),
        (SIZES, {"trials": 1}, "trials 1: there are 2 layer sizes"),
        (SIZES, {"max_error": 0.1}, "max_error 0.1 needs weights"),
        (SIZES, {"dtype": "int8"}, "float32, float16 or bfloat16"),
        (
            ("16x16", "8x8"),
            {"budgets": ("300",)},
            "budget '300' is more than the dense layer's 256",
        ),
        (("16x16", "8x8"), {"min_rank": 17}, "min_rank 17: a 16x16 layer"),
    ],
)
def test_requests_that_are_not_allowed(sizes: tuple, options: dict, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        SearchRequest(sizes, **options)


def test_a_request_survives_json() -> None:
    request = SearchRequest(SIZES, budgets=("25%", "1k"), trials=9, device="cpu", batch=4)
    assert SearchRequest.from_json(json.loads(json.dumps(request.to_json()))) == request
    assert SearchRequest(["8x8", "8x8"]).sizes == SearchRequest(["8x8"]).sizes


def test_the_default_folder_says_what_is_in_it() -> None:
    request = SearchRequest(SIZES, batch=4, device="cuda:0")
    name = "ksopt-report-32x64-64x32-cuda0-float32-batch_first-4"
    assert str(_default_folder(request)) == name
    many = SearchRequest([f"{n}x{n}" for n in range(100, 140)], batch=4, device="cpu")
    assert len(str(_default_folder(many))) < 160


@given(st.integers(1, 400), st.lists(st.integers(1, 90), min_size=1, max_size=9))
def test_trials_are_shared_alike(trials: int, candidates: list[int]) -> None:
    trials = max(trials, len(candidates))
    parts = shared(trials, candidates)
    assert sum(parts) == min(trials, sum(candidates))
    assert all(1 <= part <= most for part, most in zip(parts, candidates, strict=True))
    # Nobody has less than another, but for a remainder, unless it has no more chains.
    for part, most in zip(parts, candidates, strict=True):
        assert part == most or part >= max(parts) - 1


@pytest.mark.slow
def test_other_objectives_hold_for_every_size(sizes: Sizes) -> None:
    result = sizes(train=True, objective="latency", min_speedup=1.5)
    assert [one.request.train for one in result.layers] == [True, True]
    for one in result.layers:
        assert stored(result.folder, str(one.request.size)).metric_names == ["latency_us"]
    assert "--train" in result.request.command
    assert "All times are of a training step" in (result.folder / "report.md").read_text("utf-8")
    with pytest.raises(InvalidInputError, match="train True there and False here"):
        sizes(objective="latency")
