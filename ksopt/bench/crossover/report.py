"""The output of `ksopt bench crossover`: a page, markdown, CSV and the maps as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ksopt.bench import heat_map
from ksopt.bench.crossover import views
from ksopt.bench.crossover.request import CrossoverRequest, Plane, Site
from ksopt.bench.crossover.results import DENSE, RIVALS, SiteResult
from ksopt.bench.crossover.views import BETWEEN, MEASURED, Cell
from ksopt.bench.heat_map import Tile
from ksopt.measure.device import DeviceRecord
from ksopt.report import document, output_folder, tables
from ksopt.report.document import Figure, Section

_TITLE = "Where a Kronecker-sparse layer is faster than a dense one"
_TEXT = (
    "A layer is y = gelu(x W^T + bias) with as many features out as in. Its chains are "
    "(1,n/q,n/q,q)*(q,n/q,n/q,1) and (1,n/2,n/q,2)*(2,n/q,n/2,1), 2/q of the dense layer's "
    "weights; the faster one counts. A cell has the largest of the budgets "
    "that is faster than dense, and the largest speed-up of all budgets. Cells with an outline "
    "were measured; ~ stands before what was interpolated between layers that were, in "
    "logarithms; an empty cell is further than two steps from anything that was."
)
_METHOD = (
    "Every way is uncompiled, in the layout batch_first, and was checked against float64 before it "
    "was timed; a wrong one has no time. All ways of a layer were timed in turns, L2 emptied "
    "before each sample; a GPU's times are the device's, without what the host takes to launch. "
    "Inference is without gradients; training is forward and backward, with "
    "the gradients of x, the weights and the bias. Dense in inference is the faster of linear with "
    "GELU behind it and of cuBLAS's product with GELU inside. FP8 dense is torch._scaled_mm with "
    "one static scale an operand and GELU behind it, beside maps of 16 bit in inference: with x "
    "rounded in each call by PyTorch's operations, and with x rounded before, as where the layer "
    "before rounds it at no cost."
)


def sections(
    request: CrossoverRequest,
    measured: Mapping[Site, SiteResult],
    runs: Sequence[Mapping[str, Any]],
) -> list[Section]:
    """The sections of the page."""
    every = views.cells(request, measured)
    page = [Section("Answer", (*request.remarks,), (_TEXT,), views.counts_table(every, request))]
    for plane in request.planes:
        own = [cell for cell in every if cell.site.plane == plane]
        for rival, words in RIVALS.items():
            if any(cell.best(rival) is not None for cell in own):
                title = f"{str(plane).capitalize()}, over {words}"
                figure = drawn(plane, own, request, rival)
                table = views.map_table(plane, own, request, rival)
                page.append(Section(title, figure=figure, table=table))
    faults = [fault for result in measured.values() for fault in result.faults]
    if faults:
        page.append(Section("Faults", ("These have no times.", *faults)))
    page.append(Section("How it was measured", (), (_METHOD,)))
    for run in runs:
        table = tables.of(("what", "value"), DeviceRecord(**run["device"]).rows())
        page.append(Section("Device of a run", table=table, code=str(run["command"]),
                            language="sh", is_folded=True))  # fmt: skip
    return page


def drawn(
    plane: Plane, cells: Sequence[Cell], request: CrossoverRequest, rival: str = DENSE
) -> Figure:
    """The picture of a map, over a rival: rows of x grow upwards, widths to the right."""
    by_site = {cell.site: cell for cell in cells}
    tiles = [
        [_tile(by_site[Site(plane, width, rows)], request, rival) for width in request.widths]
        for rows in reversed(request.rows)
    ]
    down = [f"{rows:,}" for rows in reversed(request.rows)]
    across = [f"{width:,}" for width in request.widths]
    whole = f"Speed-up over {RIVALS[rival]} by width and rows: {plane}"
    name = f"crossover-{plane.pass_}-{plane.precision}"
    if rival != DENSE:
        name += "-over-" + rival.replace(",", "").replace(" ", "-")
    return heat_map.figure(tiles, down, across, ("rows of x", "features", whole), name)


def _tile(cell: Cell, request: CrossoverRequest, rival: str) -> Tile:
    best = cell.best(rival)
    if best is None:
        return Tile(None, (), cell.status == MEASURED)
    largest = cell.largest(request.budgets, rival)
    about = "~" if cell.status == BETWEEN else ""
    words = (f"{about}{largest.text}" if largest else f"{about}none", f"x{best:.2f}")
    return Tile(best, words, cell.status == MEASURED)


def write(
    request: CrossoverRequest,
    measured: Mapping[Site, SiteResult],
    runs: Sequence[Mapping[str, Any]],
    out: Path,
) -> None:
    """Write crossover.html, crossover.md, crossover.csv and the pictures.

    Raises:
        InvalidInputError: the folder cannot be written.
    """
    page = sections(request, measured, runs)
    devices = dict.fromkeys(
        f"{run['device']['name']}, torch {run['device']['torch']}, commit {run['device']['commit']}"
        for run in runs
    )
    where = "; ".join(devices)
    texts = {
        "crossover.csv": views.to_csv(views.cells(request, measured), request, measured),
        "crossover.md": document.markdown(_TITLE, page, where),
        "crossover.html": document.html(_TITLE, where, page),
    }
    output_folder.write(out, texts, document.figures(page), "maps")
