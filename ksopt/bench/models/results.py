"""The results of a model benchmark, as values that one line of a file holds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ksopt.measure.timing import Measurement

DENSE = "dense"
DENSE_AUTOTUNED = "dense, max-autotune"
KS_UNCOMPILED = "KS, uncompiled"
KS_INDUCTOR = "KS, Inductor"
KS_KSOPT = "KS, ksopt"
LINEAR_KSOPT = "KSLinear, ksopt"
LINEAR_AUTOTUNED = "KSLinear, ksopt, max-autotune"
WORDS = {
    "max-autotune": DENSE_AUTOTUNED,
    "uncompiled": KS_UNCOMPILED,
    "inductor": KS_INDUCTOR,
    "ksopt": KS_KSOPT,
    "kslinear": LINEAR_KSOPT,
    "kslinear-max-autotune": LINEAR_AUTOTUNED,
}
"""The ways by their names on the command line, without the dense one, which always runs."""

IMPLEMENTATIONS = (DENSE, *WORDS.values())
"""The columns of every table, the dense model first."""


@dataclass(frozen=True, order=True)
class Subject:
    """One model, dtype, pass and mode, in which all ways are measured in turns.

    Args:
        model: its name.
        dtype: torch's name of its element type.
        pass_: "forward", without gradients, or "step": forward, loss, backward, plain SGD.
        mode: "default"; "graphs": torch.compile's CUDA graphs; "recorded": all in one graph.
    """

    model: str
    dtype: str
    pass_: str
    mode: str

    def __str__(self) -> str:
        return " ".join((self.model, self.dtype, self.pass_, self.mode))


@dataclass(frozen=True)
class Sites:
    """The sites of a model's graphs, as the backend ksopt reported them.

    Args:
        lowered, not_lowered, not_recognised: sites by verdict.
        share: of the linear flops, those in lowered sites.
        pass_s: time of the pass, seconds.
        deciding_s: time to select kernels, seconds; measurements are stored on disk.
        sites: each site, as `ksopt.compile.sites.Site.to_json` has it.
    """

    lowered: int
    not_lowered: int
    not_recognised: int
    share: float
    pass_s: float
    deciding_s: float
    sites: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class ImplementationResult:
    """The result of one implementation of a model.

    Args:
        name: of `IMPLEMENTATIONS`.
        parameters: of its model.
        first_s: the first call, compilation included.
        peak_bytes: the largest memory of a call, parameters included; None on a CPU.
        errors: relative errors against float64, by kind of result.
        faults: in sentences; a way with a fault has no time.
        time: of a call.
        sites: of ksopt's ways.
    """

    name: str
    parameters: int
    first_s: float | None = None
    peak_bytes: int | None = None
    errors: dict[str, float] = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    time: Measurement | None = None
    sites: Sites | None = None


@dataclass(frozen=True)
class Case:
    """A subject and the result of each way.

    Args:
        subject: the model, dtype, pass and mode.
        blocks: of the model.
        chains: that replace its linear layers.
        weights: (weights of the chains, weights of the dense layers that they replace).
        inputs: shape of the input.
        ways: in the order of `IMPLEMENTATIONS`.
    """

    subject: Subject
    blocks: int
    chains: int
    weights: tuple[int, int]
    inputs: tuple[int, ...]
    ways: tuple[ImplementationResult, ...]

    def way(self, name: str) -> ImplementationResult | None:
        """The way of that name; None if it was not measured."""
        return next((way for way in self.ways if way.name == name), None)

    @property
    def rival(self) -> ImplementationResult | None:
        """The faster of the dense model's ways, with which every time is compared."""
        timed = [
            way for way in self.ways if way.name in IMPLEMENTATIONS[:2] and way.time is not None
        ]
        return min(timed, key=lambda way: way.time.median_us if way.time else 0.0, default=None)

    @property
    def faults(self) -> list[str]:
        """The faults of all ways, in sentences."""
        return [f"{self.subject}: {way.name}: {fault}" for way in self.ways for fault in way.faults]

    def to_json(self) -> dict[str, Any]:
        """The case as plain values; `of_json` reads them."""
        return asdict(self)

    @classmethod
    def of_json(cls, value: Any) -> Case:
        """The inverse of `to_json`."""
        return cls(
            Subject(**value["subject"]),
            int(value["blocks"]),
            int(value["chains"]),
            (int(value["weights"][0]), int(value["weights"][1])),
            tuple(map(int, value["inputs"])),
            tuple(map(_result_of_json, value["ways"])),
        )


def _result_of_json(value: Any) -> ImplementationResult:
    took, sites = value["time"], value["sites"]
    return ImplementationResult(
        **{
            **value,
            "faults": tuple(value["faults"]),
            "time": None if took is None else Measurement(**took),
            "sites": None if sites is None else Sites(**{**sites, "sites": tuple(sites["sites"])}),
        }
    )
