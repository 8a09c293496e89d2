"""A metric is one entry: one registered from outside the package is measured and reported."""

import csv
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import jsonschema
import optuna
import pytest

from ksopt.errors import InvalidInputError
from ksopt.search import SearchResult, metrics, replay
from ksopt.search.metrics import METRICS, Metric
from ksopt.search.options import STUDY
from ksopt.search.report import results_json
from ksopt.search.study_store import FILE

Search = Callable[..., SearchResult]


@pytest.fixture
def widest() -> Iterator[Metric]:
    """The largest b of a chain, of which more is better."""
    metric = Metric(
        "widest_b",
        "widest b",
        "widest b, rows",
        measure=lambda timed: float(max(pattern.b for pattern in timed.chain)),
        shown="{:.0f} rows".format,
        direction="maximize",
        schema={"minimum": 1},
    )
    yield metrics.register(metric)
    del METRICS[metric.name]


def test_a_metric_of_ones_own_is_in_everything(
    search: Search, widest: Metric, tmp_path: Path
) -> None:
    result = search(trials=6)
    expected = [float(max(pattern.b for pattern in t.facts.chain)) for t in result.layers[0].trials]
    study = optuna.load_study(study_name=STUDY, storage=f"sqlite:///{result.folder / FILE}")
    assert study.metric_names == ["latency_us", "parameters", "widest_b"]
    assert study.directions[2] == optuna.study.StudyDirection.MAXIMIZE
    assert [trial.user_attrs["outcome"]["widest_b"] for trial in study.trials] == expected
    assert [trial.values[2] for trial in study.trials] == expected

    value = json.loads((result.folder / "results.json").read_text())
    (layer,) = value["layers"]
    assert [trial["widest_b"] for trial in layer["trials"]] == expected
    assert layer["front"]["metrics"] == ["latency_us", "parameters", "widest_b"]
    assert max(expected) in [
        result.layers[0].trials[n].values["widest_b"] for n in layer["front"]["trials"]
    ]
    jsonschema.validate(value, results_json.results_schema())
    assert "widest_b" in results_json.results_schema()["$defs"]["finalist"]["required"]
    rows = list(csv.DictReader(io.StringIO((result.folder / "trials.csv").read_text())))
    assert [float(row["widest_b"]) for row in rows] == expected

    # The best of it is a finalist, whatever its latency.
    assert max(expected) in [finalist.values["widest_b"] for finalist in result.layers[0].finalists]
    page = (result.folder / "report.md").read_text()
    assert page.count("| widest b |") == 4  # answer, front, finalists, trials
    assert f"{max(expected):.0f} rows" in page
    assert "latency, weights and widest b together" in page
    assert "Widest b against latency" in (result.folder / "report.html").read_text()

    again = replay(str(result.folder), out=tmp_path / "again")
    assert again.layers[0].trials == result.layers[0].trials


def test_a_study_keeps_its_metrics(search: Search, widest: Metric) -> None:
    search(trials=2)
    del METRICS[widest.name]
    with pytest.raises(InvalidInputError, match="metrics latency_us, parameters, widest_b there"):
        search(trials=3)
    metrics.register(widest)


def test_a_name_is_one_metrics(widest: Metric) -> None:
    with pytest.raises(InvalidInputError, match="metric 'widest_b': there is one of that name"):
        metrics.register(replace(widest, title="another"))
