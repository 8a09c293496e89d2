"""The output of a command as a document whose parts have the same meaning in both versions.

Values that differ between two runs of one version (times that are not simulated, folders, commits)
and prose, which may be reworded, are omitted. Renamed keys have their later name.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from versions.running import Finished

_UNSHARED = {
    *("seconds", "final_seconds", "pass_s", "deciding_s"),
    *("folder", "commit", "code", "command", "made_by", "schema"),
    *("sentence", "warning", "warnings", "note", "notes"),
}
_RENAMED = {"situation": "key"}
_RENAMED_WORDS = {"fresh": "repacked", "kept": "cached"}
_RENAMED_VERDICTS = {"kept": "left to PyTorch"}
_LAYER_PARTS = {
    "trials": "trials, in order",
    "finalists": "finalists",
    "recommendations": "answers",
}


def shared(value: Any) -> Any:
    """A value without the keys that differ between two runs.

    Example:
        >>> shared({"chain": "(1,8,8,1)", "seconds": 0.2, "times": [{"commit": "a", "us": 3.0}]})
        {'chain': '(1,8,8,1)', 'times': [{'us': 3.0}]}
    """
    if isinstance(value, Mapping):
        return {key: shared(one) for key, one in value.items() if key not in _UNSHARED}
    return [shared(one) for one in value] if isinstance(value, list) else value


def renamed(value: Any) -> Any:
    """A value with the later names of its keys and words.

    Example:
        >>> renamed({"situation": {"weight": "fresh"}})
        {'key': {'weight': 'repacked'}}
    """
    if isinstance(value, Mapping):
        return {
            _RENAMED.get(key, key): _RENAMED_WORDS.get(one, one)
            if key == "weight"
            else renamed(one)
            for key, one in value.items()
        }
    return [renamed(one) for one in value] if isinstance(value, list) else value


def search(done: Finished) -> dict[str, Any]:
    """The document of ``ksopt search``: results.json, plan.json and trials.csv."""
    layers, around = _layers(_read(done.out / "results.json"))
    document: dict[str, Any] = {
        title: {size: shared(layer[name]) for size, layer in layers.items()}
        for name, title in _LAYER_PARTS.items()
    }
    document["Pareto front"] = {size: one["front"]["trials"] for size, one in layers.items()}
    rest = {
        size: shared({key: one for key, one in layer.items() if key not in _LAYER_PARTS})
        for size, layer in layers.items()
    }
    document["plan.json"] = shared(_read(done.out / "plan.json"))["layers"]
    document["trials.csv"] = _table(done.out / "trials.csv")
    document["settings and diagnoses"] = rest
    if around:
        document["the model"] = shared(around)
    return document


def _layers(results: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Each size's part of results.json, and the common part.

    A search of one size had its own schema, and each size its request in full.
    """
    if "layers" in results:
        request = results.pop("request")
        parts = [
            {**one, "request": {**request, **one["request"]}, "replayed": results["replayed"]}
            for one in results.pop("layers")
        ]
    elif "shapes" in results:
        parts = results.pop("shapes")
        results.pop("request")
    else:
        parts, results = [results], {}
    for one in parts:
        one["request"].pop("study")  # the name of a size's study, of several sizes
    return {f"{one['in_features']}x{one['out_features']}": one for one in parts}, results


def explained(done: Finished) -> dict[str, Any]:
    """The document of `versions.explained`: every call of every layer."""
    calls = {
        f"{layer}, {way}": answer
        for layer, ways in json.loads(done.printed[-1]).items()
        for way, answer in ways.items()
    }
    return _explanations(calls)


def explain(done: Finished) -> dict[str, Any]:
    """The document of ``ksopt explain --json``."""
    return _explanations({"model": json.loads(done.printed[-1])})


