"""Diagnostics of times, predictors, and rewritten reports."""

import io
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from ksopt.cli.main import main
from ksopt.errors import InvalidInputError
from ksopt.measure.timing import Measurement
from ksopt.patterns.chain import Chain
from ksopt.search import SearchResult, finals, replay
from ksopt.search.diagnostics import PREDICTORS, correlations, drift, within_noise_of
from ksopt.search.layer_request import LayerRequest
from ksopt.search.report import page, results_json, terminal
from ksopt.search.results import ChainFacts, Finalist, TrialRecord
from ksopt.search.worker_processes import SpareProcess

from one_layer import with_layer  # isort: skip

Search = Callable[..., SearchResult]
CHAIN = Chain.parse("(1,8,4,8)*(4,8,8,1)")


def steady(median_us: float) -> Measurement:
    return Measurement(median_us, 0.99 * median_us, 1.01 * median_us, 20)


def trial(number: int, rho: float, us: float, predicted: float | None = None) -> TrialRecord:
    facts = ChainFacts(CHAIN, CHAIN.nnz, 0.25, rho, rho, 1.0, predicted)
    state = "pruned" if number == 0 else "complete"
    return TrialRecord(
        number, state, facts, "TPE", steady(us), steady(10.0), 0.0, None, 1, device="cpu"
    )


def test_spearman_ranks_what_was_measured() -> None:
    times = [50.0, 4.0, 3.0, 2.0, 1.0]
    trials = [trial(i, float(i) ** 3 + 1, us, us * us) for i, us in enumerate(times)]
    actual = {one.predictor.key: one for one in correlations(trials)}
    assert actual["rho"].spearman == pytest.approx(-1)
    assert actual["predicted_us"].spearman == pytest.approx(1)
    assert actual["rho"].chains == 5  # the pruned one too
    assert "floor_us" not in actual  # all alike: no rank
    swapped = [*trials[:3], replace(trials[3], facts=trials[4].facts), trials[4]]
    # Ranks 1 2 3 4.5 4.5 against 5 4 3 2 1.
    known = {one.predictor.key: one for one in correlations(swapped)}
    assert known["rho"].spearman == pytest.approx(-0.9747, abs=1e-4)


def test_energy_is_ranked_where_it_was_measured() -> None:
    trials = [trial(i, float(i), 10.0 - i) for i in range(5)]
    assert all(one.energy_spearman is None for one in correlations(trials))
    used = [
        replace(one, values={"energy_mj": mj})
        for one, mj in zip(trials[1:], (5, 3, 2, 1), strict=True)
    ]
    actual = {one.predictor.key: one for one in correlations([trials[0], *used])}
    assert actual["d_rho"].energy_spearman == pytest.approx(-1)
    assert actual["d_rho"].chains == 5
    assert actual["d_rho"].spearman == pytest.approx(-1)
    few = {one.predictor.key: one for one in correlations([*trials[:3], *used[2:]])}
    assert few["d_rho"].energy_spearman is None


def test_no_correlation_of_two_chains_or_without_a_model() -> None:
    assert correlations([trial(1, 1.0, 2.0), trial(2, 2.0, 3.0)]) == ()
    three = [trial(i, float(i), 2.0 + i) for i in (1, 2, 3)]
    assert {one.predictor.key for one in correlations(three)} == {"rho", "d_rho"}
    assert correlations([]) == ()


def with_dense(result: SearchResult, first_us: float, last_us: float) -> SearchResult:
    trials = tuple(replace(t, dense=steady(first_us)) for t in result.layers[0].trials)
    finalists = tuple(replace(f, dense=steady(last_us)) for f in result.layers[0].finalists)
    return with_layer(result, trials=trials, finalists=finalists)


def test_a_drift_of_the_dense_layer_is_reported(search: Search) -> None:
    result = search(trials=3)
    moved = drift(with_dense(result, 100.0, 120.0).layers[0])
    assert moved is not None
    assert moved.beyond_noise
    assert moved.change == pytest.approx(0.2)
    drifted = with_dense(result, 100.0, 120.0)
    assert "it drifted by +20.0%, beyond its noise" in page.markdown(drifted)
    assert json.loads(results_json.to_json(drifted))["layers"][0]["drift"]["beyond_noise"] is True
    output = io.StringIO()
    terminal.print_result(drifted, output)
    assert "drifted by +20.0%" in output.getvalue()
    still = drift(with_dense(result, 100.0, 100.5).layers[0])
    assert still is not None
    assert not still.beyond_noise
    assert "+0.5%, which their own spread explains" in page.markdown(
        with_dense(result, 100.0, 100.5)
    )


