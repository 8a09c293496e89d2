"""What a search leaves behind: report.html, report.md, results.json, plan.json, trials.csv.

results.json has the schema that `results_schema` returns, described in docs/search.md: keys are
added in later versions, and never removed or given another meaning under the same number. Files are
written whole or not at all.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from importlib import resources
from pathlib import Path
from typing import Any, TextIO

from ksopt.errors import InvalidInputError
from ksopt.measure.timing import Measurement
from ksopt.report import tables
from ksopt.search import diagnostics, metrics, recommend, suspect_dense
from ksopt.search.report import phrases, result_tables
from ksopt.search.request import Dims, without_password
from ksopt.search.results import (
    SCHEMA,
    ChainFacts,
    Finalist,
    Recommendation,
    SearchResult,
    TrialRecord,
)
from ksopt.system.atomic_files import write_whole


def write(result: SearchResult, folder: Path) -> None:
    """Write the five files into the folder.

    Raises:
        InvalidInputError: The folder cannot be written.
    """
    from ksopt.search.plan import plan
    from ksopt.search.report import page

    texts = {
        "results.json": to_json(result),
        "plan.json": plan(result).to_json(),
        "trials.csv": to_csv(result),
        "report.md": page.markdown(result),
        "report.html": page.html(result),
    }
    put(folder, texts)


def put(folder: Path, texts: Mapping[str, str]) -> None:
    """Write a report's files, given by name.

    Raises:
        InvalidInputError: The folder cannot be written.
    """
    try:
        for name, text in texts.items():
            write_whole(folder / name, text)
    except OSError as error:
        raise InvalidInputError(
            f"the report cannot be written to {folder} ({error.strerror}): what was measured is "
            "kept, run the search again to write the report"
        ) from None


def schema_of(package: str, version: str, name: str) -> dict[str, Any]:
    """The JSON schema that a package has for a document.

    Args:
        package: Its import path.
        version: Of the document, such as "ksopt.search/3".
        name: The document's.
    """
    file = f"{name}-{version.rpartition('/')[2]}.schema.json"
    schema: dict[str, Any] = json.loads((resources.files(package) / file).read_text("utf-8"))
    return schema


def results_schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of results.json.

    Example:
        >>> results_schema()["title"]
        'results.json of ksopt search, version 3'
    """
    schema = schema_of("ksopt.search", SCHEMA, "results")
    properties = schema["properties"]
    properties["front"]["properties"]["metrics"]["items"]["enum"] = list(metrics.METRICS)
    for metric in metrics.stored():
        of_dense = [f"dense_{metric.name}"] if metric.final is not None else []
        for part, names in (
            (schema["$defs"]["finalist"], [metric.name, *of_dense]),
            (properties["trials"]["items"], [metric.name]),
        ):
            part["required"] += names
            for name in names:
                part["properties"][name] = {"type": ["number", "null"], **metric.schema}
    return schema


def to_json(result: SearchResult) -> str:
    """The result as JSON; what results.json holds."""
    return dumped(to_value(result))


