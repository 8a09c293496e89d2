"""The output of `ksopt bench paper`: a page, markdown, every cell as CSV, the figures as files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ksopt.bench import results as kernel_results
from ksopt.bench.reproduction import (
    energy_tables,
    figures,
    heuristic,
    missing_measurements,
    model_tables,
    paper_comparison,
    product_tables,
)
from ksopt.bench.reproduction.module_cases import names
from ksopt.bench.reproduction.paper_comparison import Cell
from ksopt.bench.reproduction.products import Product
from ksopt.bench.reproduction.results import Results
from ksopt.bench.reproduction.saved_request import SavedRequest
from ksopt.bench.reproduction.tables_and_figures import ENERGY, MODELS, PRODUCTS, SIZES, Item
from ksopt.measure.device import DeviceRecord
from ksopt.measure.measurement import quantile
from ksopt.report import document, output_folder, tables
from ksopt.report.document import Section

_TITLE = "The paper's tables and figures, measured with ksopt"
_ENERGY_TEXT = (
    "Energy is what the GPU's own counter (NVML) says while a call is repeated without a pause, "
    "of the whole board. Idle power is what the board drew, its context kept, just before."
)
ABSENT = "Ways without a time"
_ABSENT_TEXT = "Patterns for which a way has no time or energy, in batch_first + in batch_last."


@dataclass(frozen=True)
class View:
    """The sections of a table or figure on the page, and its cells."""

    sections: tuple[Section, ...]
    cells: tuple[Cell, ...]


def view(item: Item, results: Results, request: SavedRequest) -> View:
    """The view of a table or figure, in the paper's dtypes and in each measured one."""
    if item.needs in (MODELS, SIZES):
        kind = model_tables.modules if item.needs == MODELS else model_tables.sizes
        dtypes = item.dtypes + tuple(
            dict.fromkeys(
                subject.dtype
                for subject in results.cases
                if subject.dtype not in item.dtypes and subject.name in names(item.needs)
            )
        )
        cells = kind(item.name, results.cases, dtypes, request.is_small)
        return View((Section(_head(item), (), (), paper_comparison.table(cells)),), tuple(cells))
    by_dtype = results.products if item.needs == PRODUCTS else results.energies
    others = _others(item, by_dtype, request)
    numbers: list[Cell] = []
    drawn: list[Section] = []
    for dtype in (*item.dtypes, *others):
        products = by_dtype.get(dtype, ())
        numbers += _cells(item, products, dtype, request)
        if item.kind == "figure":
            data = figures.box_plot_of(item, products, dtype)
            if not data.is_empty:
                title = f"{item.name}, {dtype}: {item.title}"
                drawn.append(Section(title, figure=data.figure(), table=data.table()))
    texts = (_ENERGY_TEXT, *_idle(results)) if item.needs == ENERGY else ()
    head = Section(_head(item), (), texts, paper_comparison.table(numbers))
    if item.needs == ENERGY and any(results.energies.values()):
        table = energy_tables.by_way(results.energies)
        drawn.append(Section("Energy of a call and of a token", table=table))
    return View((head, *drawn), tuple(numbers))


def _others(item: Item, by_dtype: Mapping[str, object], request: SavedRequest) -> tuple[str, ...]:
    """The measured dtypes that neither the paper's own table or figure has nor its twin shows.

    Of twins that are both requested, the one in float32 shows what the paper lacks.
    """
    twins = [one for one in request.items if one.kind == item.kind and one.number in item.twins]
    if twins and item.dtypes == ("float16",):
        return ()
    own = {dtype for one in (item, *twins) for dtype in one.dtypes}
    return tuple(dtype for dtype in by_dtype if dtype not in own)


def _head(item: Item) -> str:
    return f"{item.name} ({item.section}): {item.title}"


def _cells(
    item: Item, products: Sequence[Product], dtype: str, request: SavedRequest
) -> list[Cell]:
    population = request.populations[item.needs]
    is_papers = dtype in item.dtypes and not request.is_small
    if item.kind == "figure":
        return figures.cells_of(item, products, dtype, population, is_papers)
    make = product_tables.by_layout if item.number == 5 else product_tables.contests
    return make(item.name, products, dtype, population, is_papers)


def _idle(results: Results) -> tuple[str, ...]:
    return tuple(
        f"Idle power beside {dtype}: {quantile(sorted(watts), 0.5):.0f} W in the median, "
        f"{min(watts):.0f} to {max(watts):.0f} W."
        for dtype, watts in results.idle_w.items()
        if watts
    )