def test_a_run_that_measured_nothing_has_no_drift(search: Search) -> None:
    search(trials=3)
    again = search(trials=3)
    assert again.layers[0].run == 2
    assert drift(again.layers[0]) is None
    assert json.loads(results_json.to_json(again))["layers"][0]["drift"] is None


def test_finalists_within_noise_say_so(search: Search) -> None:
    facts = trial(1, 1.0, 1.0).facts
    finalists = [
        Finalist(facts, steady(us), steady(20.0), number, "TPE", retimed=True)
        for number, us in enumerate((10.0, 10.02, 15.0))
    ]
    assert [within_noise_of(one, finalists) for one in finalists] == [[1], [0], []]
    apart = [replace(one, retimed=False) for one in finalists]
    assert [within_noise_of(one, apart) for one in apart] == [[], [], []]
    result = json.loads(results_json.to_json(search(trials=4)))
    for one in result["layers"][0]["finalists"]:
        assert one["chain"] not in one["within_noise_of"]


def test_the_report_shows_predictions(search: Search) -> None:
    result = search(trials=6)
    text = page.markdown(result)
    assert "## Measured against predicted" in text
    assert "cost model is for GPUs" in text.replace("\n", " ")
    actual = json.loads(results_json.to_json(result))["layers"][0]["correlations"]
    assert {one["with"] for one in actual} <= {predictor.key for predictor in PREDICTORS}
    assert all(-1 <= one["spearman"] <= 1 for one in actual)
    assert "Measured latency against rho of 6 chains" in page.html(result)


def test_a_report_is_written_again(search: Search, tmp_path: Path) -> None:
    result = search(trials=4, budgets=("1%", "50%"))
    before = json.loads(results_json.to_json(result))
    again = replay(str(result.folder), out=tmp_path / "again")
    after = json.loads((tmp_path / "again" / "results.json").read_text(encoding="utf-8"))
    assert again.replayed
    changed = {key for key in before if before[key] != after[key]}
    assert changed == {"replayed", "folder"}
    text = (tmp_path / "again" / "report.md").read_text(encoding="utf-8")
    assert f"measured on {result.layers[0].device.name}" in text
    assert (tmp_path / "again" / "report.html").exists()
    assert (tmp_path / "again" / "plan.json").exists()


def test_what_a_killed_search_left_can_be_reported(
    search: Search, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def killed(*arguments: object) -> None:
        raise SystemExit

    with monkeypatch.context() as patched:
        patched.setattr(finals, "final", killed)
        with pytest.raises(SystemExit):
            search(trials=3)
    url = f"sqlite:///{tmp_path / 'report' / 'study.db'}"
    actual = replay(url, out=tmp_path / "again")
    assert actual.stopped == "interrupted"
    assert len(actual.layers[0].trials) == 3
    assert not any(finalist.retimed for finalist in actual.layers[0].finalists)


def test_a_replayed_study_stays_as_it_is(search: Search, tmp_path: Path) -> None:
    """Optuna would write its own version into a study of which that row is gone."""
    result = search(trials=2)
    file = result.folder / "study.db"
    with closing(sqlite3.connect(file)) as study, study:
        study.execute("DELETE FROM version_info")
    before = file.read_bytes()
    replay(str(result.folder), out=tmp_path / "again")
    assert file.read_bytes() == before


@pytest.mark.parametrize("where", ["no/such/folder", "sqlite:////no/such/file.db", "."])
def test_nothing_to_replay(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInputError):
        replay(where)


def test_the_command_replays(
    search: Search, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    result = search(trials=2)
    out = str(tmp_path / "again")
    assert main(["search", "--replay", str(result.folder), "--out", out, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["replayed"] is True
    assert main(["search", "--replay", str(result.folder), "--trials", "3"]) == 2
    assert "does not take --trials" in capsys.readouterr().err
    assert main(["search", "--replay", "no/such"]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    assert main(["search"]) == 2
    assert "--dims INxOUT, or --model" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("brief")
def test_the_final_is_timed_in_another_process(tmp_path: Path) -> None:
    import torch

    request = LayerRequest("32x64", batch=16, device="cpu", out=tmp_path)
    with SpareProcess() as spare:
        actual = finals.final(request, torch.device("cpu"), [CHAIN], spare)
    assert set(actual) == {str(CHAIN), "dense"}
    assert all(one.repeats >= 3 for one in actual.values())
