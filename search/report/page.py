"""The search's report as a page and as markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ksopt.report import document
from ksopt.report.document import Section
from ksopt.search.report import layer_sections as layer_sections  # registers its sections
from ksopt.search.report import method_sections as method_sections
from ksopt.search.report import one_layer_sections as one_layer_sections
from ksopt.search.report import phrases, sections
from ksopt.search.results import SearchResult


def html(result: SearchResult) -> str:
    """The page; what report.html holds."""
    return document.html(title(result), where(result), of_layer(result))


def title(result: SearchResult) -> str:
    """The report's title."""
    size = result.request.size
    return f"Chains for a {size} linear layer ({phrases.layer(size)})"


def where(result: SearchResult) -> str:
    """What it was measured on, in a line."""
    request, device = result.request, result.device
    return (
        f"{device.name}, {device.device}; {request.dtype}, batch {request.batch}, "
        f"{request.layout}; torch {device.torch}, ksopt {device.ksopt}"
    )


def markdown(result: SearchResult) -> str:
    """The report as markdown; what report.md holds."""
    return document.markdown(title(result), of_layer(result))


def of_layer(result: SearchResult) -> list[Section]:
    """The whole report of one layer, the answer first."""
    return _written(sections.entries("layer", "one layer"), result)


def of_layers(result: object, layers: Sequence[SearchResult]) -> list[Section]:
    """The whole report of several layers: the answer, each layer, then what they share.

    Args:
        result: Of the search.
        layers: Of each layer; its size is in the titles of its sections.
    """
    own = sections.entries("several layers")
    written = _written([entry for entry in own if entry.order < sections.LAYERS], result)
    for layer in layers:
        written += [
            replace(one, title=f"{layer.request.size}: {one.title[0].lower()}{one.title[1:]}")
            for one in _written(sections.entries("layer"), layer)
        ]
    return written + _written([entry for entry in own if entry.order >= sections.LAYERS], result)


def _written(entries: Iterable[sections.Entry], result: object) -> list[Section]:
    return [one for entry in entries for one in entry.sections(result)]