def sections(results: Results, request: SavedRequest) -> tuple[list[Section], list[Cell]]:
    """The sections of the page, and every cell."""
    views = [view(item, results, request) for item in request.items]
    page: list[Section] = []
    if request.remarks:
        page.append(Section("What is left out or smaller", request.remarks))
    page += [section for one in views for section in one.sections]
    if any(results.products.values()):
        page += _heuristic(results)
    if results.faults:
        page.append(Section("Faults of ksopt", ("These have no times.", *results.faults)))
    if results.absences:
        page.append(
            Section(ABSENT, (), (_ABSENT_TEXT,), missing_measurements.table(results.absences))
        )
    page += _method(results)
    return page, [cell for one in views for cell in one.cells]


def _heuristic(results: Results) -> list[Section]:
    products = {dtype: own for dtype, own in results.products.items() if own}
    sparsity = heuristic.by_sparsity(products)
    errors = heuristic.model_errors(products)
    correlation = (
        "Rank correlations: 1 where more of it always means a larger speed-up of kernel, 0 where "
        "it says nothing."
    )
    regret = (
        "A rule takes kernel where a predictor is at least a number, and else the best of bmm, "
        "einsum, bsr, dense and sparse. Its regret is what it then takes longer than the faster of "
        "both. The number is the one with the least mean regret on these very patterns."
    )
    widths = (
        "The width is the larger of M and N. The paper's patterns reach 73,728; the widest layers "
        "of Llama 3 405B have 53,248."
    )
    predicted = (
        "Predicted over measured times. The cost models choose the kernels that are compiled and "
        "timed, and rank ways where nothing may be timed."
    )
    alike = (
        "The paper takes, of patterns with as many nonzeros, the one of the largest (b+c)/(bc). Of "
        "one size as well there is no choice: b is nnz / N and c is nnz / M. So the pairs here "
        "differ in size, and what is compared is the speed-up over dense."
    )
    models = [Section("The cost models' errors", (), (predicted,), errors)] if errors.rows else []
    return [
        Section("The heuristic: what predicts a speed-up", (), (correlation,),
                heuristic.correlations(products)),
        Section("The heuristic: where kernel wins", table=heuristic.winners(products)),
        Section("The heuristic: by width", (), (widths,), heuristic.by_width(products)),
        Section("The heuristic: the cost of trusting it", (), (regret,),
                heuristic.decisions(products)),
        *models,
        Section("The heuristic: patterns with as many nonzeros", (), (alike,),
                heuristic.pairs(products)),
        Section("Sparsity against speed-up", table=sparsity.table(), figure=sparsity.figure()),
    ]  # fmt: skip


def _method(results: Results) -> list[Section]:
    text = (
        "Every way was first checked against float64, its result's memory filled with NaN "
        "beforehand; a wrong one has no time. All were then timed in turns, L2 emptied before each "
        "sample. Ways that are more than twice as slow as the fastest of PyTorch's were timed once "
        "or twice only. Intervals are of 95 %, for a sample of the patterns; there is none where "
        "all were measured. The paper timed on an A100-PCIE-40GB (energy: V100-PCIE-16GB; Table 6: "
        "A100-40GB) with torch 2.2, warm caches and torch.utils.benchmark."
    )
    method = [Section("How it was measured", (), (text,))]
    for run in results.runs:
        record = DeviceRecord(**run["device"]).rows()
        table = tables.of(("what", "value"), record)
        command = str(run["command"])
        shown = command if len(command) < 400 else command[:400] + " ..."
        method.append(Section("Device of a run", table=table, code=shown, language="sh",
                              is_folded=True))  # fmt: skip
    return method


def write(results: Results, request: SavedRequest, out: Path) -> list[Cell]:
    """Write paper.html, paper.md, paper.csv, products-DTYPE.csv and the figures; return all cells.

    Raises:
        InvalidInputError: the folder cannot be written.
    """
    page, every = sections(results, request)
    devices = dict.fromkeys(f"{run['device']['name']}, torch {run['device']['torch']}, commit "
                          f"{run['device']['commit']}" for run in results.runs)  # fmt: skip
    where = "; ".join(devices)
    texts = {
        "paper.csv": paper_comparison.to_csv(every),
        "paper.md": document.markdown(_TITLE, page, where),
        "paper.html": document.html(_TITLE, where, page),
        **{
            f"energy-{dtype}.csv": energy_tables.to_csv(of)
            for dtype, of in results.energies.items()
        },
        **{
            f"products-{dtype}.csv": kernel_results.rows_csv(of)
            for dtype, of in results.rows.items()
        },
    }
    output_folder.write(out, texts, document.figures(page), "figures")
    return every
