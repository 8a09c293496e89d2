"""The ways of `ksopt bench paper` that have no time or energy, counted by their reasons."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ksopt.bench.reproduction.products import FIRST, LAST
from ksopt.bench.results import FAILED, WRONG
from ksopt.report import tables
from ksopt.report.tables import Table

_NUMBER = re.compile(r"\d[\d.,]*(e[+-]?\d+)?")


@dataclass(frozen=True)
class Absence:
    """A way without a time or energy for a pattern.

    Attributes:
        part: "float16", or "energy in float32".
        way: by the paper's name.
        layout: of the way.
        pattern: as text.
        reason: a sentence.
    """

    part: str
    way: str
    layout: str
    pattern: str
    reason: str

    @property
    def is_fault(self) -> bool:
        """Whether the way computed a wrong result, or could not compute at all."""
        return self.reason.startswith((WRONG, FAILED))


@dataclass(frozen=True)
class Group:
    """Absences of one way for one reason, whose numbers may differ.

    Attributes:
        absences: one or more.
    """

    absences: tuple[Absence, ...]

    @property
    def example(self) -> str:
        """The pattern and the reason of one of them."""
        return f"{self.absences[0].pattern}: {self.absences[0].reason}"

    def count(self, part: str, layout: str) -> int:
        """How many patterns of a part have no time in a layout."""
        return sum((one.part, one.layout) == (part, layout) for one in self.absences)

    def __str__(self) -> str:
        parts = dict.fromkeys(one.part for one in self.absences)
        counts = ", ".join(f"{_both(self, part)} ({part})" for part in parts)
        return f"{self.absences[0].way}: patterns without a time: {counts}; {self.example}"


def grouped(absences: Iterable[Absence]) -> list[Group]:
    """The absences by way and reason, in their order."""
    groups: dict[tuple[str, str], list[Absence]] = {}
    for one in absences:
        groups.setdefault((one.way, _NUMBER.sub("#", one.reason)), []).append(one)
    return [Group(tuple(own)) for own in groups.values()]


def table(absences: Sequence[Absence]) -> Table:
    """A row per way and reason: the patterns without a time, in batch_first + in batch_last."""
    parts = tuple(dict.fromkeys(one.part for one in absences))
    rows = [
        (group.absences[0].way, group.example, *(_both(group, part) for part in parts))
        for group in grouped(absences)
    ]
    return tables.of(("way", "reason, of one pattern", *(f">{part}" for part in parts)), rows)


def _both(group: Group, part: str) -> str:
    return f"{group.count(part, FIRST)} + {group.count(part, LAST)}"
