"""Objectives besides the latency of a product: training, error, the user's own."""

import csv
import io
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from safetensors.torch import save_file

from ksopt import ops
from ksopt.cli.main import main
from ksopt.errors import InvalidInputError
from ksopt.search import SearchRequest, SearchResult, objectives, replay
from ksopt.search.metrics import WEIGHT_ERROR
from ksopt.search.options import STUDY
from ksopt.search.report import page
from ksopt.search.report.plots import metric_plot
from ksopt.search.timed_call import training_step
from ksopt.search.user_score import Score, Scored, ScoreError

Search = Callable[..., SearchResult]


def read(result: SearchResult) -> dict[str, Any]:
    actual: dict[str, Any] = json.loads((result.folder / "results.json").read_text())
    return actual


def study_of(result: SearchResult) -> optuna.Study:
    return optuna.load_study(study_name=STUDY, storage=f"sqlite:///{result.folder / 'study.db'}")


# Training.


def test_a_training_step_is_the_gradients_of_everything() -> None:
    x, w, g = torch.randn(5, 4), torch.randn(3, 4), torch.randn(5, 3)
    by_input, by_weight = training_step(lambda w: lambda x: x @ w[0].T, x, [w], g)()
    torch.testing.assert_close(by_input, g @ w)
    torch.testing.assert_close(by_weight, g.T @ x)
    assert not x.requires_grad


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["batch_first", "batch_last"])
def test_training_is_timed_and_reported(
    search: Search, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    created: list[int] = []
    right = training_step

    def counted(*arguments: Any) -> Any:
        created.append(len(arguments[2]))
        return right(*arguments)

    monkeypatch.setattr(objectives.timed_call, "training_step", counted)
    result = search(train=True, trials=3, layout=layout)
    assert [trial.state for trial in result.layers[0].trials] == ["complete"] * 3
    assert created.count(1) >= 4  # the dense layer's, of every trial and of the final
    assert read(result)["request"]["train"] is True
    assert "--train" in result.request.command
    text = page.markdown(result)
    assert "All times are of a training step" in text
    forward = search(trials=3, layout=layout, out=result.folder.parent / "forward")
    floors = {trial.facts.chain: trial.facts.floor_us for trial in forward.layers[0].trials}
    bandwidths = forward.layers[0].roofline.bandwidth / result.layers[0].roofline.bandwidth
    for trial in result.layers[0].trials:
        if trial.facts.chain in floors:
            ratio = trial.facts.floor_us / floors[trial.facts.chain]
            # Three times, at this run's ceilings, of which one or the other counts.
            rates = forward.layers[0].roofline.rate / result.layers[0].roofline.rate
            bounds = sorted((bandwidths, rates))
            assert 3 * bounds[0] * 0.999 <= ratio <= 3 * bounds[1] * 1.001


def test_training_and_products_are_not_mixed(search: Search) -> None:
    search(trials=1)
    with pytest.raises(InvalidInputError, match="train False there and True here"):
        search(trials=2, train=True)


def test_a_wrong_gradient_gets_no_time(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
            return y.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            return 1.01 * gradients[0]

    right = ops.chain
    monkeypatch.setattr(ops, "chain", lambda *a, **o: Wrong.apply(right(*a, **o)))
    assert [trial.state for trial in search(trials=2).layers[0].trials] == ["complete"] * 2
    result = search(trials=2, train=True, out=search(trials=1).folder.parent / "train")
    for trial in result.layers[0].trials:
        assert trial.state == "failed"
        assert "input gradient's relative error" in (trial.reason or "")


# Error to trained weights.


@pytest.fixture
def weights(tmp_path: Path) -> str:
    torch.manual_seed(0)
    save_file({"w": torch.randn(64, 32)}, tmp_path / "w.safetensors")
    return f"{tmp_path / 'w.safetensors'}:w"


def test_error_is_an_objective(search: Search, weights: str) -> None:
    result = search(weights=weights, objective="pareto-error", trials=5)
    study = study_of(result)
    assert study.metric_names == ["latency_us", "weight_error"]
    for trial, known in zip(study.trials, result.layers[0].trials, strict=True):
        assert trial.values[1] == known.values["weight_error"]
    nearest = min(result.layers[0].trials, key=lambda trial: trial.values["weight_error"] or 1.0)
    assert nearest.facts.chain in [finalist.facts.chain for finalist in result.layers[0].finalists]
    with pytest.raises(InvalidInputError, match="objective 'pareto-error' needs weights"):
        SearchRequest("32x64", objective="pareto-error")


@pytest.mark.slow
def test_the_error_is_drawn(search: Search, weights: str) -> None:
    result = search(weights=weights, trials=5)
    drawn = metric_plot(result.layers[0], WEIGHT_ERROR, 800, 340)
    assert drawn.count('class="point"') == 5
    assert drawn.count('class="chosen"') == drawn.count('class="front"') == 1
    assert "Weight error against weights" in page.html(result)
    plain = search(trials=3, out=result.folder.parent / "plain")
    assert metric_plot(plain.layers[0], WEIGHT_ERROR, 800, 340) == ""
    assert "Weight error against weights" not in page.html(plain)


# A user's own function.


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module of a user's, scores."""
    module = types.ModuleType("scores")
    module.__spec__ = types.SimpleNamespace(origin="scores.py")  # type: ignore[assignment]
    seen: list[Scored] = []

    def odd(scored: Scored) -> float:
        seen.append(scored)
        return float(scored.parameters % 1000)

    def broken(scored: Scored) -> float:
        raise ValueError("no such thing")

    module.odd, module.broken, module.seen = odd, broken, seen  # type: ignore[attr-defined]

    def leaving(scored: Scored) -> float:
        raise SystemExit(0)

    def printing(scored: Scored) -> float:
        print("scoring", scored.chain)
        return 1.0

    module.leaving, module.printing = leaving, printing  # type: ignore[attr-defined]
    module.text = lambda scored: "many"  # type: ignore[attr-defined]
    module.nan = lambda scored: float("nan")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "scores", module)
    return module


def test_a_users_function_is_an_objective(search: Search, scores: types.ModuleType) -> None:
    result = search(score="scores:odd", trials=5)
    assert study_of(result).metric_names == ["latency_us", "parameters", "score"]
    for trial, seen in zip(result.layers[0].trials, scores.seen, strict=True):
        assert trial.values["score"] == trial.facts.nnz % 1000
        assert (seen.chain, seen.parameters, seen.rho) == (
            trial.facts.chain,
            trial.facts.nnz,
            trial.facts.rho,
        )
        assert trial.latency is not None
        assert seen.latency_us == trial.latency.median_us
        with pytest.raises(AttributeError):
            seen.parameters = 0
    best = min(result.layers[0].trials, key=lambda trial: trial.values["score"] or 0.0)
    assert best.facts.chain in [finalist.facts.chain for finalist in result.layers[0].finalists]
    assert [trial["score"] for trial in read(result)["layers"][0]["trials"]] == [
        t.values["score"] for t in result.layers[0].trials
    ]
    rows = list(csv.DictReader(io.StringIO((result.folder / "trials.csv").read_text())))
    assert float(rows[0]["score"]) == result.layers[0].trials[0].values["score"]
    assert "| score |" in page.markdown(result)
    again = replay(str(result.folder), out=result.folder / "again")
    assert [finalist.values["score"] for finalist in again.layers[0].finalists] == [
        f.values["score"] for f in result.layers[0].finalists
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", "ScoreError: scores:broken raised ValueError: no such thing"),
        ("leaving", "ScoreError: scores:leaving raised SystemExit"),
        ("text", "ScoreError: scores:text raised ValueError"),
        ("nan", "ScoreError: scores:nan returned nan: a score must be a finite number"),
    ],
)
def test_a_function_that_fails_fails_its_trial(
    search: Search, scores: types.ModuleType, name: str, message: str
) -> None:
    result = search(score=f"scores:{name}", trials=1)
    assert result.layers[0].trials[0].state == "failed"
    assert (result.layers[0].trials[0].reason or "").startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "--score 'nothing': write MODULE:FUNCTION, such as mine:cost for"),
        ("scores:odd:", "write MODULE:FUNCTION"),
        ("no_such_module:f", "--score no_such_module:f: there is no module no_such_module"),
        ("scores:missing", "--score scores:missing: scores has no function missing"),
        ("scores:seen", "scores has no function seen"),
    ],
)
@pytest.mark.parametrize("sizes", [("16x16",), ("16x16", "16x32")], ids=["one size", "several"])
def test_a_function_that_is_not_there_is_refused_before_anything_is_done(
    scores: types.ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    sizes: tuple[str, ...],
    text: str,
    message: str,
) -> None:
    out = tmp_path / "out"
    words = ("search", "--dims", *sizes, "--device", "cpu", "--out", str(out))
    assert main((*words, "--score", text)) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert "listing the chains" not in printed
    assert not out.exists()


def test_what_a_function_prints_is_no_part_of_the_result(
    search: Search, scores: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    search(score="scores:printing", trials=1)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "scoring (" in printed.err


def test_a_score_says_what_raised() -> None:
    score = Score("mine:cost", lambda scored: 1 / 0)
    with pytest.raises(ScoreError, match=r"mine:cost raised ZeroDivisionError: division by zero"):
        score(None)  # type: ignore[arg-type]
