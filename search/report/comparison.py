"""Comparison of several searches as a page, as markdown and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ksopt.patterns.size import Dims
from ksopt.patterns.surroundings import Surroundings
from ksopt.report import document, tables
from ksopt.report.document import Fact, Section
from ksopt.report.tables import Table
from ksopt.search.metrics import WEIGHT_ERROR
from ksopt.search.options import SearchOptions
from ksopt.search.plan import choice
from ksopt.search.report import phrases, results_json
from ksopt.search.report.glossary import glossary
from ksopt.search.report.overview import Series, overview_plot
from ksopt.search.report.plots import figure
from ksopt.search.results import Finalist, SearchResult

SCHEMA = "ksopt.comparison/1"
_TITLE = "Searches compared"
# Options that do not affect a search's times.
_OWN = {"out", "storage", "study", "workers", "seed", "plugins"}

Searches = Mapping[str, SearchResult]
"""Results by display name."""


def html(searches: Searches) -> str:
    """The page comparison.html."""
    return document.html(_TITLE, where(searches), sections(searches))


def markdown(searches: Searches) -> str:
    """The comparison as markdown."""
    return document.markdown(_TITLE, sections(searches), where(searches))


def to_json(searches: Searches) -> str:
    """The comparison as JSON, with the results.json of each search."""
    results = {name: json.loads(results_json.to_json(one)) for name, one in searches.items()}
    return json.dumps({"schema": SCHEMA, "searches": results}, indent=2) + "\n"


def where(searches: Searches) -> str:
    """The searches and their devices, in a line."""
    devices = {one.layers[0].device.name: None for one in searches.values()}
    return f"{', '.join(searches)}; measured on {', '.join(devices)}"


def sections(searches: Searches) -> list[Section]:
    """The answer, the differences of the requests, and the glossary."""
    series = [
        Series.of(name if one.request.is_one_layer else f"{name} {layer.size}", layer, answer)
        for name, one in searches.items()
        for layer in one.layers
        for answer in [choice(one, layer.size)]
    ]
    caption = (
        "Each point is a chain of a final, each ring one that its search recommends. Above the "
        "line, chains are faster than dense."
    )
    answer = Section(
        "Answer",
        tuple(lead(searches)),
        (caption,),
        table(searches),
        figure=figure(partial(overview_plot, series), "comparison"),
        facts=tuple(_facts(searches)),
        warnings=tuple(_warnings(searches)),
    )
    rows = [[name, *values] for name, values in differences(searches).items()]
    difference_section = Section(
        "What differs", (), (), tables.of(("what", *searches), rows), is_folded=True
    )  # fmt: skip
    words = replace(glossary(next(iter(searches.values()))), is_folded=True)
    return [answer, *([difference_section] if rows else []), words]


def lead(searches: Searches) -> list[str]:
    """Sentences on which search has the fastest chain, for each size that several have."""
    sentences = []
    for size in dict.fromkeys(size for one in searches.values() for size in one.request.sizes):
        used = dict(_used(searches, size))
        if len(used) < 2:
            continue
        best = min(used, key=lambda name: used[name].latency.median_us)
        others = [
            f"{phrases.microseconds(one.latency.median_us)} of {name}"
            for name, one in used.items()
            if name != best
        ]
        latency = phrases.microseconds(used[best].latency.median_us)
        sentences.append(f"{size}: the chain of {best} takes the least, {latency}.")
        sentences.append(f"The other takes {others[0]}." if len(others) == 1 else
                         f"The others take {', '.join(others)}.")  # fmt: skip
    return sentences or ["No size has a chain that is faster than dense in two of the searches."]


def _used(searches: Searches, size: Dims) -> Iterator[tuple[str, Finalist]]:
    """The chain that each search uses for a size, if it has one."""
    for name, one in searches.items():
        answer = choice(one, size)
        if answer is not None and answer.chosen is not None:
            yield name, answer.chosen


def _facts(searches: Searches) -> Iterator[Fact]:
    """The speedup over dense of each search of one layer."""
    for name, one in searches.items():
        if not one.request.is_one_layer:
            continue
        used = dict(_used({name: one}, one.layers[0].size)).get(name)
        if used is None:
            yield Fact("dense", name, "no chain is faster")
        else:
            latency = phrases.microseconds(used.latency.median_us)
            share = phrases.percent(used.facts.share)
            yield Fact(f"{1 / used.ratio:.2f}x", name, f"{latency}, {share} of the weights")


def _warnings(searches: Searches) -> Iterator[str]:
    differ = differences(searches)
    if "device" in differ:
        yield "The devices differ: compare the ratios to dense, not the times."
    timed = sorted({"batch", "dtype", "layout", "train", "epilogue", "siblings"} & differ.keys())
    if timed:
        yield f"What was timed differs ({', '.join(timed)}): compare the ratios, not the times."


def differences(searches: Searches) -> dict[str, list[str]]:
    """The settings and devices that differ between the searches."""
    every = [_setting(one) for one in searches.values()]
    names = dict.fromkeys(name for setting in every for name in setting)
    rows = {name: [_shown(setting.get(name)) for setting in every] for name in names}
    return {name: values for name, values in rows.items() if len(set(values)) > 1}


def _setting(result: SearchResult) -> dict[str, Any]:
    options = {name: value for name, value in result.request.options.items() if name not in _OWN}
    whole = _around(result.request)
    of_sizes = {one.size: _around(one.request) for one in result.layers}
    if any(around != whole for around in of_sizes.values()):  # a model's graph was read
        texts = (f"{size}: {around}" for size, around in of_sizes.items())
        options["epilogue"] = "; ".join(texts)
    device = result.layers[0].device
    sizes = " ".join(map(str, result.request.sizes))
    versions = {"torch": device.torch, "ksopt": device.ksopt}
    return {"sizes": sizes, **options, "device": device.name, **versions}


def _around(options: SearchOptions) -> Surroundings:
    return Surroundings(tuple(options.epilogue), options.siblings)


def _shown(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return " ".join(map(str, value))
    return "" if value is None else str(value)


def table(searches: Searches) -> Table:
    """Table of the chain that each search uses for each size, beside dense."""
    heads = ["search", "INxOUT", ">speedup", "chain", ">weights", ">of dense", ">dense", ">latency"]
    rows = []
    has_error = False
    for name, one in searches.items():
        for size in one.request.sizes:
            used = dict(_used({name: one}, size)).get(name)
            cells = ["", "dense", *[""] * 5] if used is None else _cells(used)
            has_error = has_error or cells[-1] != ""
            rows.append([name, str(size), *cells])
    if has_error:
        return tables.of([*heads, f">{WEIGHT_ERROR.title}"], rows)
    return tables.of(heads, [row[:-1] for row in rows])


def _cells(used: Finalist) -> list[str]:
    return [
        f"{1 / used.ratio:.2f}x",
        str(used.facts.chain),
        f"{used.facts.nnz:,}",
        phrases.percent(used.facts.share),
        phrases.microseconds(used.dense.median_us),
        phrases.microseconds(used.latency.median_us),
        WEIGHT_ERROR.cell(used.values),
    ]
