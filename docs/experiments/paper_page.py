"""Writes the results of docs/paper.md, and their pictures, from the folder of `ksopt bench paper`.

    python docs/experiments/paper_page.py                # reads docs/data/paper, writes the page
    python docs/experiments/paper_page.py --rows rows-*  # prints a table

docs/data/paper is the ``--out`` of a run: asked.json, and rows.jsonl and setting.json of each part;
energy in 16 bit and the ViTs of Table 6 in TF32 and bfloat16 are of two later runs, copied into it.
The page compares the paper's own dtypes with the paper, and has our numbers of the others;
docs/data/paper.csv has all, with intervals. That run measured a sample of the patterns; a second
part of the page, "All 627 patterns", is from docs/data/kernels-DTYPE-LAYOUT.csv. With --rows it
prints, of runs that differ in ``--batch``, how well (b+c)/(bc) predicts at each number of rows.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ksopt.bench import results_log
from ksopt.bench.reproduction import heuristic, paper_comparison, product_tables, report
from ksopt.bench.reproduction.paper_comparison import Cell
from ksopt.bench.reproduction.product_tables import RIVALS
from ksopt.bench.reproduction.products import FIRST, KERNEL, LAST, NAMES, Product
from ksopt.bench.reproduction.results import Results
from ksopt.bench.reproduction.saved_request import SavedRequest
from ksopt.bench.reproduction.tables_and_figures import ENERGY, Item
from ksopt.measure.measurement import quantile
from ksopt.patterns.chain import Chain
from ksopt.report import tables
from ksopt.report.document import Section

DOCS = Path(__file__).resolve().parents[1]
DATA, PAGE, PICTURES = DOCS / "data" / "paper", DOCS / "paper.md", DOCS / "pictures"
BEGIN, END = "<!-- begin paper -->\n", "<!-- end paper -->"
FULL_BEGIN, FULL_END = "<!-- begin full -->\n", "<!-- end full -->"
_TITLES = ("The heuristic", "The cost models", "Sparsity")
_PAPERS = ("float32", "float16")
_FEW = 2


@dataclass(frozen=True)
class KernelTable:
    """A stored table of `ksopt bench kernels --patterns paper`.

    It has kernel in one layout, and PyTorch's ways in both, in turns with it.

    Attributes:
        dtype: of the products.
        layout: of kernel.
        commits: that measured it.
    """

    dtype: str
    layout: str
    commits: str

    def rows(self) -> list[dict[str, str]]:
        """The lines of the ways that the paper has."""
        path = DOCS / "data" / f"kernels-{self.dtype}-{self.layout}.csv"
        with path.open(encoding="utf-8", newline="") as stream:
            return [row for row in csv.DictReader(stream) if row["way"] in NAMES]


TABLES = (
    KernelTable("float32", FIRST, "d67a8bb, 82 patterns at e8fc34d"),
    KernelTable("float32", LAST, "747260c"),
    KernelTable("float16", FIRST, "e8fc34d"),
    KernelTable("float16", LAST, "48953a4, 11 patterns at 5c73ee6"),
    KernelTable("bfloat16", FIRST, "e8fc34d"),
)
_BOUND = re.compile(r"at least (\d+) us")
_WRITTEN = re.compile(r"it would write ([\d,]+) weights")
_BEST_OF_BOTH = {"Table 3": "float32", "Table 8": "float16"}
_FULL_ROWS = {
    "kernel, bmm, einsum, bsr < dense, sparse": "kernel, bmm, einsum < dense",
    "bmm < einsum, bsr": "bmm < einsum",
    "kernel < all others": "kernel < bmm, einsum, dense",
}


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
    text = PAGE.read_text(encoding="utf-8")
    for begin, end, block in ((BEGIN, END, results(DATA)), (FULL_BEGIN, FULL_END, full(DATA))):
        before, rest = text.split(begin)
        text = before + begin + block + end + rest.split(end)[1]
    PAGE.write_text(text, encoding="utf-8")
    return 0


def results(folder: Path) -> str:
    """The section of the page: devices, the paper's numbers beside ours, figures, heuristic."""
    run, saved = Results.read(folder), SavedRequest.read(folder)
    page, cells = report.sections(run, saved)
    blocks = [_devices(folder), *_counts(run), "### Each dtype", overview(run).markdown()]
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
        if item.needs == ENERGY:
            blocks += _energy(run, page, item)
    # In the paper's dtypes: the page is long, and a report of the command has the others.
    papers = {dtype: of for dtype, of in run.products.items() if dtype in _PAPERS}
    blocks += _shown(report.sections(replace(run, products=papers), saved)[0], _TITLES)
    return "\n\n".join(blocks) + "\n"


