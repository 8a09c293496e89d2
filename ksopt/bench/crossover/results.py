"""The stored results of a crossover map: a line per layer, with dense, FP8 and each budget."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import inf, log
from typing import Any

from ksopt.bench.crossover.request import Plane, Site
from ksopt.bench.results_log import LogFormat
from ksopt.measure.timing import Measurement

DENSE, DENSE_FUSED = "dense", "dense, fused"
FP8, FP8_PRODUCT = "fp8", "fp8, x rounded before"
RIVALS = {DENSE: "dense", FP8: "FP8 dense", FP8_PRODUCT: "FP8 dense, x rounded before"}
"""What budgets are compared with: the name of a way, and its words."""


@dataclass(frozen=True)
class Timed:
    """A way to compute a layer: its time, or the reason it has none.

    Attributes:
        name: of a dense or FP8 way, or a budget such as "25%".
        chain: the chain of a budget, else "".
        time: of a pass.
        reason: the reason there is no time.
    """

    name: str
    chain: str = ""
    time: Measurement | None = None
    reason: str = ""


@dataclass(frozen=True)
class SiteResult:
    """The measurements of a layer.

    Attributes:
        site: the layer.
        ways: dense ones, FP8, and the budgets.
    """

    site: Site
    ways: tuple[Timed, ...]

    def way(self, name: str) -> Timed | None:
        """The way of that name; for a budget, its fastest chain."""
        ways = [way for way in self.ways if way.name == name]
        timed = [way for way in ways if way.time is not None]
        if timed:
            return min(timed, key=lambda way: way.time.median_us if way.time else inf)
        return next(iter(ways), None)

    def us(self, name: str) -> float | None:
        """Microseconds of a way: of the faster form of "dense", of a budget's fastest chain."""
        names = (DENSE, DENSE_FUSED) if name == DENSE else (name,)
        return min(
            (way.time.median_us for way in self.ways if way.name in names and way.time),
            default=None,
        )

    def log_speed_up(self, budget: str, rival: str = DENSE) -> float | None:
        """log(time of a rival / time of a budget): above 0 where the chain is faster."""
        ours, theirs = self.us(budget), self.us(rival)
        return None if ours is None or theirs is None else log(theirs / ours)

    @property
    def faults(self) -> list[str]:
        """The faults of the ways, in sentences."""
        return [
            f"{self.site}: {' '.join(filter(None, (way.name, way.chain)))}: {way.reason}"
            for way in self.ways
            if way.reason.startswith(("wrong", "failed"))
        ]

    def to_json(self) -> dict[str, Any]:
        """The result as plain values; `of_json` reads them."""
        return asdict(self)

    @classmethod
    def of_json(cls, value: Any) -> SiteResult:
        """The inverse of `to_json`."""
        site = value["site"]
        ways = tuple(
            Timed(**{**way, "time": None if way["time"] is None else Measurement(**way["time"])})
            for way in value["ways"]
        )
        return cls(Site(Plane(**site["plane"]), int(site["width"]), int(site["rows"])), ways)


LOG_FORMAT: LogFormat[Site, SiteResult] = LogFormat(
    "ksopt bench crossover",
    "ksopt.bench.crossover/2",
    lambda one: one.site,
    SiteResult.to_json,
    SiteResult.of_json,
)
