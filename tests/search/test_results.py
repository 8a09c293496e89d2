"""results.json and its schema: every result fits it, and it leaves nothing out."""

import copy
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import optuna
import pytest
import torch
from safetensors.torch import save_file

from ksopt import ops
from ksopt.cli.main import main
from ksopt.errors import InvalidInputError
from ksopt.search import (
    SearchRequest,
    SearchResult,
    ToMeasure,
    finals,
    layers_of_model,
    replay,
    run_search,
    trial_records,
    whole_model,
)
from ksopt.search.options import STUDY
from ksopt.search.report import results_json
from ksopt.search.study_store import FILE

from layer_models import inputs, tiny  # isort: skip
from test_whole_model import final_of  # isort: skip

Search = Callable[..., SearchResult]
PAGE = Path(__file__).parents[2] / "docs" / "searching.md"
OPTIONS: dict[str, Any] = {"batch": 16, "device": "cpu"}


def objects(part: Any) -> Iterator[dict[str, Any]]:
    """Every part of a schema that describes an object's keys."""
    if isinstance(part, dict):
        if "properties" in part:
            yield part
        for value in part.values():
            yield from objects(value)
    elif isinstance(part, list):
        for value in part:
            yield from objects(value)


def strict() -> dict[str, Any]:
    """The schema, without room for the keys of later versions."""
    schema = copy.deepcopy(results_json.results_schema())
    for part in objects(schema):
        part["additionalProperties"] = False
    return schema


def check(result: SearchResult) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((result.folder / "results.json").read_text())
    validator = jsonschema.Draft202012Validator(strict())
    assert [error.message for error in validator.iter_errors(value)] == []
    return value


def test_the_schema_is_one() -> None:
    schema = results_json.results_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$id"] == results_json.SCHEMA == schema["properties"]["schema"]["const"]
    for part in objects(schema):
        # Every key is promised, but for one: a finalist of a recommendation has no ties of its own.
        assert set(part["properties"]) - set(part["required"]) <= {"within_noise_of"}


def test_a_result_fits(search: Search) -> None:
    value = check(search(trials=6, budgets=("1%", "30%", "50%")))
    (layer,) = value["layers"]
    assert layer["recommendations"][0]["verdict"] == "no chain has so few weights"
    assert len(layer["trials"]) == 6


@pytest.mark.slow
def test_a_result_with_everything_fits(
    search: Search, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"w": torch.randn(64, 32)}, tmp_path / "w.safetensors")
    (tmp_path / "mine_of_schema.py").write_text("def cost(scored):\n    return scored.share\n")
    monkeypatch.chdir(tmp_path)
    value = check(
        search(
            trials=4,
            weights="w.safetensors:w",
            objective="pareto-error",
            max_error=2.0,
            min_speedup=1.5,
            max_params="40%",
            score="mine_of_schema:cost",
            train=True,
            timeout_s=600.0,
            storage=f"sqlite:///{tmp_path / 'own.db'}",
        )
    )
    assert value["request"]["score"] == "mine_of_schema:cost"
    assert all(trial["score"] == trial["share_of_dense"] for trial in value["layers"][0]["trials"])


