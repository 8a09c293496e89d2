"""What is timed to decide on a site, its times, and their record in the tuning cache."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from ksopt.jit import source_digest
from ksopt.kernels.problem import Problem, ProblemKey
from ksopt.kernels.tuning_cache import Fingerprint

TIE = 1.02
"""A site is lowered unless it is slower by more than this factor, the resolution of timing."""

_CONDITIONS = ("before", "behind", "training", "to_input", "computed")


@dataclass(frozen=True)
class SiteCase:
    """The case to time.

    Args:
        problem: the product by the factors, without an epilogue.
        batch: rows.
        training: whether the weights are trained: then the gradients are timed, too.
        to_input: whether they are frozen, and the gradient of the input is timed, too.
        computed: whether they are untrained, but prepared at each call.
        fused: places of elementwise work: "before", "behind", both or none.
    """

    problem: Problem
    batch: int
    training: bool = False
    fused: tuple[str, ...] = ()
    to_input: bool = False
    computed: bool = False

    @property
    def with_gradients(self) -> bool:
        """Whether any gradient is timed."""
        return self.training or self.to_input

    @property
    def repacked(self) -> bool:
        """Whether the weights are prepared at each call."""
        return self.training or self.computed

    @property
    def key(self) -> SiteKey:
        """What the times are recorded for: batches up to the same power of two are one case."""
        kinds = ("training", "to_input", "computed")
        conditions = (*self.fused, *(kind for kind in kinds if getattr(self, kind)))
        return SiteKey(ProblemKey.of_problem(self.problem, self.batch), conditions)


@dataclass(frozen=True)
class Times:
    """Microseconds of a chain: its product, and the gradients of the case.

    Args:
        ksopt_us: by ksopt's operator.
        unfused_us: as batched products under Inductor.
    """

    ksopt_us: float
    unfused_us: float

    @property
    def lower(self) -> bool:
        """Whether the site is lowered."""
        return self.ksopt_us <= TIE * self.unfused_us


@dataclass(frozen=True)
class SiteKey:
    """What a site's times are recorded for.

    Attributes:
        product: its problem and range of batches.
        conditions: those of the case's fields that are true, and the places of elementwise
            work.
    """

    product: ProblemKey
    conditions: tuple[str, ...]

    @property
    def file_name(self) -> str:
        """The readable name of its file, without its ending."""
        return "-".join(("site", self.product.file_name, *self.conditions))

    def to_json(self) -> dict[str, Any]:
        """The key as plain values."""
        return {"product": self.product.to_json(), "conditions": list(self.conditions)}

    @classmethod
    def from_json(cls, values: Any) -> SiteKey:
        """The key whose `to_json` gave ``values``.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: they are not such values.
        """
        conditions = values["conditions"]
        if [one for one in _CONDITIONS if one in conditions] != conditions:
            raise ValueError(f"not a site's conditions: {conditions!r}")
        return cls(ProblemKey.from_json(values["product"]), tuple(conditions))


@dataclass(frozen=True)
class SiteRecord:
    """The measured times of a site, and the choice that follows from them.

    Attributes:
        key: what they are for.
        batch: rows that were timed.
        times: the medians of both ways.
    """

    key: SiteKey
    batch: int
    times: Times
    kind: ClassVar[str] = "site"

    @staticmethod
    def depends_on() -> Fingerprint:
        """The code that the times depend on beside the kernels: the benchmark, the operators."""
        modules = ("benchmark", "out_variants", "site_times")
        names = (f"ksopt.compile.lowering.{name}" for name in modules)
        return {"code of sites": source_digest.digest(*names, "ksopt.ops")}

    def to_json(self) -> dict[str, Any]:
        """The record as plain values."""
        return {
            "key": self.key.to_json(),
            "batch": self.batch,
            "ksopt_us": self.times.ksopt_us,
            "unfused_us": self.times.unfused_us,
            "lower": self.times.lower,
        }

    @classmethod
    def from_json(cls, values: Any) -> SiteRecord:
        """The record whose `to_json` gave ``values``; its choice follows from the times.

        Raises:
            ValueError, KeyError, TypeError, AttributeError, OverflowError: they are not such
                values.
        """
        times = Times(float(values["ksopt_us"]), float(values["unfused_us"]))
        if not all(0 < us < math.inf for us in (times.ksopt_us, times.unfused_us)):
            raise ValueError(f"not times: {times}")
        return cls(SiteKey.from_json(values["key"]), int(values["batch"]), times)
