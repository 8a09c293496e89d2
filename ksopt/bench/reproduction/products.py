"""The times of one pattern's product, by the paper's names for the ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ksopt.bench.request import PRODUCT_ONLY
from ksopt.bench.results import OURS, Row
from ksopt.patterns.chain import Pattern

KERNEL = "kernel"
PRODUCT = "product"
"""The batched product of bmm without the permutations around it."""

NAMES = {
    OURS: KERNEL,
    "bmm_paper": "bmm",
    "einsum": "einsum",
    "bsr": "bsr",
    "dense": "dense",
    "sparse": "sparse",
    PRODUCT_ONLY: PRODUCT,
}
"""The paper's names for the ways of ``ksopt bench kernels``."""

AGAINST = ",".join(way for way in NAMES if way != OURS)
"""The value of ``--against`` for ``ksopt bench kernels``."""

FIRST, LAST = "batch_first", "batch_last"
SPECIALISED = ("kernel", "bmm", "einsum", "bsr")
GENERIC = ("dense", "sparse")


@dataclass(frozen=True)
class Product:
    """The measurements of a pattern in one dtype.

    Attributes:
        pattern: of the product.
        times_us: medians by (name, layout); a way without a time is absent.
        energy_mj: of a call, by (name, layout), idle draw included.
        over_idle_mj: of a call, by (name, layout), idle draw subtracted.
        batch: rows of x.
        predicted_us: by the cost models, by (name, layout); absent where there is no prediction.
    """

    pattern: Pattern
    times_us: Mapping[tuple[str, str], float]
    energy_mj: Mapping[tuple[str, str], float]
    over_idle_mj: Mapping[tuple[str, str], float]
    batch: int = 1
    predicted_us: Mapping[tuple[str, str], float] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Product:
        """The product of one subject's rows."""
        times = {
            (NAMES[row.way], row.layout): row.latency.median_us
            for row in rows
            if row.latency is not None and row.way in NAMES
        }
        predicted = {
            (NAMES[row.way], row.layout): row.predicted_us
            for row in rows
            if row.predicted_us is not None and row.way in NAMES
        }
        subject = rows[0].subject
        return cls(subject.chain[0], times, {}, {}, subject.batch, predicted)

    def least_us(self, names: Sequence[str], layout: str | None = None) -> float | None:
        """The least time of some ways, in a layout or in the better one; None without a time."""
        return _least(self.times_us, names, layout)

    def speed_up(
        self, names: Sequence[str], others: Sequence[str], layout: str | None = None
    ) -> float | None:
        """The best time of ``others`` over the best time of ``names``."""
        ours, theirs = self.least_us(names, layout), self.least_us(others, layout)
        return None if ours is None or theirs is None else theirs / ours

    @property
    def predicted_speed_up(self) -> float | None:
        """The predicted time of bmm and einsum over kernel's, each in its better layout."""
        ours = _least(self.predicted_us, (KERNEL,))
        theirs = _least(self.predicted_us, ("bmm", "einsum"))
        return None if ours is None or theirs is None else theirs / ours

    def energy_ratio(self, over_idle: bool) -> float | None:
        """The energy of kernel over the least of bmm, einsum and bsr, each in its better layout.

        None where one was not measured, and where less than the idle power remains of one.
        """
        energies = self.over_idle_mj if over_idle else self.energy_mj
        ours, theirs = _least(energies, (KERNEL,)), _least(energies, ("bmm", "einsum", "bsr"))
        if ours is None or theirs is None or min(ours, theirs) <= 0:
            return None
        return ours / theirs

    def rewriting(self, layout: str) -> float | None:
        """The share of bmm's time that its permutations take: (t - t~) / t.

        Source: the paper, appendix B.2.
        """
        whole, alone = self.times_us.get(("bmm", layout)), self.times_us.get((PRODUCT, layout))
        return None if whole is None or alone is None else (whole - alone) / whole

    @property
    def size(self) -> int:
        """The elements of the matrix, zeros included: M times N."""
        rows, columns = self.pattern.shape
        return rows * columns

    @property
    def sparsity(self) -> float:
        """The share of zeros, 1 - 1/(ad)."""
        return 1 - 1 / (self.pattern.a * self.pattern.d)

    @property
    def energy_proxy(self) -> float:
        """The paper's proxy for energy, section 5: d (b + c) / (b c)."""
        return self.pattern.d * self.pattern.rho


def _least(
    values: Mapping[tuple[str, str], float], names: Sequence[str], layout: str | None = None
) -> float | None:
    return min(
        (value for (name, where), value in values.items()
         if name in names and layout in (None, where)),
        default=None,
    )  # fmt: skip
