"""The measurements of a gradient's candidates, as the tuning cache stores them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from ksopt.epilogue import check_activation
from ksopt.jit import source_digest
from ksopt.kernels.families.gradient_base import KINDS, GradientProblem
from ksopt.kernels.problem import bits_of
from ksopt.kernels.tuning_cache import Fingerprint, Timed
from ksopt.patterns.chain import Chain


@dataclass(frozen=True)
class GradientKey:
    """What a choice is recorded for: batches up to the same power of two are one case.

    Attributes:
        problem: the gradient.
        bits: as of `ProblemKey`.
    """

    problem: GradientProblem
    bits: int

    @property
    def file_name(self) -> str:
        """The readable name of its file, without its ending."""
        problem = self.problem
        factors = ("x".join(map(str, p.weight_shape)) for p in problem.factors)
        bias = ("bias",) if problem.with_bias else ()
        siblings = (f"{problem.siblings}x",) if problem.siblings > 1 else ()
        ahead = (problem.activation,) if problem.activation != "none" else ()
        parts = ("gradient", problem.gradient, *siblings, *factors, *ahead, *bias, problem.dtype)
        return "-".join((*parts, str(2**self.bits)))

    def to_json(self) -> dict[str, Any]:
        """The key as plain values."""
        problem = self.problem
        return {
            "gradient": problem.gradient,
            "pattern": str(Chain(problem.factors)),
            "dtype": problem.dtype,
            "with_bias": problem.with_bias,
            "siblings": problem.siblings,
            "activation": problem.activation,
            "largest_batch": 2**self.bits,
        }

    @classmethod
    def from_json(cls, values: Any) -> GradientKey:
        """The key whose `to_json` gave ``values``.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: they are not such values.
        """
        gradient, dtype = values["gradient"], values["dtype"]
        if gradient not in KINDS or not isinstance(dtype, str):
            raise ValueError(f"not a gradient: {gradient!r} in {dtype!r}")
        factors, with_bias = Chain.parse(values["pattern"]).patterns, bool(values["with_bias"])
        siblings = int(values["siblings"])
        if siblings < 1:
            raise ValueError(f"there is no gradient of {siblings} chains")
        activation = values["activation"]
        check_activation(activation)
        if activation != "none" and len(factors) != 3:
            raise ValueError(f"{activation} between {len(factors)} factors")
        problem = GradientProblem(gradient, factors, dtype, with_bias, siblings, activation)
        return cls(problem, bits_of(int(values["largest_batch"])))


@dataclass(frozen=True)
class GradientRecord:
    """The measurements of a gradient's candidates, and the choice.

    Attributes:
        key: what it is for.
        batch: rows that were timed.
        timed: every timed candidate.
        chosen: index into ``timed``.
    """

    key: GradientKey
    batch: int
    timed: tuple[Timed, ...]
    chosen: int
    kind: ClassVar[str] = "gradient"

    def __post_init__(self) -> None:
        if not 0 <= self.chosen < len(self.timed):
            raise ValueError("the choice is not among what was timed")

    @property
    def choice(self) -> Timed:
        """The chosen candidate's times."""
        return self.timed[self.chosen]

    @staticmethod
    def depends_on() -> Fingerprint:
        """The code that the times depend on beside the kernels: the operators."""
        return {"code of gradients": source_digest.digest("ksopt.ops")}

    def to_json(self) -> dict[str, Any]:
        """The record as plain values."""
        return {
            "key": self.key.to_json(),
            "batch": self.batch,
            "chosen": self.chosen,
            "timed": [asdict(timed) for timed in self.timed],
        }

    @classmethod
    def from_json(cls, values: Any) -> GradientRecord:
        """The record whose `to_json` gave ``values``.

        Raises:
            ValueError, KeyError, TypeError, AttributeError, OverflowError: they are not such
                values.
        """
        timed = tuple(map(Timed.from_json, values["timed"]))
        key = GradientKey.from_json(values["key"])
        return cls(key, int(values["batch"]), timed, int(values["chosen"]))
