"""results.json and its schema: every result fits it, and it leaves nothing out."""

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import optuna
import pytest
import torch
from safetensors.torch import save_file

from ksopt.cli.main import main
from ksopt.errors import InvalidInputError
from ksopt.search import SearchResult, objectives, replay
from ksopt.search.report import export
from ksopt.search.request import STUDY
from ksopt.search.study_store import FILE

Search = Callable[..., SearchResult]


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
    schema = copy.deepcopy(export.results_schema())
    for part in objects(schema):
        part["additionalProperties"] = False
    return schema


def check(result: SearchResult) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((result.folder / "results.json").read_text())
    validator = jsonschema.Draft202012Validator(strict())
    assert [error.message for error in validator.iter_errors(value)] == []
    return value


def test_the_schema_is_one() -> None:
    schema = export.results_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$id"] == export.SCHEMA == schema["properties"]["schema"]["const"]
    for part in objects(schema):
        # Every key is promised, but for one: a finalist of a recommendation has no ties of its own.
        assert set(part["properties"]) - set(part["required"]) <= {"within_noise_of"}


def test_a_result_fits(search: Search) -> None:
    value = check(search(trials=6, budgets=("1%", "30%", "50%")))
    assert value["recommendations"][0]["verdict"] == "no chain has so few weights"
    assert len(value["trials"]) == 6


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
    assert all(trial["score"] == trial["share_of_dense"] for trial in value["trials"])


def test_a_result_of_failures_and_one_that_was_stopped_fit(
    search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = check(search(trials=500, timeout_s=0.001))
    assert stopped["stopped"] == "timeout"
    assert stopped["drift"] is None

    def broken(*given: object, **options: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(objectives, "ks_linear", broken)
    failed = check(search(trials=2))
    assert [trial["state"] for trial in failed["trials"]] == ["failed"] * 2


def test_what_does_not_fit_is_seen(search: Search) -> None:
    value = check(search(trials=2))
    validator = jsonschema.Draft202012Validator(strict())
    for change in (
        {"schema": "ksopt.search/2"},
        {"sampler": "guess"},
        {"more": 1},
        {"trials": [{**value["trials"][0], "state": "odd"}]},
        {"finalists": [{**value["finalists"][0], "efficiency": None}]},
    ):
        assert list(validator.iter_errors({**value, **change})), change
    del value["device"]
    assert list(validator.iter_errors(value))


def kept(result: SearchResult) -> optuna.Study:
    return optuna.load_study(study_name=STUDY, storage=f"sqlite:///{result.folder / FILE}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": "ksopt.search/99"}, "written by a later ksopt, as ksopt.search/99; this one"),
        ({"space": None}, "cannot read its report (TypeError"),
        ({"request": {"dims": "8x8", "budgets": [], "colour": "red"}}, "cannot read its report"),
    ],
)
def test_a_study_that_cannot_be_read_is_refused(
    search: Search, change: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = search(trials=1)
    study = kept(result)
    study.set_user_attr("report", study.user_attrs["report"] | change)
    with pytest.raises(InvalidInputError) as refused:
        replay(str(result.folder))
    assert said in str(refused.value)
    assert main(["search", "--replay", str(result.folder)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
