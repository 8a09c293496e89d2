"""Registry of a report's sections, which the page and markdown share.

A section is one function of the search's result, or of each layer's. It is registered with its
position, and is then in every report, of one layer or of several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from ksopt.report.document import Section
from ksopt.search.results import SearchResult

Part = Literal["layer", "search"]
_Function = TypeVar("_Function", bound=Callable[[Any], "Section | Iterable[Section]"])
LAYERS = 30
"""Position of the layers' sections among the search's own, in a report of several layers."""


@dataclass(frozen=True)
class Entry:
    """A function that writes sections, with their position and condition."""

    order: float
    of: Part
    when: Callable[[Any], bool]
    write: Callable[[Any], Section | Iterable[Section]]
    is_folded: bool = True

    def sections(self, result: object) -> list[Section]:
        """The sections of a result."""
        if not self.when(result):
            return []
        written = self.write(result)
        several = [written] if isinstance(written, Section) else list(written)
        return [replace(one, is_folded=self.is_folded) for one in several]


_ENTRIES: list[Entry] = []


def section(
    *,
    order: float,
    of: Part = "layer",
    when: Callable[[Any], bool] = lambda result: True,
    is_folded: bool = True,
) -> Callable[[_Function], _Function]:
    """Register a function that writes a section, or several, of a result.

    Args:
        order: Its position: the answer is at 10, a layer's trials are at 100. In a report of
            several layers all sections of the layers are at 30.
        of: "layer" for a function of each `LayerResult`; "search" for one of the `SearchResult`,
            once in a report.
        when: Whether a result has it.
        is_folded: Whether the page shows only its title until a reader opens it.

    Example:
        >>> @section(order=105, when=lambda result: result.request.train)
        ... def training(result):
        ...     return Section("Training", (), ("All times are of a step.",))
        >>> unregister(training)
    """

    def registered(write: _Function) -> _Function:
        _ENTRIES.append(Entry(order, of, when, write, is_folded))
        return write

    return registered


def unregister(write: Callable[[Any], object]) -> None:
    """Remove a function's sections from all reports."""
    _ENTRIES[:] = [entry for entry in _ENTRIES if entry.write is not write]


def written(result: SearchResult) -> list[Section]:
    """The sections of a report, in order; those of several layers are parts, by size."""
    own, of_layers = _entries("search"), _entries("layer")
    if result.request.is_one_layer:
        (layer,) = result.layers
        every = [(entry, result) for entry in own] + [(entry, layer) for entry in of_layers]
        every.sort(key=lambda one: one[0].order)
        return [part for entry, of in every for part in entry.sections(of)]
    parts = [part for entry in own if entry.order < LAYERS for part in entry.sections(result)]
    for layer in result.layers:
        parts += [
            replace(part, part=str(layer.size), is_folded=False)
            for entry in of_layers
            for part in entry.sections(layer)
        ]
    parts += [part for entry in own if entry.order >= LAYERS for part in entry.sections(result)]
    return parts


def _entries(part: Part) -> list[Entry]:
    return sorted((one for one in _ENTRIES if one.of == part), key=lambda one: one.order)
