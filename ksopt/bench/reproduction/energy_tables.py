"""The measured energies per call and per token, with and without idle power."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence

from ksopt.bench.reproduction.products import Product
from ksopt.measure.measurement import quantile
from ksopt.report import tables
from ksopt.report.tables import Table

_IMPLEMENTATIONS = ("kernel", "bmm", "einsum", "bsr")


def by_way(energies: Mapping[str, Sequence[Product]]) -> Table:
    """Medians over the patterns, each way in its better layout; a token is a row of x."""
    heads = (
        "dtype", "way", ">patterns", ">mJ a call", ">uJ a token", ">mJ a call over idle",
        ">uJ a token over idle",
    )  # fmt: skip
    rows = []
    for dtype, products in energies.items():
        for way in _IMPLEMENTATIONS:
            measured = [(one, least) for one in products if (least := _least(one, way)) is not None]
            if measured:
                calls = [sorted(pair[at] for _, pair in measured) for at in (0, 1)]
                tokens = [sorted(1e3 * pair[at] / one.batch for one, pair in measured)
                          for at in (0, 1)]  # fmt: skip
                shown = (f"{quantile(values, 0.5):.3g}" for at in (0, 1)
                         for values in (calls[at], tokens[at]))  # fmt: skip
                rows.append((dtype, way, str(len(measured)), *shown))
    return tables.of(heads, rows)


def _least(product: Product, way: str) -> tuple[float, float] | None:
    """The energy of a call in the better layout, and that energy without idle power."""
    energies = [
        (used, product.over_idle_mj[name, layout])
        for (name, layout), used in product.energy_mj.items()
        if name == way
    ]
    return min(energies, default=None)


def to_csv(products: Sequence[Product]) -> str:
    """The text of energy-DTYPE.csv: a line per pattern, way and layout."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(("pattern", "batch", "way", "layout", "mj_a_call", "mj_a_call_over_idle",
                     "uj_a_token", "uj_a_token_over_idle"))  # fmt: skip
    for one in products:
        for (way, layout), used in one.energy_mj.items():
            over = one.over_idle_mj[way, layout]
            tokens = (1e3 * used / one.batch, 1e3 * over / one.batch)
            writer.writerow((one.pattern, one.batch, way, layout, used, over, *tokens))
    return stream.getvalue()
