"""results.json: its keys and its schema, which docs/searching.md describes.

Later versions add keys; under the same schema number none is removed or changes its meaning.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib import resources
from typing import Any

from ksopt.measure.timing import Measurement
from ksopt.patterns.chain import Chain
from ksopt.search import diagnostics, metrics, structures, suspect_dense
from ksopt.search.layer_request import LayerRequest
from ksopt.search.layers import Layers
from ksopt.search.plan import Effect, PlannedGroup, effect_of, effects_of
from ksopt.search.report import answers
from ksopt.search.report.reported_latency import ReportedLatencies
from ksopt.search.request import SearchRequest
from ksopt.search.results import (
    SCHEMA,
    ChainFacts,
    Finalist,
    LayerResult,
    Recommendation,
    SearchResult,
    TrialRecord,
    WholeModel,
)
from ksopt.search.storage_url import without_password
from ksopt.search.structures import StructureResult


def results_schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of results.json.

    Example:
        >>> results_schema()["title"]
        'results.json of ksopt search, version 4'
    """
    file = f"results-{SCHEMA.rpartition('/')[2]}.schema.json"
    text = (resources.files("ksopt.search") / file).read_text("utf-8")
    schema: dict[str, Any] = json.loads(text)
    parts = schema["$defs"]
    layer = parts["layer"]["properties"]
    layer["front"]["properties"]["metrics"]["items"]["enum"] = list(metrics.METRICS)
    for metric in metrics.stored():
        of_dense = [f"dense_{metric.name}"] if metric.final is not None else []
        for part, names in (
            (parts["finalist"], [metric.name, *of_dense]),
            (layer["trials"]["items"], [metric.name]),
        ):
            part["required"] += names
            for name in names:
                part["properties"][name] = {"type": ["number", "null"], **metric.schema}
    return schema


def to_json(result: SearchResult) -> str:
    """The text of results.json."""
    request, effect = result.request, effect_of(result)
    value = {
        "schema": SCHEMA,
        "request": _request(request),
        "model": None if request.model is None else _model(request.model),
        "plan": None if effect is None else _effect(effect),
        "budgets": [{"budget": text, **_sums(one)} for text, one in effects_of(result).items()],
        "whole": None if result.whole is None else _whole(result.whole),
        "layers": [_layer(layer) for layer in result.layers],
        "unmet": {str(dims): sentence for dims, sentence in result.unmet.items()},
        "notes": answers.notes(result),
        "warnings": answers.warnings(result),
        "replayed": result.replayed,
        "stopped": result.stopped,
        "seconds": result.seconds,
        "folder": str(result.folder.resolve()),
    }
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _request(request: SearchRequest) -> dict[str, Any]:
    elsewhere = ("model", "asked_by", "out")
    options = {name: part for name, part in request.to_json().items() if name not in elsewhere}
    if request.storage is not None:
        options["storage"] = without_password(request.storage)
    return {"command": request.command, **options}


def _model(layers: Layers) -> dict[str, Any]:
    return {
        "source": layers.source,
        "layers": layers.count,
        "parameters": layers.parameters,
        "dense": dict(layers.dense),
        "note": layers.note,
    }


def _layer(layer: LayerResult) -> dict[str, Any]:
    return {
        "in_features": layer.size.in_features,
        "out_features": layer.size.out_features,
        "dense_parameters": layer.size.dense_parameters,
        "request": _layer_request(layer.request),
        "recommendations": [_answer(answer) for answer in layer.recommendations],
        "finalists": [
            _finalist(finalist)
            | {
                "within_noise_of": [
                    str(layer.finalists[place].facts.chain)
                    for place in diagnostics.within_noise_of(finalist, layer.finalists)
                ]
            }
            for finalist in layer.finalists
        ],
        "surrounded": [
            {
                **one.around.to_json(),
                "recommendations": [_answer(answer) for answer in one.recommendations],
                "finalists": [_finalist(finalist) for finalist in one.finalists],
                "reason": one.reason or None,
            }
            for one in layer.surrounded
        ],
        "correlations": [
            {
                "with": one.predictor.key,
                "spearman": one.spearman,
                "chains": one.chains,
                "energy_spearman": one.energy_spearman,
            }
            for one in diagnostics.correlations(layer.trials)
        ],
        "drift": _drift(diagnostics.drift(layer)),
        "dense_layer": _dense_layer(suspect_dense.dense_layer(layer)),
        "structures": [_structure(one) for one in structures.best_of_each(layer)],
        "trials": [trial(one) for one in layer.trials],
        "front": {
            "metrics": [metric.name for metric in metrics.objectives(layer.request)],
            "trials": [one.number for one in ReportedLatencies(layer).front()],
        },
        "space": asdict(layer.space),
        "sampler": layer.sampler,
        "run": layer.run,
        "stopped": layer.stopped,
        "seconds": layer.seconds,
        "final_seconds": layer.final_seconds,
        "roofline": asdict(layer.roofline),
        "device": asdict(layer.device),
        "runs": [asdict(run) for run in layer.runs],
    }


def _layer_request(request: LayerRequest) -> dict[str, Any]:
    """The settings of a size that may differ from those of others."""
    return {
        "dims": str(request.size),
        "budgets": [asdict(step) for step in request.steps],
        "max_params": request.max_params,
        "min_rank": request.rank,
        "trials": request.trials,
        "weights": request.weights,
        "study": request.study,
        "epilogue": list(request.epilogue),
        "siblings": request.siblings,
    }


def _facts(known: ChainFacts) -> dict[str, Any]:
    chain = known.chain
    return {
        "chain": str(chain),
        "patterns": [list(p.weight_shape) for p in chain] if isinstance(chain, Chain) else [],
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


def _structure(one: StructureResult) -> dict[str, Any]:
    return {
        "structure": one.structure,
        "budget": one.budget.text,
        "chain": str(one.facts.chain),
        "parameters": one.facts.nnz,
        "share_of_dense": one.facts.share,
        "flops": one.flops,
        "latency": _timing(one.latency),
        "dense": _timing(one.dense),
        "latency_over_dense": one.ratio,
        "retimed": one.retimed,
        "given_up": one.given_up,
        "weight_error": one.weight_error,
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


def trial(trial: TrialRecord) -> dict[str, Any]:
    """The JSON values of a trial."""
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


def _sums(effect: Effect) -> dict[str, Any]:
    return {
        "converted": effect.converted,
        "dense_parameters": effect.dense_parameters,
        "parameters": effect.parameters,
        "dense_us": effect.dense_us,
        "latency_us": effect.latency_us,
        "latency_over_dense": effect.ratio,
        "unmeasured": [str(dims) for dims in effect.unmeasured],
    }


def _effect(effect: Effect) -> dict[str, Any]:
    return {**_sums(effect), "groups": [_group(one) for one in effect.groups]}


def _group(one: PlannedGroup) -> dict[str, Any]:
    return {
        **one.group.to_json(),
        "chain": None if one.finalist is None else str(one.finalist.facts.chain),
        "budget": None if one.answer is None else one.answer.budget.text,
        "dense_parameters": one.group.dense_parameters,
        "parameters": one.parameters,
        "dense_us": one.dense_us,
        "latency_us": one.latency_us,
    }


def _whole(whole: WholeModel) -> dict[str, Any]:
    return {
        "dense": _timing(whole.dense),
        "planned": _timing(whole.planned),
        "latency_over_dense": whole.ratio,
        "against_dense": whole.against_dense,
        "converted": whole.converted,
        "rows": dict(whole.rows),
    }
