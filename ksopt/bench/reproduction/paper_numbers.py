"""The numbers that the paper prints, each with its table or figure and its source."""

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
        row, column: of the table; of a figure, the quantity.
        value: the number; None where the text of the paper that we read has none.
        unit: "%", "x" (times), "s" or "" (a ratio).
        source: the place in the paper.
    """

    item: str
    row: str
    column: str
    value: float | None
    unit: str
    source: str


@functools.cache
def printed() -> dict[tuple[str, str, str], Printed]:
    """All printed numbers, by item, row and column.

    Example:
        >>> printed()["Table 5", "batch_last", "share"].value
        88.1
    """
    file = resources.files(__package__) / "paper_numbers.json"
    rows = json.loads(file.read_text("utf-8"))["numbers"]
    numbers = [Printed(**row) for row in rows]
    return {(one.item, one.row, one.column): one for one in numbers}