def _explanations(calls: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    answers = {name: one for name, one in calls.items() if "error" not in one}
    return {
        "sites": {name: _sites(one["sites"]) for name, one in answers.items()},
        "linear flops": {name: one["linear_flops"] for name, one in answers.items()},
        "graphs": {name: one["graphs"] for name, one in answers.items()},
        "graph breaks": {name: len(one["graph_breaks"]) for name, one in answers.items()},
        "graphs left alone": {name: len(one["notes"]) for name, one in answers.items()},
        "what the pass counts": {name: _counts(one["passes"]) for name, one in answers.items()},
        "errors": {name: one["error"] for name, one in calls.items() if "error" in one},
    }


def _counts(passes: dict[str, int]) -> dict[str, int]:
    """The counters of the pass, without those that follow from the sites."""
    follow = ("chains_decided", "products_lowered")
    return {name: number for name, number in passes.items() if name not in follow}


def _sites(sites: list[dict[str, Any]]) -> list[str]:
    """The verdicts of the sites of each line."""
    lines: dict[str, list[str]] = {}
    for site in sites:
        where = f"{Path(site['place']['file']).name}:{site['place']['line']}"
        lines.setdefault(where, []).append(_site(site))
    return [f"{where} {'; '.join(texts)}" for where, texts in lines.items()]


def _site(site: dict[str, Any]) -> str:
    # A layer of ksopt: now one operator, before one for each factor.
    spelling = "a layer of ksopt's" if site["spelling"].startswith("ks_") else site["spelling"]
    verdict = _RENAMED_VERDICTS.get(site["verdict"], site["verdict"])
    text = f"{verdict}: {site['chain']} as {spelling}"
    if site["verdict"] == "not recognised":
        return f"{text}. {site['reason']}"
    kinds = ("epilogue", "fused", "training", "to_input", "computed", "predicted", "measured")
    flags = [f"{kind} {site[kind]}" for kind in kinds if site[kind]]
    return f"{text}, {site['batch']} rows of {site['dtype']}, {', '.join(flags) or 'plain'}"


def convert(done: Finished) -> dict[str, Any]:
    """The document of ``ksopt convert``: config.json, and the norms of the written weights."""
    converted = _read(done.out / "config.json")
    layers = {one["names"][0]: one for one in converted.pop("layers")}
    weights = load_file(done.out / "model.safetensors")
    norms = {
        name: [list(one.shape), float(np.linalg.norm(one.astype(np.float64)))]
        for name, one in weights.items()
    }
    return {"layers, chains and errors": layers, "weights": norms, "model": shared(converted)}


def planned(done: Finished) -> dict[str, Any]:
    """The document of ``ksopt convert --dry-run --json``."""
    answer = json.loads(done.printed[-1])
    return {"layers and chains": answer["layers"], "left dense": sorted(answer["dense"])}


def tune(done: Finished) -> dict[str, Any]:
    """The document of ``ksopt tune --json``: the last command's choices."""
    answer = renamed(shared(json.loads(done.printed[-1])))
    return {"choices": answer["choices"], "device": [answer["device"], answer["machine"]]}


def bench(done: Finished) -> dict[str, Any]:
    """The document of ``ksopt bench kernels --json``."""
    (series,) = shared(json.loads(done.printed[-1]))["series"]
    ways = {
        f"{row['chain']}, {row['batch']} rows, {row['layout']}, {row['way']}": row
        for row in series.pop("rows")
    }
    return {
        "products": series["lines"],
        "ways to compute them": ways,
        "settings": series["setting"],
    }


def doctor(done: Finished) -> dict[str, Any]:
    """The document of ``ksopt doctor --json``, printed once more as a table."""
    as_json, as_text = done.printed
    answer = json.loads(as_json)
    host = answer["facts"]["host_library"]
    host["path"] = host["path"] is not None  # it contains a digest of the sources
    rows = [line.split("  ")[0].strip("│ ") for line in as_text.splitlines() if line.strip()]
    return {
        "facts": answer["facts"],
        "advice": answer["advice"],
        "rows that are printed": [row for row in rows if "host library" not in row],
    }


def refusal(done: Finished) -> dict[str, Any]:
    """The document of a refused command, whose exit code was checked before."""
    return {"exit code 2, and nothing printed": list(done.printed)}


def _table(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [{key: _number(one) for key, one in row.items() if key != "seconds"} for row in rows]


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def _read(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value