def _shown(page: Sequence[Section], titles: str | tuple[str, ...]) -> Iterator[str]:
    """The sections whose titles begin so, without figures."""
    for section in page:
        if section.title.startswith(titles) and section.table is not None:
            yield from (f"### {section.title}", *section.paragraphs, section.table.markdown())


def _energy(run: Results, page: Sequence[Section], item: Item) -> Iterator[str]:
    """Idle power, and the energy of a call and of a token."""
    for section in page:
        if section.title.startswith(f"{item.name} ("):
            yield from section.paragraphs
    yield (
        "In the next table a token is a row of x, numbers are medians of the patterns, and each "
        "way is in its better layout. Medians of other numbers of patterns are not comparable: "
        "bsr has no energy on some patterns, and some dtypes were measured on fewer."
    )
    for section in page:
        if section.title.startswith("Energy of a call") and section.table is not None:
            yield from (f"#### {section.title}", _plain(section.table).markdown())


def _plain(table: tables.Table) -> tables.Table:
    """A table whose large numbers have no exponents."""
    rows = [[f"{float(cell):g}" if "e+" in cell else cell for cell in row] for row in table.rows]
    return tables.of(table.columns, rows)


def _in_others(cells: Sequence[Cell]) -> Iterator[str]:
    """Our numbers in the dtypes that the paper lacks: a sentence if they are few, or a table."""
    # Table 6 has the dtype in the name of its numbers, too: a column for each dtype is enough.
    named = [replace(one, column=one.column.removeprefix(f"{one.setting} ")) for one in cells]
    table = paper_comparison.by_setting(named)
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


def _devices(folder: Path) -> str:
    """The devices and commits of the runs, and which parts each but the first measured."""
    parts: dict[str, list[str]] = {}
    for path in sorted(folder.glob(f"*/{results_log.SETTING}")):
        for one in json.loads(path.read_text(encoding="utf-8"))["runs"]:
            device = one["device"]
            name = (
                f"{device['name']} (torch {device['torch']}, driver {device['driver']}, "
                f"commit {device['commit']})"
            )
            parts.setdefault(name, []).append(path.parent.name)
    first, *others = sorted(parts, key=lambda name: len(parts[name]), reverse=True)
    later = "".join(f"; {', '.join(dict.fromkeys(parts[one]))} on {one}" for one in others)
    return f"Measured on {first}{later}."


def _counts(run: Results) -> Iterator[str]:
    products = ", ".join(f"{len(of)} ({dtype})" for dtype, of in run.products.items())
    energies = ", ".join(f"{len(of)} ({dtype})" for dtype, of in run.energies.items())
    yield f"Patterns whose products were timed: {products or 'none'}; energy: {energies or 'none'}."
    if run.faults:
        yield "Faults of ksopt, which have no times: " + "; ".join(run.faults) + "."


def overview(run: Results) -> tables.Table:
    """The share of patterns where kernel is the fastest way, and by how much, by dtype."""
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


def full(folder: Path) -> str:
    """All patterns beside the paper, from the stored tables; ``folder`` has the sample's run."""
    by_dtype = {dtype: products(dtype) for dtype in dict.fromkeys(one.dtype for one in TABLES)}
    cells: list[Cell] = []
    for item, dtype in _BEST_OF_BOTH.items():
        cells += product_tables.contests(item, by_dtype[dtype], dtype, len(by_dtype[dtype]), True)
    for dtype, of in by_dtype.items():
        cells += product_tables.by_layout("Table 5", of, dtype, len(of), dtype == "float32")
    shown = [replace(one, row=f"{one.item}: {_FULL_ROWS.get(one.row, one.row)}") for one in cells]
    where = "; ".join(f"{one.dtype} {one.layout} at {one.commits}" for one in TABLES)
    blocks = [
        f"Measured on NVIDIA H200s (torch 2.11, CUDA 13.0, driver 580.159.04): {where}.",
        *_missing(Results.read(folder), by_dtype),
        _wins(by_dtype),
        _without(paper_comparison.table(shown), "95 % interval").markdown(),
        *_heuristic({dtype: by_dtype[dtype] for dtype in _BEST_OF_BOTH.values()}),
    ]
    return "\n\n".join(blocks) + "\n"


def _heuristic(products: Mapping[str, Sequence[Product]]) -> Iterator[str]:
    """The rank correlation of (b+c)/(bc) with speed-ups, over all and within classes of width."""
    ranks = ", ".join(
        f"{heuristic.spearman(heuristic.RHO, of, RIVALS)} in {dtype}"
        for dtype, of in products.items()
    )
    yield (
        "Spearman's rank correlation of (b+c)/(bc) with the speed-up of kernel over the others is, "
        f"of all patterns, {ranks}; within classes of width, the larger of M and N:"
    )
    yield _without(heuristic.by_width(products), "Spearman of the cost models").markdown()