def test_a_result_of_failures_and_one_that_was_stopped_fit(
    search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = check(search(trials=500, timeout_s=0.001))
    assert stopped["stopped"] == "timeout"
    assert stopped["layers"][0]["drift"] is None

    def broken(*arguments: object, **options: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(ops, "chain", broken)
    failed = check(search(trials=2))
    assert [trial["state"] for trial in failed["layers"][0]["trials"]] == ["failed"] * 2


def test_what_does_not_fit_is_seen(search: Search) -> None:
    value = check(search(trials=2))
    (layer,) = value["layers"]
    validator = jsonschema.Draft202012Validator(strict())
    for change in (
        {"sampler": "guess"},
        {"more": 1},
        {"trials": [{**layer["trials"][0], "state": "odd"}]},
        {"finalists": [{**layer["finalists"][0], "efficiency": None}]},
    ):
        assert list(validator.iter_errors({**value, "layers": [{**layer, **change}]})), change
    for change in ({"schema": "ksopt.search/2"}, {"more": 1}, {"layers": []}):
        assert list(validator.iter_errors({**value, **change})), change
    del value["request"]["device"]
    assert list(validator.iter_errors(value))


def test_sizes_fit(quick: None, tmp_path: Path) -> None:
    request = SearchRequest(("32x64", "7x13"), budgets=("40%",), trials=3, out=tmp_path, **OPTIONS)
    value = check(run_search(request))
    assert value["unmet"].keys() == {"7x13"}
    again = replay(str(tmp_path), out=tmp_path / "again")
    assert check(again)["replayed"] is True


@pytest.mark.slow
def test_a_model_fits(quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finals, "final", final_of(dense_us=1000.0, chain_us=300.0))
    monkeypatch.setattr(trial_records, "dense_us", lambda _: 1000.0)
    monkeypatch.setattr(whole_model, "_SECONDS", 0.05)
    layers = layers_of_model(tiny(), exclude=["blocks.0.up"])
    request = SearchRequest(layers, trials=9, out=tmp_path, **OPTIONS)
    value = check(run_search(request, to_measure=ToMeasure(tiny(), inputs())))
    assert value["whole"]["converted"] == 5
    assert value["plan"]["converted"] == 5


def test_a_model_that_was_not_measured_fits(quick: None, tmp_path: Path) -> None:
    layers = layers_of_model(torch.nn.Sequential(torch.nn.Linear(32, 64)))
    request = SearchRequest(layers, timeout_s=0.001, out=tmp_path, **OPTIONS)
    value = check(run_search(request))
    assert value["stopped"] == "timeout"
    page = (tmp_path / "report.md").read_text("utf-8")
    assert "Keep the dense layers of the model: nothing was measured." in page
    assert value["plan"]["unmeasured"] == ["32x64"]
    assert value["plan"]["latency_over_dense"] is None


def test_a_model_of_which_no_chain_is_near_enough_says_so(quick: None, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 64))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    near = {"weights": str(tmp_path / "model.pt"), "max_error": 0.0}
    request = SearchRequest(
        layers_of_model(model), budgets=("50%",), trials=1, out=tmp_path / "out", **near, **OPTIONS
    )
    value = check(run_search(request))
    (answer,) = value["layers"][0]["recommendations"]
    assert answer["verdict"] == "keep the dense layer"
    page = (tmp_path / "out" / "report.md").read_text("utf-8")
    message = "no measured chain is within a weight error of 0."
    assert f"Keep the dense layers of the model: {message}" in page
    assert "nothing was measured" not in page


def saved_study(result: SearchResult) -> optuna.Study:
    return optuna.load_study(study_name=STUDY, storage=f"sqlite:///{result.folder / FILE}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "ksopt.search/99"}, "written by a later ksopt, as ksopt.search/99; this one"),
        ({"space": None}, "cannot read its report (TypeError"),
        ({"request": {"dims": "8x8", "budgets": [], "colour": "red"}}, "cannot read its report"),
    ],
)
def test_a_study_that_cannot_be_read_is_refused(
    search: Search, change: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = search(trials=1)
    study = saved_study(result)
    study.set_user_attr("report", study.user_attrs["report"] | change)
    with pytest.raises(InvalidInputError) as refused:
        replay(str(result.folder))
    assert message in str(refused.value)
    assert main(["search", "--replay", str(result.folder)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_the_page_names_every_key() -> None:
    """But for the roofline's and the device's, which are records of `ksopt.measure`."""
    page = PAGE.read_text(encoding="utf-8").split("## results.json")[1]
    named = set(re.findall(r"[`.]([a-z_0-9]+)`", page))
    schema = results_json.results_schema()
    del schema["$defs"]["device"], schema["$defs"]["layer"]["properties"]["roofline"]["properties"]
    keys = {key for part in objects(schema) for key in part["properties"]}
    assert keys - named == set()
