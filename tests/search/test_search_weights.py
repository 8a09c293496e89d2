"""A search for a trained layer: the error of its weights is reported, and may be limited."""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ksopt
from ksopt import Chain, InvalidInputError
from ksopt.cli import main
from ksopt.projection.products import product
from ksopt.search import SearchRequest, SearchResult
from ksopt.search.given import GivenWeights
from ksopt.search.request import Dims
from ksopt.search.result import Verdict

Search = Callable[..., SearchResult]
CHAIN = Chain.parse("(1,8,4,8)*(4,8,8,1)")  # 32 inputs, 64 outputs


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A file with a product of CHAIN, another tensor of its shape, and one of another."""
    torch.manual_seed(0)
    exact = product([torch.randn(p.weight_shape) for p in CHAIN])
    path = tmp_path / "w.safetensors"
    save_file({"up": exact, "other": torch.randn(64, 32), "down": torch.randn(32, 64)}, path)
    return path


def test_each_trial_has_its_error(search: Search, weights: Path) -> None:
    result = search(weights=f"{weights}:up", trials=5)
    given = GivenWeights.of(result.request, torch.device("cpu"))
    assert given is not None
    for trial in result.trials:
        found = ksopt.project(given.matrix, trial.facts.chain, iterations=4).relative_error
        assert trial.weight_error == pytest.approx(found, rel=1e-6)
        # What a conversion then makes of it is no worse.
        nearest = ksopt.project(given.matrix, trial.facts.chain).relative_error
        assert nearest <= trial.weight_error * (1 + 1e-9)
    found = json.loads((result.folder / "results.json").read_text())
    assert [t["weight_error"] for t in found["trials"]] == [t.weight_error for t in result.trials]
    assert found["request"]["weights"] == f"{weights}:up"
    rows = list(csv.DictReader(io.StringIO((result.folder / "trials.csv").read_text())))
    assert float(rows[0]["weight_error"]) == result.trials[0].weight_error
    text = (result.folder / "report.md").read_text()
    assert "weight error" in text
    chosen = result.recommendations[0].chosen
    assert f"relative error of {chosen.weight_error:.3f}" in result.recommendations[0].sentence


def test_only_chains_near_enough_are_recommended(search: Search, weights: Path) -> None:
    again = {"budgets": ("25%",), "max_factors": 2, "min_use": 1.0, "trials": 9}
    again |= {"weights": f"{weights}:up"}
    free = search(**again)
    errors = sorted(trial.weight_error for trial in free.trials)
    assert errors[0] < 1e-5  # the chain itself is in the space, and all of it was measured
    assert CHAIN in [trial.facts.chain for trial in free.trials]
    near = search(max_error=1e-4, **again)  # the same study: nothing is measured anew
    (answer,) = near.recommendations
    assert len(near.trials) == len(free.trials)
    assert len(near.finalists) < len(free.trials)
    assert all(finalist.weight_error <= 1e-4 for finalist in near.finalists)
    assert answer.chosen.facts.chain == CHAIN
    none = search(max_error=0.0, **again)
    assert none.recommendations[0].verdict is Verdict.UNKNOWN
    assert "within a relative error of 0 of the given weights" in none.recommendations[0].sentence
    with pytest.raises(InvalidInputError, match=r"weights .* there and .* here"):
        search(**{**again, "weights": f"{weights}:other"})


def test_the_tensor_is_found_by_shape_where_that_is_enough(weights: Path) -> None:
    def of(text: str, dims: str) -> GivenWeights | None:
        request = SearchRequest(Dims.parse(dims), weights=text)
        return GivenWeights.of(request, torch.device("cpu"))

    assert of(str(weights), "64x32").matrix.shape == (32, 64)
    assert of(f"{weights}:up", "32x64").digest != of(f"{weights}:other", "32x64").digest
    assert GivenWeights.of(SearchRequest("32x64"), torch.device("cpu")) is None
    for text, dims, message in [
        (str(weights), "32x64", "name the tensor, as in .*; of shape .* are"),
        (str(weights), "8x8", r"none of its tensors has shape \[8, 8\]"),
        (f"{weights}:none", "32x64", "there is no tensor 'none' in it"),
        (f"{weights}:down", "32x64", r"down has shape \[32, 64\], but a layer of in_features=32"),
        ("none.safetensors", "32x64", "there is no file none.safetensors"),
    ]:
        with pytest.raises(InvalidInputError, match=message):
            of(text, dims)


def test_weights_that_are_not_finite_are_refused(search: Search, tmp_path: Path) -> None:
    path = tmp_path / "broken.safetensors"
    save_file({"up": torch.full((64, 32), float("nan"))}, path)
    with pytest.raises(InvalidInputError, match=r"broken\.safetensors: up has values that are not"):
        search(weights=str(path))


def test_max_error_needs_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "--dims", "32x64", "--max-error", "0.1"]) == 2
    assert "needs weights" in capsys.readouterr().err
    with pytest.raises(InvalidInputError, match=r"max_error 0\.1 needs weights"):
        SearchRequest("32x64", max_error=0.1)
    with pytest.raises(InvalidInputError, match=r"max_error -1: give a number from 0"):
        SearchRequest("32x64", max_error=-1, weights="w.safetensors")
    request = SearchRequest("32x64", weights="my w.safetensors:up", max_error=0.25)
    assert "--weights 'my w.safetensors:up' --max-error 0.25" in request.command
