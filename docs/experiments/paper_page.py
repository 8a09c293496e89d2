"""Writes the results of docs/paper.md, and their pictures, from the folder of `ksopt bench paper`.

    python docs/experiments/paper_page.py                # reads docs/data/paper, writes the page
    python docs/experiments/paper_page.py --rows rows-*  # prints a table

docs/data/paper is the ``--out`` of a run: asked.json, and rows.jsonl and setting.json of each part.
The page has every number of the paper's own dtypes; docs/data/paper.csv has all. With --rows it
prints, of runs that differ in ``--batch``, how well (b+c)/(bc) predicts at each number of rows.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from ksopt.bench.reproduction import heuristic, measured, paper_comparison, report
from ksopt.bench.reproduction.measured import Measured
from ksopt.bench.reproduction.product_tables import RIVALS
from ksopt.bench.reproduction.products import KERNEL
from ksopt.bench.reproduction.saved_request import SavedRequest
from ksopt.measure.measurement import quantile
from ksopt.report import tables

DOCS = Path(__file__).resolve().parents[1]
DATA, PAGE, PICTURES = DOCS / "data" / "paper", DOCS / "paper.md", DOCS / "pictures"
BEGIN, END = "<!-- begin paper -->\n", "<!-- end paper -->"
_TITLES = "The heuristic"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--rows", nargs="+", type=Path, metavar="FOLDER", help="print one table")
    args = parser.parse_args(arguments)
    if args.rows:
        print(rows_table(args.rows), end="")
        return 0
    with tempfile.TemporaryDirectory() as name:
        out = Path(name)
        report.write(measured.read(DATA), SavedRequest.read(DATA), out)
        shutil.copy(out / "paper.csv", DATA.with_suffix(".csv"))
        for picture in pictures(DATA):
            shutil.copy(out / "figures" / f"{picture}.svg", PICTURES / f"paper-{picture}.svg")
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(before + BEGIN + results(DATA) + END + rest.split(END)[1], encoding="utf-8")
    return 0


def results(folder: Path) -> str:
    """The section of the page: devices, the paper's numbers beside ours, figures, heuristic."""
    run, saved = measured.read(folder), SavedRequest.read(folder)
    page, cells = report.sections(run, saved)
    blocks = [_devices(run), *_counts(run)]
    drawn = pictures(folder)
    for item in saved.items:
        own = [one for one in cells if one.item == item.name and one.setting in item.dtypes]
        blocks += [f"### {item.name}: {item.title[0].lower()}{item.title[1:]}",
                   paper_comparison.table(own).markdown()]  # fmt: skip
        number = f"figure-{item.number}-"
        if item.kind == "figure":
            blocks += [f"![{item.name}](pictures/paper-{name}.svg)"
                       for name in drawn if name.startswith(number)]  # fmt: skip
    for section in page:
        if section.title.startswith(_TITLES) and section.table is not None:
            blocks += [f"### {section.title}", *section.paragraphs, section.table.markdown()]
    return "\n\n".join(blocks) + "\n"


def pictures(folder: Path) -> list[str]:
    """The names of the figures in the paper's dtypes, without a suffix."""
    run, saved = measured.read(folder), SavedRequest.read(folder)
    page, _ = report.sections(run, saved)
    names = {f"figure-{item.number}-{dtype}" for item in saved.items for dtype in item.dtypes}
    return [section.figure.name for section in page
            if section.figure is not None and section.figure.name in names]  # fmt: skip


def _devices(run: Measured) -> str:
    devices = dict.fromkeys(
        f"{one['device']['name']} (torch {one['device']['torch']}, driver "
        f"{one['device']['driver']}, commit {one['device']['commit']})"
        for one in run.runs
    )
    return f"Measured on {'; '.join(devices)}."


def _counts(run: Measured) -> Iterator[str]:
    products = ", ".join(f"{len(of)} in {dtype}" for dtype, of in run.products.items())
    energies = ", ".join(f"{len(of)} in {dtype}" for dtype, of in run.energies.items())
    yield f"Products of {products or 'no'} patterns; energy of {energies or 'no'} patterns."
    if run.faults:
        yield "Faults, which have no times: " + "; ".join(run.faults) + "."


def rows_table(folders: Sequence[Path]) -> str:
    """How well (b+c)/(bc) predicts the speed-up of kernel, by rows of x and dtype."""
    heads = ("rows", "dtype", ">patterns", ">kernel is fastest", ">median speed-up",
             ">Spearman of (b+c)/(bc)", ">Spearman of the cost models")  # fmt: skip
    lines: list[tuple[int, tuple[str, ...]]] = []
    for folder in folders:
        for dtype, products in measured.read(folder).products.items():
            ratios = sorted(
                ratio for one in products if (ratio := one.speed_up((KERNEL,), RIVALS)) is not None
            )
            if ratios:
                ranks = [heuristic.spearman(one, products, RIVALS)
                         for one in (heuristic.RHO, heuristic.MODELS)]  # fmt: skip
                won = sum(ratio > 1 for ratio in ratios) / len(ratios)
                cells = (str(len(ratios)), f"{won:.0%}", f"x{quantile(ratios, 0.5):.2f}", *ranks)
                lines.append((products[0].batch, (dtype, *cells)))
    shown = [(f"{rows:,}", *rest) for rows, rest in sorted(lines)]
    return tables.of(heads, shown).markdown() + "\n"


if __name__ == "__main__":
    sys.exit(main())
