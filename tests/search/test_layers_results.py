"""results.json of several sizes and its schema: every result fits it, and it leaves nothing out."""

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from referencing import Registry, Resource

from ksopt.search import (
    LayersRequest,
    LayersResult,
    ToMeasure,
    finals,
    layers_of_model,
    replay,
    run_layers,
    study_store,
    whole_model,
)
from ksopt.search.report import export, layers_export

from layer_models import inputs, tiny  # isort: skip
from test_whole_model import final_of  # isort: skip

PAGE = Path(__file__).parents[2] / "docs" / "search.md"
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


def validator() -> jsonschema.Draft202012Validator:
    """Without room for the keys of later versions."""
    strict = []
    for schema in (layers_export.results_schema(), export.results_schema()):
        schema = copy.deepcopy(schema)
        for part in objects(schema):
            part["additionalProperties"] = False
        strict.append(schema)
    own, of_one = strict
    registry = Registry().with_resource(of_one["$id"], Resource.from_contents(of_one))
    return jsonschema.Draft202012Validator(own, registry=registry)


def check(result: LayersResult) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((result.folder / "results.json").read_text())
    assert [error.message for error in validator().iter_errors(value)] == []
    return value


def test_the_schema_is_one() -> None:
    schema = layers_export.results_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$id"] == layers_export.SCHEMA == schema["properties"]["schema"]["const"]
    for part in objects(schema):
        assert set(part["properties"]) == set(part["required"])


def test_sizes_fit(quick: None, tmp_path: Path) -> None:
    request = LayersRequest.of(
        ("32x64", "7x13"), budgets=("40%",), trials=3, out=tmp_path, **OPTIONS
    )
    value = check(run_layers(request))
    assert value["unmet"].keys() == {"7x13"}
    again = replay(str(tmp_path), out=tmp_path / "again")
    assert isinstance(again, LayersResult)
    assert check(again)["replayed"] is True


@pytest.mark.slow
def test_a_model_fits(quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finals, "final", final_of(dense_us=1000.0, chain_us=300.0))
    monkeypatch.setattr(study_store, "dense_us", lambda _: 1000.0)
    monkeypatch.setattr(whole_model, "_SECONDS", 0.05)
    layers = layers_of_model(tiny(), exclude=["blocks.0.up"])
    request = LayersRequest.of(layers, trials=9, out=tmp_path, **OPTIONS)
    value = check(run_layers(request, to_measure=ToMeasure(tiny(), inputs())))
    assert value["whole"]["converted"] == 5
    assert value["plan"]["converted"] == 5


def test_a_model_that_was_not_measured_fits(quick: None, tmp_path: Path) -> None:
    layers = layers_of_model(torch.nn.Sequential(torch.nn.Linear(32, 64)))
    request = LayersRequest.of(layers, timeout_s=0.001, out=tmp_path, **OPTIONS)
    value = check(run_layers(request))
    assert value["stopped"] == "timeout"
    page = (tmp_path / "report.md").read_text("utf-8")
    assert "Keep the dense layers of the model: nothing was measured." in page
    assert value["plan"]["unmeasured"] == ["32x64"]
    assert value["plan"]["latency_over_dense"] is None


def test_a_model_of_which_no_chain_is_near_enough_says_so(quick: None, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 64))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    near = {"weights": str(tmp_path / "model.pt"), "max_error": 0.0}
    request = LayersRequest.of(
        layers_of_model(model), budgets=("50%",), trials=1, out=tmp_path / "out", **near, **OPTIONS
    )
    value = check(run_layers(request))
    (answer,) = value["sizes"][0]["recommendations"]
    assert answer["verdict"] == "keep the dense layer"
    page = (tmp_path / "out" / "report.md").read_text("utf-8")
    said = "no chain that was measured comes within a relative error of 0 of their weights."
    assert f"Keep the dense layers of the model: {said}" in page
    assert "nothing was measured" not in page


def test_the_page_names_every_key() -> None:
    page = PAGE.read_text(encoding="utf-8").split("`ksopt.layers/1`")[1]
    named = set(re.findall(r"`([a-z_0-9]+)`", page))
    keys = {key for part in objects(layers_export.results_schema()) for key in part["properties"]}
    assert keys - {"schema"} - named == set()
