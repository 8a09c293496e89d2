"""Writes the results of docs/paper.md, and their pictures, from the folder of `ksopt bench paper`.

    python docs/experiments/paper_page.py                # reads docs/data/paper, writes the page
    python docs/experiments/paper_page.py --rows rows-*  # prints a table

docs/data/paper is the ``--out`` of a run: asked.json, and rows.jsonl and setting.json of each part.
The page compares the paper's own dtypes with the paper, and has our numbers of the others;
docs/data/paper.csv has all, with intervals. With --rows it
prints, of runs that differ in ``--batch``, how well (b+c)/(bc) predicts at each number of rows.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ksopt.bench.reproduction import heuristic, paper_comparison, report
from ksopt.bench.reproduction.paper_comparison import Cell
from ksopt.bench.reproduction.product_tables import RIVALS
from ksopt.bench.reproduction.products import KERNEL, Product
from ksopt.bench.reproduction.results import Results
from ksopt.bench.reproduction.saved_request import SavedRequest
from ksopt.measure.measurement import quantile
from ksopt.report import tables
from ksopt.report.document import Section

DOCS = Path(__file__).resolve().parents[1]
DATA, PAGE, PICTURES = DOCS / "data" / "paper", DOCS / "paper.md", DOCS / "pictures"
BEGIN, END = "<!-- begin paper -->\n", "<!-- end paper -->"
_TITLES = ("The heuristic", "The cost models", "Sparsity")
_PAPERS = ("float32", "float16")
_FEW = 2


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
        report.write(Results.read(DATA), SavedRequest.read(DATA), out)
        shutil.copy(out / "paper.csv", DATA.with_suffix(".csv"))
        for picture in pictures(DATA):
            shutil.copy(out / "figures" / f"{picture}.svg", PICTURES / f"paper-{picture}.svg")
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(before + BEGIN + results(DATA) + END + rest.split(END)[1], encoding="utf-8")
    return 0


def results(folder: Path) -> str:
    """The section of the page: devices, the paper's numbers beside ours, figures, heuristic."""
    run, saved = Results.read(folder), SavedRequest.read(folder)
    page, cells = report.sections(run, saved)
    blocks = [_devices(run), *_counts(run), "### Each dtype", overview(run).markdown()]
    blocks += _losses(run)
    blocks += _shown(page, report.ABSENT)
    drawn = pictures(folder)
    for item in saved.items:
        own = [one for one in cells if one.item == item.name and one.setting in item.dtypes]
        blocks += [f"### {item.name}: {item.title}", paper_comparison.table(own).markdown()]
        others = [one for one in cells if one.item == item.name and one.setting not in item.dtypes]
        if others:
            blocks += _in_others(others)
        number = f"figure-{item.number}-"
        if item.kind == "figure":
            blocks += [f"![{item.name}](pictures/paper-{name}.svg)"
                       for name in drawn if name.startswith(number)]  # fmt: skip
    # In the paper's dtypes: the page is long, and a report of the command has the others.
    papers = {dtype: of for dtype, of in run.products.items() if dtype in _PAPERS}
    blocks += _shown(report.sections(replace(run, products=papers), saved)[0], _TITLES)
    return "\n\n".join(blocks) + "\n"


def _shown(page: Sequence[Section], titles: str | tuple[str, ...]) -> Iterator[str]:
    """The sections whose titles begin so, without figures."""
    for section in page:
        if section.title.startswith(titles) and section.table is not None:
            yield from (f"### {section.title}", *section.paragraphs, section.table.markdown())


def _in_others(cells: Sequence[Cell]) -> Iterator[str]:
    """Our numbers in the dtypes that the paper lacks: a sentence if they are few, or a table."""
    table = paper_comparison.by_setting(cells)
    if len(table.rows) > _FEW:
        yield from ("In other dtypes:", table.markdown())
        return
    yield (
        "In other dtypes: "
        + "; ".join(
            f"{row}, {column}: "
            + ", ".join(f"{head} {one}" for head, one in zip(table.heads[2:], ours, strict=True))
            for row, column, *ours in table.rows
        )
        + "."
    )


def pictures(folder: Path) -> list[str]:
    """The names of the figures in the paper's dtypes, without a suffix."""
    run, saved = Results.read(folder), SavedRequest.read(folder)
    page, _ = report.sections(run, saved)
    names = {f"figure-{item.number}-{dtype}" for item in saved.items for dtype in item.dtypes}
    return [section.figure.name for section in page
            if section.figure is not None and section.figure.name in names]  # fmt: skip


def _devices(run: Results) -> str:
    devices = dict.fromkeys(
        f"{one['device']['name']} (torch {one['device']['torch']}, driver "
        f"{one['device']['driver']}, commit {one['device']['commit']})"
        for one in run.runs
    )
    return f"Measured on {'; '.join(devices)}."


def _counts(run: Results) -> Iterator[str]:
    products = ", ".join(f"{len(of)} ({dtype})" for dtype, of in run.products.items())
    energies = ", ".join(f"{len(of)} ({dtype})" for dtype, of in run.energies.items())
    yield f"Patterns whose products were timed: {products or 'none'}; energy: {energies or 'none'}."
    if run.faults:
        yield "Faults of ksopt, which have no times: " + "; ".join(run.faults) + "."


def overview(run: Results) -> tables.Table:
    """How often kernel is the fastest of all ways, and by how much, by dtype."""
    heads = ("dtype", ">patterns", ">kernel is fastest", ">median speed-up over the best other way",
             ">least", ">over dense")  # fmt: skip
    rows = []
    for dtype, products in run.products.items():
        ratios, dense = _speed_ups(products, RIVALS), _speed_ups(products, ("dense",))
        if ratios:
            over_dense = f"x{quantile(dense, 0.5):.2f}" if dense else "-"
            won = sum(one > 1 for one in ratios)
            cells = (str(len(ratios)), str(won), f"x{quantile(ratios, 0.5):.2f}",
                     f"x{ratios[0]:.2f}", over_dense)  # fmt: skip
            rows.append((dtype, *cells))
    return tables.of(heads, rows)


def _speed_ups(products: Sequence[Product], others: Sequence[str]) -> list[float]:
    """The speed-ups of kernel over the best of other ways, ascending."""
    ratios = (one.speed_up((KERNEL,), others) for one in products)
    return sorted(ratio for ratio in ratios if ratio is not None)


def _losses(run: Results) -> Iterator[str]:
    """The patterns on which another way is faster than kernel."""
    losses = []
    for dtype, products in run.products.items():
        for one in products:
            ratio = one.speed_up((KERNEL,), RIVALS)
            if ratio is not None and ratio <= 1:
                (way, layout), us = min(
                    ((key, us) for key, us in one.times_us.items() if key[0] in RIVALS),
                    key=lambda pair: pair[1],
                )
                kernel = one.least_us((KERNEL,))
                losses.append(f"{dtype} {one.pattern}: {kernel:.2f} us, {way} {us:.2f} ({layout})")
    if losses:
        yield "Another way is as fast as kernel, or faster, on: " + "; ".join(losses) + "."


def rows_table(folders: Sequence[Path]) -> str:
    """How well (b+c)/(bc) predicts the speed-up of kernel, by rows of x and dtype."""
    heads = ("rows", "dtype", ">patterns", ">kernel is fastest", ">median speed-up",
             ">Spearman of (b+c)/(bc)", ">Spearman of the cost models")  # fmt: skip
    lines: list[tuple[int, tuple[str, ...]]] = []
    for folder in folders:
        for dtype, products in Results.read(folder).products.items():
            ratios = _speed_ups(products, RIVALS)
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
