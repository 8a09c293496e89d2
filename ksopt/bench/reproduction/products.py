"""The times of one pattern's product, by the paper's names of the ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ksopt.bench.request import PRODUCT_ONLY
from ksopt.bench.rows import OURS, Row
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
"""The paper's names of what ``ksopt bench kernels`` calls otherwise."""

WAYS = ",".join(way for way in NAMES if way != OURS)
"""What ``ksopt bench kernels`` is asked to compare with."""

FIRST, LAST = "batch_first", "batch_last"
SPECIALISED = ("kernel", "bmm", "einsum", "bsr")
GENERIC = ("dense", "sparse")


@dataclass(frozen=True)
class Product:
    """What was measured of a pattern in one dtype.

    Attributes:
        pattern: what was multiplied by.
        times_us: medians by (name, layout); a way without a time is not there.
        energy_mj: of a call, by (name, layout), idle draw included.
        over_idle_mj: the same, what the idle device draws in that time subtracted.
        batch: rows of x.
    """

    pattern: Pattern
    times_us: Mapping[tuple[str, str], float]
    energy_mj: Mapping[tuple[str, str], float]
    over_idle_mj: Mapping[tuple[str, str], float]
    batch: int = 1

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Product:
        """Of one subject's rows."""
        times = {
            (NAMES[row.way], row.layout): row.latency.median_us
            for row in rows
            if row.latency is not None and row.way in NAMES
        }
        subject = rows[0].subject
        return cls(subject.chain[0], times, {}, {}, subject.batch)

    def least_us(self, names: Sequence[str], layout: str | None = None) -> float | None:
        """The least time of some ways, in a layout or in the better one; None if none has one."""
        return _least(self.times_us, names, layout)

    def speed_up(
        self, names: Sequence[str], others: Sequence[str], layout: str | None = None
    ) -> float | None:
        """How many times faster the best of some ways is than the best of others."""
        ours, theirs = self.least_us(names, layout), self.least_us(others, layout)
        return None if ours is None or theirs is None else theirs / ours

    def energy_ratio(self, over_idle: bool) -> float | None:
        """Energy of kernel over the least of bmm, einsum and bsr, the better layout of each."""
        energies = self.over_idle_mj if over_idle else self.energy_mj
        ours, theirs = _least(energies, (KERNEL,)), _least(energies, ("bmm", "einsum", "bsr"))
        return None if ours is None or theirs is None or theirs <= 0 else ours / theirs

    def rewriting(self, layout: str) -> float | None:
        """Share of bmm's time that its permutations take: (t - t~) / t.

        Source: the paper, appendix B.2.
        """
        whole, alone = self.times_us.get(("bmm", layout)), self.times_us.get((PRODUCT, layout))
        return None if whole is None or alone is None else (whole - alone) / whole

    @property
    def size(self) -> int:
        """M times N, of the matrix with its zeros."""
        rows, columns = self.pattern.shape
        return rows * columns

    @property
    def sparsity(self) -> float:
        """Share of zeros, 1 - 1/(ad)."""
        return 1 - 1 / (self.pattern.a * self.pattern.d)

    @property
    def energy_proxy(self) -> float:
        """d (b + c) / (b c): the paper's for energy, section 5."""
        return self.pattern.d * self.pattern.rho


def _least(
    found: Mapping[tuple[str, str], float], names: Sequence[str], layout: str | None = None
) -> float | None:
    return min(
        (value for (name, where), value in found.items()
         if name in names and layout in (None, where)),
        default=None,
    )  # fmt: skip