def products(dtype: str) -> list[Product]:
    """All patterns: ways in a layout are from the table in which kernel has that layout.

    Where there is no such table, PyTorch's are from the other one, and kernel has no time.
    """
    times: dict[str, dict[tuple[str, str], float]] = {}
    batch = 0
    for table in (one for one in TABLES if one.dtype == dtype):
        for row in table.rows():
            batch = int(row["batch"])
            own = times.setdefault(row["chain"], {})
            key = NAMES[row["way"]], row["layout"]
            if row["median_us"] and (key not in own or row["layout"] == table.layout):
                own[key] = float(row["median_us"])
    return [Product(Chain.parse(chain)[0], own, {}, {}, batch) for chain, own in times.items()]


def _missing(sample: Results, products: Mapping[str, Sequence[Product]]) -> Iterator[str]:
    """The limits of these tables, and how much they matter."""
    shared = [dtype for dtype in products if dtype in sample.products]
    losers = ", ".join(
        f"{sum(_best_other(one) in ('bsr', 'sparse') for one in sample.products[dtype])} of "
        f"{len(sample.products[dtype])} in {dtype}"
        for dtype in shared
    )
    yield (
        "**bsr and sparse are missing**: they were not among the ways. In the sample of the "
        f"results below one of them is the fastest of the others on {losers}."
    )
    counts = ", ".join(
        f"{sum(one.least_us(('dense',)) is not None for one in of)} ({dtype})"
        for dtype, of in products.items()
    )
    least_ratio, least_elements = _dense_limits(products)
    yield (
        f"**dense has a time on some patterns only**: {counts} of {len(products['float32'])}. "
        "It was not tried on the others, for one of two reasons: its arithmetic alone takes, at "
        f"the peak of the device, {least_ratio:.1f} times as long as kernel or longer; or the "
        f"matrix has {least_elements:,} elements or more, zeros included. There kernel is compared "
        "with bmm and einsum alone."
    )
    lacking = ", ".join(
        f"{dtype} {layout}"
        for dtype in products
        for layout in (FIRST, LAST)
        if (dtype, layout) not in {(one.dtype, one.layout) for one in TABLES}
    )
    yield f"**kernel has no time in {lacking}**, so that bfloat16 has no better layout."


def _wins(products: Mapping[str, Sequence[Product]]) -> str:
    """The share where kernel is fastest, each way in its better layout, and its loss elsewhere."""
    sentences = []
    for dtype in _BEST_OF_BOTH.values():
        ratios = _speed_ups(products[dtype], RIVALS)
        won = sum(ratio > 1 for ratio in ratios)
        lost = f"; on the others it takes at most {1 / ratios[0]:.2f} times as long as the fastest"
        sentences.append(
            f"In {dtype} kernel is the fastest way on {won} of {len(ratios)} patterns"
            f"{lost if won < len(ratios) else ''}."
        )
    return " ".join(sentences)


def _best_other(product: Product) -> str:
    """The fastest way beside kernel."""
    others = {key: us for key, us in product.times_us.items() if key[0] in RIVALS}
    return min(others, key=others.__getitem__)[0]


def _dense_limits(products: Mapping[str, Sequence[Product]]) -> tuple[float, int]:
    """The limits of dense where it was not tried: least time over kernel's, least elements."""
    kernels = {
        (dtype, str(one.pattern)): one.times_us for dtype, of in products.items() for one in of
    }
    ratios, elements = [], []
    for table in TABLES:
        for row in table.rows():
            if row["way"] != "dense" or row["layout"] != table.layout or row["median_us"]:
                continue
            kernel_us = kernels[table.dtype, row["chain"]][KERNEL, table.layout]
            if bound := _BOUND.search(row["reason"]):
                ratios.append(float(bound[1]) / kernel_us)
            elif written := _WRITTEN.search(row["reason"]):
                elements.append(int(written[1].replace(",", "")))
    return min(ratios), min(elements)


def _without(table: tables.Table, head: str) -> tables.Table:
    """A table without one of its columns."""
    places = [place for place, one in enumerate(table.heads) if one != head]
    rows = [tuple(row[place] for place in places) for row in table.rows]
    return tables.of([table.columns[place] for place in places], rows)


def rows_table(folders: Sequence[Path]) -> str:
    """The prediction of kernel's speed-up by (b+c)/(bc), by rows of x and dtype."""
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
