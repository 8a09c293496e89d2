"""The registry of a report's sections, which the page and markdown share.

A section is one function of a result. It is registered with where it stands, and is in every report
from then on, of one layer or of several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from ksopt.report.document import Section

Part = Literal["layer", "one layer", "several layers"]
_Function = TypeVar("_Function", bound=Callable[[Any], "Section | Iterable[Section]"])
LAYERS = 50
"""Where the layers' sections stand in a report of several, among its own."""


@dataclass(frozen=True)
class Entry:
    """A function that writes sections, and which reports have them."""

    order: float
    of: Part
    when: Callable[[Any], bool]
    write: Callable[[Any], Section | Iterable[Section]]

    def sections(self, result: object) -> list[Section]:
        """Those of a result."""
        if not self.when(result):
            return []
        written = self.write(result)
        return [written] if isinstance(written, Section) else list(written)


_ENTRIES: list[Entry] = []


def section(
    *, order: float, of: Part = "layer", when: Callable[[Any], bool] = lambda result: True
) -> Callable[[_Function], _Function]:
    """Register a function that writes a section, or several, of a result.

    Args:
        order: Where it stands: the answer to a layer is at 10, its trials are at 100. In a report
            of several layers the layers are at 50.
        of: "layer" for each layer of every report; "one layer" or "several layers" for once in a
            report of that kind.
        when: Whether a result has it.

    Example:
        >>> @section(order=105, when=lambda result: result.request.train)
        ... def training(result):
        ...     return Section("Training", (), ("All times are of a step.",))
        >>> unregister(training)
    """

    def registered(write: _Function) -> _Function:
        _ENTRIES.append(Entry(order, of, when, write))
        return write

    return registered


def unregister(write: Callable[[Any], object]) -> None:
    """Take a function's sections out of every report."""
    _ENTRIES[:] = [entry for entry in _ENTRIES if entry.write is not write]


def entries(*parts: Part) -> list[Entry]:
    """What is registered for some parts of a report, in order."""
    return sorted((one for one in _ENTRIES if one.of in parts), key=lambda one: one.order)
