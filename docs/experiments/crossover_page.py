"""Writes the maps of docs/crossover.md and their pictures from `ksopt bench crossover`'s folders.

    python docs/experiments/crossover_page.py

Each folder of docs/data/crossover is the ``--out`` of a run: rows.jsonl and setting.json. The page
has each map over dense, with its picture, and those of 16 bit over FP8 dense, too.
docs/data/crossover.csv has a line for each layer and budget of all folders.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ksopt.bench import journal
from ksopt.bench.crossover import report, views
from ksopt.bench.crossover.options import CrossoverOptions
from ksopt.bench.crossover.request import CrossoverRequest, Plane, Site
from ksopt.bench.crossover.results import DENSE, FORM, RIVALS, SiteResult
from ksopt.report import drawing_style
from ksopt.report.document import Figure

DOCS = Path(__file__).resolve().parents[1]
DATA, PAGE, PICTURES = DOCS / "data" / "crossover", DOCS / "crossover.md", DOCS / "pictures"
BEGIN, END = "<!-- begin crossover -->\n", "<!-- end crossover -->"


@dataclass(frozen=True)
class Run:
    """A folder: its name, the request with the maps of all runs, the measurements, and the runs."""

    name: str
    request: CrossoverRequest
    measured: Mapping[Site, SiteResult]
    runs: Sequence[Mapping[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> Run:
        """The run of a folder, on any machine."""
        setting = journal.read_setting(folder, FORM)
        runs = setting["runs"]
        budgets = ",".join(setting["identity"]["budgets"])
        request = CrossoverRequest.of(CrossoverOptions(device="cpu", budgets=budgets))
        request = request.with_grids([run["grid"] for run in runs])
        return cls(folder.name, request, journal.read_lines(folder, FORM), runs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.parse_args(arguments)
    every = folders()
    for run in every:
        for plane in dict.fromkeys(plane for plane, _ in shown(run)):
            drawing = drawing_style.standalone(drawn(run, plane).wide)
            (PICTURES / f"{picture(run, plane)}.svg").write_text(drawing, encoding="utf-8")
    lines = [views.to_csv(views.cells(run.request, run.measured), run.request, run.measured)
             .splitlines(keepends=True) for run in every]  # fmt: skip
    table = [*lines[0][:1], *(line for of_run in lines for line in of_run[1:])]
    DATA.with_suffix(".csv").write_text("".join(table), encoding="utf-8")
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(before + BEGIN + maps() + END + rest.split(END)[1], encoding="utf-8")
    return 0


def folders() -> list[Run]:
    """The runs that are stored, by name."""
    return [Run.read(folder) for folder in sorted(DATA.iterdir()) if folder.is_dir()]


def shown(run: Run) -> Iterator[tuple[Plane, str]]:
    """The maps of a run that have a measured layer, each with a rival; over dense first."""
    cells = views.cells(run.request, run.measured)
    for plane in run.request.planes:
        own = [cell for cell in cells if cell.site.plane == plane]
        for rival in RIVALS:
            if any(cell.best(rival) is not None for cell in own):
                yield plane, rival


def picture(run: Run, plane: Plane) -> str:
    """The name of a map's picture, without a suffix."""
    return f"crossover-{run.name}-{plane.pass_}-{plane.precision}"


def drawn(run: Run, plane: Plane) -> Figure:
    """The picture of a map."""
    return report.drawn(plane, views.cells(run.request, run.measured), run.request)


def maps() -> str:
    """The section of the page: of each run its device, and its maps over each rival."""
    blocks = []
    for run in folders():
        cells = views.cells(run.request, run.measured)
        blocks.append(_about(run))
        for plane, rival in shown(run):
            blocks.append(f"### {str(plane).capitalize()}, over {RIVALS[rival]}")
            blocks.append(views.map_table(plane, cells, run.request, rival).markdown())
            if rival == DENSE:
                blocks.append(f"![{plane}](pictures/{picture(run, plane)}.svg)")
    return "\n\n".join(blocks) + "\n"


def _about(run: Run) -> str:
    lines = [
        f"`{one['command']}` on {one['device']['name']} (torch {one['device']['torch']}, commit "
        f"{one['device']['commit']})"
        for one in run.runs
    ]
    faults = [fault for result in run.measured.values() for fault in result.faults]
    shown = f" Without a time: {'; '.join(faults)}." if faults else ""
    return f"{'; '.join(lines)}: {len(run.measured)} of {len(run.request.sites)} layers.{shown}"


if __name__ == "__main__":
    sys.exit(main())