def dumped(value: dict[str, Any]) -> str:
    """A document's text."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def to_value(result: SearchResult) -> dict[str, Any]:
    """What results.json holds, as plain values."""
    request = result.request
    return {
        "schema": SCHEMA,
        "in_features": request.size.in_features,
        "out_features": request.size.out_features,
        "dense_parameters": request.size.dense_parameters,
        "request": {
            "command": request.command,
            "dims": str(request.size),
            "budgets": [asdict(step) for step in request.steps],
            "batch": request.batch,
            "dtype": request.dtype,
            "layout": request.layout,
            "device": request.device,
            "max_factors": request.max_factors,
            "min_rank": request.rank,
            "min_use": request.min_use,
            "families": list(request.families),
            "block_sizes": request.block_sizes,
            "chainable": request.chainable,
            "aligned": request.aligned,
            "trials": request.trials,
            "timeout_s": request.timeout_s,
            "seed": request.seed,
            "weights": request.weights,
            "max_error": request.max_error,
            "max_params": request.max_params,
            "min_speedup": request.min_speedup,
            "objective": request.objective,
            "train": request.train,
            "score": request.score,
            "energy": request.energy,
            "storage": None if request.storage is None else without_password(request.storage),
            "study": request.study,
            "workers": request.workers,
        },
        "recommendations": [_answer(answer) for answer in result.recommendations],
        "finalists": [
            _finalist(finalist)
            | {
                "within_noise_of": [
                    str(result.finalists[place].facts.chain)
                    for place in diagnostics.within_noise_of(finalist, result.finalists)
                ]
            }
            for finalist in result.finalists
        ],
        "correlations": [
            {
                "with": one.predictor.key,
                "spearman": one.spearman,
                "chains": one.chains,
                "energy_spearman": one.energy_spearman,
            }
            for one in diagnostics.correlations(result.trials)
        ],
        "drift": _drift(diagnostics.drift(result)),
        "dense_layer": _dense_layer(suspect_dense.dense_layer(result)),
        "trials": [_trial(trial) for trial in result.trials],
        "front": {
            "metrics": [metric.name for metric in metrics.objectives(request)],
            "trials": [trial.number for trial in recommend.front_of(result.trials, request)],
        },
        "space": asdict(result.space),
        "sampler": result.sampler,
        "run": result.run,
        "replayed": result.replayed,
        "stopped": result.stopped,
        "seconds": result.seconds,
        "final_seconds": result.final_seconds,
        "roofline": asdict(result.roofline),
        "device": asdict(result.device),
        "runs": [asdict(run) for run in result.runs],
        "folder": str(result.folder.resolve()),
    }


def to_csv(result: SearchResult) -> str:
    """One row a trial; what trials.csv holds."""
    return csv_of(result.trials)


def csv_of(trials: Iterable[TrialRecord]) -> str:
    """One row a trial, also of several layer sizes."""
    text = io.StringIO()
    writer = csv.DictWriter(
        text, fieldnames=_csv_columns(), extrasaction="ignore", lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(_csv_row(trial) for trial in trials)
    return text.getvalue()


def print_result(result: SearchResult, stream: TextIO) -> None:
    """Write the answer to a terminal or a pipe: sentences, a table, where the report is."""
    for answer in result.recommendations:
        print(answer.sentence, file=stream)
    if result.stopped == "interrupted":
        print("The search was interrupted: these are the chains measured so far.", file=stream)
    if result.request.train:
        print(phrases.TRAINING, file=stream)
    if result.replayed:
        print(phrases.replayed(result), file=stream)
    for warning in warnings(result):
        print(warning, file=stream)
    if result.stopped == "timeout":
        print("The time was up before all trials were measured.", file=stream)
    print(file=stream)
    tables.write(result_tables.answers_table(result), stream)
    print(f"\nreport: {result.folder.resolve() / 'report.html'}", file=stream)


def warnings(result: SearchResult) -> list[str]:
    """What makes the times less certain than they look, in a sentence each."""
    dense, drift = suspect_dense.dense_layer(result), diagnostics.drift(result)
    sentences = [] if dense is None or not dense.warning else [dense.warning]
    failures = diagnostics.failures(result)
    sentences += [failures] if failures else []
    return [*sentences, drift.sentence] if drift is not None and drift.beyond_noise else sentences


def _facts(known: ChainFacts) -> dict[str, Any]:
    return {
        "chain": str(known.chain),
        "patterns": [list(pattern.weight_shape) for pattern in known.chain],
        "parameters": known.nnz,
        "share_of_dense": known.share,
        "rho": known.rho,
        "d_rho": known.d_rho,
        "floor_us": known.floor_us,
        "predicted_us": known.predicted_us,
    }


def _values(of: Finalist | TrialRecord) -> dict[str, float | None]:
    return {metric.name: of.values.get(metric.name) for metric in metrics.stored()}


def _timing(measurement: Measurement | None) -> dict[str, Any] | None:
    return None if measurement is None else {**asdict(measurement), "noise": measurement.noise}


def _finalist(finalist: Finalist) -> dict[str, Any]:
    return {
        **_facts(finalist.facts),
        "latency": _timing(finalist.latency),
        "dense": _timing(finalist.dense),
        "latency_over_dense": finalist.ratio,
        "against_dense": finalist.versus_dense.value,
        "efficiency": finalist.efficiency,
        "trial": finalist.trial,
        "origin": finalist.origin,
        "retimed": finalist.retimed,
        **_values(finalist),
        **{
            f"dense_{metric.name}": finalist.dense_values.get(metric.name)
            for metric in metrics.stored()
            if metric.final is not None
        },
    }


def _drift(drift: diagnostics.Drift | None) -> dict[str, Any] | None:
    if drift is None:
        return None
    return {
        "begin": _timing(drift.begin),
        "end": _timing(drift.end),
        "change": drift.change,
        "beyond_noise": drift.beyond_noise,
        "sentence": drift.sentence,
    }


def _dense_layer(dense: suspect_dense.DenseLayer | None) -> dict[str, Any] | None:
    if dense is None:
        return None
    return {
        "median_us": dense.measured.median_us,
        "floor_us": dense.floor_us,
        "over_floor": dense.over_floor,
        "warning": dense.warning or None,
    }


def _answer(answer: Recommendation) -> dict[str, Any]:
    return {
        "budget": asdict(answer.budget),
        "least_parameters": answer.least,
        "verdict": answer.verdict.value,
        "sentence": answer.sentence,
        "chosen": None if answer.chosen is None else _finalist(answer.chosen),
        "ties": [str(tie.facts.chain) for tie in answer.ties],
        "heuristic": None if answer.heuristic is None else _finalist(answer.heuristic),
    }


def _trial(trial: TrialRecord) -> dict[str, Any]:
    return {
        "number": trial.number,
        "state": trial.state,
        "origin": trial.origin,
        "run": trial.run,
        "device": trial.device,
        **_facts(trial.facts),
        "latency": _timing(trial.latency),
        "dense": _timing(trial.dense),
        "latency_over_dense": trial.ratio,
        "error": trial.error,
        **_values(trial),
        "seconds": trial.seconds,
        "reason": trial.reason,
    }


def _csv_columns() -> list[str]:
    return [
        *("number", "state", "origin", "run", "device", "dims", "in_features", "out_features"),
        *("chain", "parameters", "share_of_dense", "rho", "d_rho", "floor_us", "predicted_us"),
        *(f"latency_{field.name}" for field in fields(Measurement)),
        *(f"dense_{field.name}" for field in fields(Measurement)),
        *("latency_over_dense", "error"),
        *(metric.name for metric in metrics.stored()),
        *("seconds", "reason"),
    ]


def _csv_row(trial: TrialRecord) -> dict[str, Any]:
    row = _trial(trial)
    chain = trial.facts.chain
    row |= {
        "dims": str(Dims(chain.in_features, chain.out_features)),
        "in_features": chain.in_features,
        "out_features": chain.out_features,
    }
    for name in ("latency", "dense"):
        row |= {f"{name}_{key}": value for key, value in (row[name] or {}).items()}
    return row
