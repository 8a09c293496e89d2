"""A crossover map as cells, tables, CSV and heat maps: functions of the measurements."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp, log

from ksopt.bench.crossover import interpolation
from ksopt.bench.crossover.interpolation import Grid
from ksopt.bench.crossover.request import Budget, CrossoverRequest, Plane, Site
from ksopt.bench.crossover.results import DENSE, FP8, RIVALS, SiteResult
from ksopt.report import tables
from ksopt.report.tables import Table

MEASURED, BETWEEN, UNKNOWN = "measured", "interpolated", "not measured"


@dataclass(frozen=True)
class Cell:
    """A layer of a map.

    Attributes:
        site: the layer.
        status: "measured", "interpolated" from layers near it, or "not measured".
        over: speed-ups of each budget over each rival; unknown ones are absent.
    """

    site: Site
    status: str
    over: Mapping[str, Mapping[str, float]]

    @property
    def speed_ups(self) -> Mapping[str, float]:
        """The speed-ups of each budget over dense."""
        return self.over[DENSE]

    def largest(self, budgets: Sequence[Budget], rival: str = DENSE) -> Budget | None:
        """The largest budget that is faster than a rival; None if none is."""
        known = self.over[rival]
        return next((one for one in budgets if known.get(one.text, 0.0) > 1), None)

    def crossover(self, budgets: Sequence[Budget]) -> float | None:
        """The share of weights at which a chain is as fast as dense; None if no budget ties.

        Interpolated in logarithms between the two budgets on either side."""
        known = [one for one in budgets if one.text in self.speed_ups]
        for large, small in itertools.pairwise(known):
            above, below = log(self.speed_ups[large.text]), log(self.speed_ups[small.text])
            if above < 0 <= below:
                way = above / (above - below)
                return exp(log(large.share) + way * (log(small.share) - log(large.share)))
        return None

    def best(self, rival: str = DENSE) -> float | None:
        """The largest speed-up over a rival; None if none is known."""
        return max(self.over[rival].values(), default=None)


def cells(request: CrossoverRequest, measured: Mapping[Site, SiteResult]) -> list[Cell]:
    """The cells of every map, measured or not."""
    grid = Grid.of(request)
    logs = {
        (budget.text, rival): {
            site: value
            for site, result in measured.items()
            if (value := result.log_speed_up(budget.text, rival)) is not None
        }
        for budget in request.budgets
        for rival in RIVALS
    }
    every = []
    for site in request.sites:
        over: dict[str, dict[str, float]] = {}
        for rival in RIVALS:
            values = {
                budget.text: interpolation.estimate(grid, site, logs[budget.text, rival])
                if site not in measured
                else measured[site].log_speed_up(budget.text, rival)
                for budget in request.budgets
            }
            over[rival] = {name: exp(value) for name, value in values.items() if value is not None}
        status = MEASURED if site in measured else BETWEEN if over[DENSE] else UNKNOWN
        every.append(Cell(site, status, over))
    return every


def map_table(
    plane: Plane, cells: Sequence[Cell], request: CrossoverRequest, rival: str = DENSE
) -> Table:
    """The table of a map, over a rival: rows of x down, widths across."""
    by_site = {cell.site: cell for cell in cells}
    heads = ("rows of x", *(f">{width:,}" for width in request.widths))
    lines = [
        (f"{rows:,}", *(
            verdict(by_site[Site(plane, width, rows)], request.budgets, rival)
            for width in request.widths
        ))
        for rows in reversed(request.rows)
    ]  # fmt: skip
    return tables.of(heads, lines)


def verdict(cell: Cell, budgets: Sequence[Budget], rival: str = DENSE) -> str:
    """The largest budget that is faster than a rival, and the largest speed-up of any.

    ~ precedes an interpolated value, and - stands for an unknown one.
    """
    best = cell.best(rival)
    if best is None:
        return "-"
    about = "~" if cell.status == BETWEEN else ""
    largest = cell.largest(budgets, rival)
    return f"{about}{largest.text if largest else 'none'} x{best:.2f}"


def counts_table(cells: Sequence[Cell], request: CrossoverRequest) -> Table:
    """The number of layers measured in each map, and of those in which a chain wins."""
    heads = ("map", ">layers", ">measured", ">interpolated", ">not measured",
             ">faster than dense", ">faster than FP8 dense")  # fmt: skip
    lines = []
    for plane in request.planes:
        own = [cell for cell in cells if cell.site.plane == plane]
        sure = [cell for cell in own if cell.status == MEASURED]
        count = {status: sum(cell.status == status for cell in own)
                 for status in (MEASURED, BETWEEN, UNKNOWN)}  # fmt: skip
        wins = sum(cell.largest(request.budgets) is not None for cell in sure)
        with_fp8 = [cell for cell in sure if cell.over[FP8]]
        over = sum(cell.largest(request.budgets, FP8) is not None for cell in with_fp8)
        fp8_wins = f"{over} of {len(with_fp8)}" if with_fp8 else "no FP8 beside it"
        lines.append((str(plane), str(len(own)), *(str(one) for one in count.values()),
                      f"{wins} of {len(sure)}", fp8_wins))  # fmt: skip
    return tables.of(heads, lines)


def to_csv(
    cells: Sequence[Cell], request: CrossoverRequest, measured: Mapping[Site, SiteResult]
) -> str:
    """The text of crossover.csv: a line per layer and budget."""
    heads = (
        *("pass", "precision", "width", "rows", "budget", "chain", "status", "ks_us", "dense_us"),
        *("fp8_us", "fp8_product_us", "speed_up", "speed_up_over_fp8"),
        *("speed_up_over_fp8_product", "largest_faster_budget", "crossover_share"),
        "reason",
    )
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(heads)
    for cell in cells:
        site, result = cell.site, measured.get(cell.site)
        largest = cell.largest(request.budgets)
        for budget in request.budgets:
            way = result.way(budget.text) if result else None
            us = [result.us(name) if result else None for name in (budget.text, *RIVALS)]
            where = (site.plane.pass_, site.plane.precision, site.width, site.rows, budget.text)
            speed_ups = [cell.over[rival].get(budget.text) for rival in RIVALS]
            writer.writerow(
                (*where, way.chain if way else "", cell.status, *us, *speed_ups,
                 largest.text if largest else "", cell.crossover(request.budgets),
                 way.reason if way else "")
            )  # fmt: skip
    return stream.getvalue()


def to_json(cells: Sequence[Cell]) -> str:
    """The cells as one JSON document."""
    every = [asdict(cell) for cell in cells]
    return json.dumps({"schema": "ksopt.bench.crossover.cells/2", "cells": every}, indent=2) + "\n"
