"""Comparison of several searches as a page, as markdown and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ksopt.patterns.size import Dims
from ksopt.patterns.surroundings import Surroundings
from ksopt.report import document, tables
from ksopt.report.document import Fact, Section
from ksopt.report.tables import Table
from ksopt.search import surrounded
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
        warnings=tuple(warnings(searches)),
    )
    rows = [[name, *values] for name, values in differences(searches).items()]
    difference_section = Section(
        "What differs", (), (), tables.of(("what", *searches), rows), is_folded=True
    )  # fmt: skip
    words = replace(glossary(next(iter(searches.values()))), is_folded=True)
    return [answer, *([difference_section] if rows else []), words]


def lead(searches: Searches) -> list[str]:
    """Sentences on which search has the fastest chain, for each size that several have.

    Chains that win in some surroundings only are compared with those that win in the same.
    """
    sentences = []
    has_conditions = False
    for size in dict.fromkeys(size for one in searches.values() for size in one.request.sizes):
        used: dict[Surroundings | None, dict[str, Finalist]] = {}
        for name, one in searches.items():
            for use in _uses(one, size):
                used.setdefault(use.around, {})[name] = use.finalist
                has_conditions = has_conditions or use.around is not None
        for around, chains in used.items():
            if len(chains) > 1:
                what = str(size) if around is None else f"{size}, {surrounded.placed(around)}"
                sentences += _least(what, chains)
    if not sentences:
        alike = ", in the same surroundings" if has_conditions else ""
        sentences.append(
            f"No size has a chain that is faster than dense in two of the searches{alike}."
        )
    if has_conditions:
        sentences.append(
            "Where the table has surroundings, a chain is worth using in them only: elsewhere the "
            "layer stays dense."
        )
    return sentences


def _least(what: str, chains: Mapping[str, Finalist]) -> list[str]:
    """Sentences on which of several searches' chains takes the least time."""
    best = min(chains, key=lambda name: chains[name].latency.median_us)
    others = [
        f"{phrases.microseconds(one.latency.median_us)} of {name}"
        for name, one in chains.items()
        if name != best
    ]
    latency = phrases.microseconds(chains[best].latency.median_us)
    return [
        f"{what}: the chain of {best} takes the least, {latency}.",
        f"The other takes {others[0]}." if len(others) == 1 else
        f"The others take {', '.join(others)}.",
    ]  # fmt: skip


@dataclass(frozen=True)
class _Use:
    """A chain that a search uses for a size.

    Args:
        finalist: The chain and its times.
        around: The surroundings in which alone it wins; None if it is used everywhere.
    """

    finalist: Finalist
    around: Surroundings | None = None


def _uses(result: SearchResult, size: Dims) -> list[_Use]:
    """The chains that a search uses for a size; empty if its layers stay dense everywhere."""
    answer, layer = choice(result, size), result.of(size)
    if answer is not None and answer.chosen is not None:
        return [_Use(answer.chosen)]
    won = () if layer is None else surrounded.winners(layer)
    return [_Use(there.chosen, around) for around, there in won if there.chosen is not None]


def _facts(searches: Searches) -> Iterator[Fact]:
    """The speedup over dense of each search of one layer."""
    for name, one in searches.items():
        if not one.request.is_one_layer:
            continue
        uses = _uses(one, one.layers[0].size)
        if not uses:
            yield Fact("dense", name, "no chain is faster")
        for use in uses:
            latency = phrases.microseconds(use.finalist.latency.median_us)
            detail = f"{latency}, {phrases.percent(use.finalist.facts.share)} of the weights"
            title = name if use.around is None else f"{name}, {surrounded.placed(use.around)}"
            yield Fact(f"{1 / use.finalist.ratio:.2f}x", title, detail)


def warnings(searches: Searches) -> Iterator[str]:
    """Sentences on differences of device or request that make times incomparable."""
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
    """Table of the chains that each search uses for each size, beside dense.

    It has a column for surroundings if a chain wins in some only.
    """
    heads = ["search", "INxOUT", ">speedup", "chain", "surroundings", ">weights", ">of dense"]
    heads += [">dense", ">latency", f">{WEIGHT_ERROR.title}"]
    rows = []
    for name, one in searches.items():
        for size in one.request.sizes:
            cells = [_cells(use) for use in _uses(one, size)] or [["", "dense", *[""] * 6]]
            rows += [[name, str(size), *own] for own in cells]
    optional = {"surroundings", heads[-1]}
    shown = [
        at for at, head in enumerate(heads) if head not in optional or any(r[at] for r in rows)
    ]
    return tables.of([heads[at] for at in shown], [[row[at] for at in shown] for row in rows])


def _cells(use: _Use) -> list[str]:
    used = use.finalist
    return [
        f"{1 / used.ratio:.2f}x",
        str(used.facts.chain),
        "" if use.around is None else str(use.around),
        f"{used.facts.nnz:,}",
        phrases.percent(used.facts.share),
        phrases.microseconds(used.dense.median_us),
        phrases.microseconds(used.latency.median_us),
        WEIGHT_ERROR.cell(used.values),
    ]
