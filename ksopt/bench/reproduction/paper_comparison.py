"""Cells with the paper's numbers beside ours, for the tables of `ksopt bench paper`."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ksopt.bench.reproduction.paper_numbers import printed
from ksopt.bench.reproduction.statistics import Estimate
from ksopt.report import tables
from ksopt.report.tables import Table


@dataclass(frozen=True)
class Cell:
    """A number of a table or figure.

    Attributes:
        item: "Table 3", "Figure 7".
        row, column: of the table; of a figure, the quantity.
        setting: dtype and other conditions.
        paper: the paper's number; None if there is none.
        ours: the measured number; None where ``absent`` has the reason.
        unit: "%", "x" (times), "s" or "" (a ratio).
        absent: the reason ours is missing.
        source: the place of the paper's number, or the reason it has none.
    """

    item: str
    row: str
    column: str
    setting: str
    paper: float | None
    ours: Estimate | None
    unit: str
    absent: str
    source: str

    @property
    def ratio(self) -> float | None:
        """Our number over the paper's."""
        return None if self.ours is None or not self.paper else self.ours.value / self.paper


def cell(
    item: str, row: str, column: str, setting: str, ours: Estimate | None, *, unit: str,
    is_papers: bool, absent: str = "nothing was measured for it",
) -> Cell:  # fmt: skip
    """A cell with the paper's number beside ours.

    Args:
        item, row, column: as for `Cell`; they identify the paper's number.
        setting: dtype and other conditions.
        ours: the measured number; shares from 0 to 1 are converted to per cent.
        unit: of both.
        is_papers: whether the setting is the paper's own.
        absent: the reason ours is missing, where it is.
    """
    known = printed().get((item, row, column))
    source = known.source if known else "the paper has no such number"
    if known and not is_papers:
        source = "the paper's number is of its own sizes and dtype"
    if ours is not None and unit == "%":
        ours = Estimate(100 * ours.value, 100 * ours.low, 100 * ours.high, ours.count)
    return Cell(
        item, row, column, setting,
        known.value if known and is_papers else None,
        ours, unit,
        "" if ours is not None else absent,
        source,
    )  # fmt: skip


def table(cells: Sequence[Cell]) -> Table:
    """A row per cell: the paper's number, ours with its interval, their ratio.

    Interval and number of patterns are left out where no cell is of a sample, remarks where there
    are none.
    """
    heads = ("what", "number", "setting", ">paper", ">ours", ">95 % interval", ">ours / paper",
             ">patterns", "remark")  # fmt: skip
    is_of_sample = any(one.ours is not None and one.ours.count > 1 for one in cells)
    has_remarks = any(_remark(one) for one in cells)
    without = (() if is_of_sample else (">95 % interval", ">patterns")) + (
        () if has_remarks else ("remark",)
    )
    places = [place for place, head in enumerate(heads) if head not in without]
    rows = [_shown(one) for one in cells]
    return tables.of(
        tuple(heads[place] for place in places),
        [tuple(row[place] for place in places) for row in rows],
    )


def by_setting(cells: Sequence[Cell]) -> Table:
    """A row per quantity with our number in each setting."""
    settings = tuple(dict.fromkeys(one.setting for one in cells))
    ours = {(one.row, one.column, one.setting): _ours(one) for one in cells}
    rows = [
        (row, column, *(ours.get((row, column, setting), "-") for setting in settings))
        for row, column in dict.fromkeys((one.row, one.column) for one in cells)
    ]
    return tables.of(("what", "number", *(f">{setting}" for setting in settings)), rows)


def _shown(one: Cell) -> tuple[str, ...]:
    ours = one.ours
    interval = "-"
    if ours is not None and ours.low != ours.high:
        interval = f"{_number(ours.low, one.unit)} to {_number(ours.high, one.unit)}"
    return (
        one.row,
        one.column,
        one.setting,
        "-" if one.paper is None else _number(one.paper, one.unit),
        _ours(one),
        interval,
        "-" if one.ratio is None else f"{one.ratio:.2f}",
        "-" if ours is None else str(ours.count),
        _remark(one),
    )


def _ours(one: Cell) -> str:
    return "-" if one.ours is None else _number(one.ours.value, one.unit)


def _remark(one: Cell) -> str:
    return one.absent or (one.source if one.paper is None else "")


def _number(value: float, unit: str) -> str:
    if unit == "%":
        return f"{value:.1f} %"
    if unit == "x":
        return f"x{value:.2f}"
    return f"{value:.3g} s" if unit == "s" else f"{value:.2f}"


def to_csv(cells: Sequence[Cell]) -> str:
    """The text of paper.csv: every cell."""
    heads = ("item", "row", "column", "setting", "unit", "paper", "ours", "low", "high", "count",
             "ratio", "absent", "source")  # fmt: skip
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(heads)
    for one in cells:
        ours = one.ours
        numbers = (ours.value, ours.low, ours.high, ours.count) if ours else ("",) * 4
        where = (one.item, one.row, one.column, one.setting, one.unit, one.paper)
        writer.writerow((*where, *numbers, one.ratio, one.absent, one.source))
    return stream.getvalue()


def to_json(cells: Sequence[Cell]) -> str:
    """The cells as one JSON document."""
    value = {
        "schema": "ksopt.bench.paper/1",
        "cells": [asdict(one) | {"ratio": one.ratio} for one in cells],
    }
    return json.dumps(value, indent=2) + "\n"
