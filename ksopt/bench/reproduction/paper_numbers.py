"""The numbers that the paper prints, each with its table or figure and its place."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True)
class Printed:
    """A number of the paper.

    Attributes:
        item: "Table 3", "Figure 7".
        row, column: of the table; of a figure, what the number is of.
        value: the number; None where the paper's text that was read has none.
        unit: "%", "x" (times), "s" or "" (a ratio).
        source: where it is printed.
    """

    item: str
    row: str
    column: str
    value: float | None
    unit: str
    source: str


@functools.cache
def printed() -> dict[tuple[str, str, str], Printed]:
    """All of them, by item, row and column.

    Example:
        >>> printed()["Table 5", "batch_last", "share"].value
        88.1
    """
    file = resources.files(__package__) / "paper_numbers.json"
    rows = json.loads(file.read_text("utf-8"))["numbers"]
    found = [Printed(**row) for row in rows]
    return {(one.item, one.row, one.column): one for one in found}
