"""Writes the maps of docs/crossover.md and their pictures from crossover.csv of runs.

    python docs/experiments/crossover_page.py

docs/data/crossover-h100.csv, crossover-h200.csv and crossover-fp8-h100.csv are crossover.csv of
runs of `ksopt bench crossover`. The page has each map of the first two over dense, and those of 16
bit over FP8 dense, with their pictures; of the third it has a line for each measured layer.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ksopt.bench.crossover import report, views
from ksopt.bench.crossover.options import CrossoverOptions
from ksopt.bench.crossover.request import CrossoverRequest, Plane, Site
from ksopt.bench.crossover.results import DENSE, FP8, FP8_PRODUCT, RIVALS
from ksopt.bench.crossover.views import MEASURED, Cell
from ksopt.report import drawing_style, tables
from ksopt.report.document import Figure
from ksopt.report.tables import Table

DOCS = Path(__file__).resolve().parents[1]
MAPS, LAYERS = DOCS / "data" / "crossover-h100.csv", DOCS / "data" / "crossover-fp8-h100.csv"
MAPS_H200, SUFFIX_H200 = DOCS / "data" / "crossover-h200.csv", "-h200"
PAGE, PICTURES = DOCS / "crossover.md", DOCS / "pictures"
BEGIN, END = "<!-- begin {} -->\n", "<!-- end {} -->"
_COLUMNS = {
    DENSE: "speed_up",
    FP8: "speed_up_over_fp8",
    FP8_PRODUCT: "speed_up_over_fp8_product",
}
_SHOWN = ("25%", "12.5%")

Line = Mapping[str, str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.parse_args(arguments)
    for _, _, figure in (*shown_maps(MAPS), *shown_maps(MAPS_H200, SUFFIX_H200)):
        text = drawing_style.standalone(figure.wide)
        (PICTURES / f"{figure.name}.svg").write_text(text, encoding="utf-8")
    text = PAGE.read_text(encoding="utf-8")
    for name, block in blocks().items():
        begin, end = BEGIN.format(name), END.format(name)
        before, rest = text.split(begin)
        text = before + begin + block + end + rest.split(end)[1]
    PAGE.write_text(text, encoding="utf-8")
    return 0


def blocks() -> dict[str, str]:
    """The generated parts of the page, by name."""
    return {
        "maps": maps(shown_maps(MAPS)),
        "h200": maps(shown_maps(MAPS_H200, SUFFIX_H200)),
        "layers": layers().markdown() + "\n",
    }


def read(file: Path) -> list[Line]:
    """The lines of a crossover.csv: one for each layer and budget."""
    with file.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def cells_of(lines: Sequence[Line]) -> dict[Site, Cell]:
    """The layers of a crossover.csv."""
    cells: dict[Site, Cell] = {}
    for line in lines:
        plane = Plane(line["precision"], line["pass"])
        site = Site(plane, int(line["width"]), int(line["rows"]))
        empty: dict[str, dict[str, float]] = {rival: {} for rival in RIVALS}
        cell = cells.get(site, Cell(site, line["status"], empty))
        over = {
            rival: {**known, line["budget"]: float(line[_COLUMNS[rival]])}
            if line.get(_COLUMNS[rival])
            else known
            for rival, known in cell.over.items()
        }
        cells[site] = Cell(site, cell.status, over)
    return cells


def request_of(lines: Sequence[Line]) -> CrossoverRequest:
    """The request with the maps, widths and rows of a crossover.csv."""
    budgets = ",".join(dict.fromkeys(line["budget"] for line in lines))
    request = CrossoverRequest.of(CrossoverOptions(device="cpu", budgets=budgets))
    planes = dict.fromkeys((line["precision"], line["pass"]) for line in lines)
    grid = {
        "planes": list(planes),
        "widths": [line["width"] for line in lines],
        "rows": [line["rows"] for line in lines],
    }
    return request.with_grids([grid])


def shown_maps(file: Path, suffix: str = "") -> Iterator[tuple[str, Table, Figure]]:
    """Each map over dense, and over FP8 dense where that was measured: its words, table, picture.

    The words name the map and its rival. The pictures' names end in ``suffix``.
    """
    lines = read(file)
    request, cells = request_of(lines), list(cells_of(lines).values())
    for plane in request.planes:
        own = [cell for cell in cells if cell.site.plane == plane]
        for rival, words in RIVALS.items():
            if any(cell.best(rival) is not None for cell in own):
                table = views.map_table(plane, own, request, rival)
                figure = report.drawn(plane, own, request, rival)
                yield f"{plane}, over {words}", table, replace(figure, name=figure.name + suffix)


def maps(shown: Iterable[tuple[str, Table, Figure]]) -> str:
    """Maps as markdown."""
    parts = []
    for words, table, figure in shown:
        parts += [f"### {words[0].upper()}{words[1:]}", table.markdown()]
        parts.append(f"![Speed-up by width and rows: {words}](pictures/{figure.name}.svg)")
    return "\n\n".join(parts) + "\n"


def layers() -> Table:
    """The measured layers of the run beside FP8: microseconds, and speed-ups of two budgets."""
    lines = read(LAYERS)
    heads = ("features", ">rows", ">dense", ">FP8", ">FP8, x rounded before", *(
        f">{one}{what}"
        for one in _SHOWN
        for what in ("", " over dense", " over FP8", " over FP8, x rounded before")
    ))  # fmt: skip
    rows = []
    for site, cell in cells_of(lines).items():
        own = {line["budget"]: line for line in lines if _is_of(line, site)}
        first = next(iter(own.values()))
        if cell.status == MEASURED:
            values = [_us(first[name]) for name in ("dense_us", "fp8_us", "fp8_product_us")]
            for budget in _SHOWN:
                values.append(_us(own[budget]["ks_us"]))
                values += [_factor(cell.over[rival].get(budget)) for rival in RIVALS]
            rows.append((f"{site.width:,}", f"{site.rows:,}", *values))
    return tables.of(heads, rows)


def _is_of(line: Line, site: Site) -> bool:
    return (
        line["precision"],
        line["pass"],
        int(line["width"]),
        int(line["rows"]),
    ) == (site.plane.precision, site.plane.pass_, site.width, site.rows)


def _us(text: str) -> str:
    return f"{float(text):,.1f} us" if text else "-"


def _factor(speed_up: float | None) -> str:
    return "-" if speed_up is None else f"x{speed_up:.2f}"


if __name__ == "__main__":
    sys.exit(main())
