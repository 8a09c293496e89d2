"""Box plots in the paper's style, and their quartiles as a table."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log10

from ksopt.bench import plots, result_tables
from ksopt.bench.plots import Group
from ksopt.bench.reproduction.products import Product
from ksopt.measure.measurement import quantile
from ksopt.report import tables
from ksopt.report.document import Figure
from ksopt.report.tables import Table

_SIZE_ENDS = tuple(10**power for power in range(4, 10))
_PROXY_ENDS = (0.01, 0.03, 0.1, 0.3, 1.0)


@dataclass(frozen=True)
class Axis:
    """The horizontal axis of a figure: classes of patterns.

    Attributes:
        title: under the axis.
        names: of the classes, in order.
        of: (product) -> the name of its class.
    """

    title: str
    names: tuple[str, ...]
    of: Callable[[Product], str]


@dataclass(frozen=True)
class BoxPlot:
    """The data of a box plot.

    Attributes:
        name: of its file.
        what: name of the values, above the vertical axis.
        axis: the horizontal axis.
        values: ascending, by (class, series).
        series: names; each has a box in each class.
        is_log: whether the vertical axis is logarithmic.
        line: value of the horizontal line.
    """

    name: str
    what: str
    axis: Axis
    values: Mapping[tuple[str, str], Sequence[float]]
    series: tuple[str, ...]
    is_log: bool
    line: float

    @classmethod
    def of(
        cls, name: str, what: str, axis: Axis, products: Sequence[Product],
        series: Mapping[str, Callable[[Product], float | None]], *, is_log: bool, line: float,
    ) -> BoxPlot:  # fmt: skip
        """The box plot of products; each series is a function of a product, None is omitted."""
        values = {
            (group, label): sorted(
                value
                for product in products
                if axis.of(product) == group and (value := of(product)) is not None
            )
            for group in axis.names
            for label, of in series.items()
        }
        return cls(name, what, axis, values, tuple(series), is_log, line)

    def figure(self) -> Figure:
        """The drawing."""
        groups = [
            Group(name, tuple(self.values[name, label] for label in self.series))
            for name in self.axis.names
        ]
        drawn = plots.figure_of_boxes(
            groups, self.series, self.what, log=self.is_log, line=self.line,
            across=self.axis.title,
        )  # fmt: skip
        return replace(drawn, name=self.name)

    def table(self) -> Table:
        """The boxes as numbers: median, quartiles, 5th and 95th percentile."""
        heads = (self.axis.title, "of", ">patterns", ">5 %", ">25 %", ">median", ">75 %", ">95 %")
        rows = []
        for (group, label), values in self.values.items():
            if values:
                ends = (quantile(values, share) for share in (0.05, 0.25, 0.5, 0.75, 0.95))
                rows.append((group, label, str(len(values)), *(f"{end:.3g}" for end in ends)))
        return tables.of(heads, rows)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not any(self.values.values())


def _classes(ends: Sequence[float]) -> tuple[str, ...]:
    shown = [_shown(end) for end in ends]
    inner = (f"{low} to {high}" for low, high in itertools.pairwise(shown))
    return (f"to {shown[0]}", *inner, f"{shown[-1]} on")


def _shown(end: float) -> str:
    if end < 10:
        return f"{end:g}"
    power = round(log10(end))
    return f"1e{power}" if end == 10**power else f"{end:,}"


def _axis(title: str, ends: Sequence[float], value: Callable[[Product], float]) -> Axis:
    names = _classes(ends)
    return Axis(title, names, lambda product: names[sum(value(product) > end for end in ends)])


RHO = Axis(
    "(b+c)/(bc)", result_tables.RHO.names, lambda product: result_tables.RHO.of(product.pattern)
)
SIZE = _axis("M x N", _SIZE_ENDS, lambda product: product.size)
PROXY = _axis("d(b+c)/(bc)", _PROXY_ENDS, lambda product: product.energy_proxy)
WIDTH = _axis("width", (1024, 4096, 16_384, 53_248), lambda product: max(product.pattern.shape))
SPARSITY = _axis("share of zeros, 1 - 1/(ad)", (0.5, 0.75, 0.9, 0.95, 0.99),
                 lambda product: product.sparsity)  # fmt: skip
IMPLEMENTATIONS = ("kernel", "bmm", "einsum", "bsr", "dense", "sparse")


def by_way(name: str, what: str, products: Sequence[Product],
           of: Callable[[Product, str], float | None]) -> BoxPlot:  # fmt: skip
    """One box per way: the ways are the classes."""
    axis = Axis("implementation", IMPLEMENTATIONS, lambda product: "")
    values = {
        (way, what): sorted(v for product in products if (v := of(product, way)) is not None)
        for way in IMPLEMENTATIONS
    }
    return BoxPlot(name, what, axis, values, (what,), True, 1.0)
