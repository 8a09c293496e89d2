"""What surrounds a linear layer in a model, which is timed with it. Pure Python: no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_STEPS = {
    "bias": "a bias", "relu": "a ReLU", "gelu": "a GELU", "gelu_tanh": "a GELU (tanh)",
    "silu": "a SiLU", "relu_gate": "a ReLU gate", "gelu_gate": "a GELU gate",
    "gelu_tanh_gate": "a GELU (tanh) gate", "silu_gate": "a SiLU gate", "residual": "a residual",
}  # fmt: skip


@dataclass(frozen=True)
class Surroundings:
    """What follows a layer, and how many layers read its input.

    Args:
        epilogue: Steps in their order, as in `ksopt.search.options.SearchOptions`.
        siblings: Layers of its size on its input, itself counted.

    Example:
        >>> print(Surroundings(("bias", "gelu")))
        followed by a bias and a GELU
        >>> print(Surroundings(("bias",), siblings=3))
        3 on one input, followed by a bias
        >>> print(Surroundings())
        alone
    """

    epilogue: tuple[str, ...] = ()
    siblings: int = 1

    def __str__(self) -> str:
        after = in_words(self.epilogue)
        parts = [f"{self.siblings} on one input"] if self.siblings > 1 else []
        return ", ".join([*parts, *([f"followed by {after}"] if after else [])]) or "alone"

    def to_json(self) -> dict[str, Any]:
        """What `from_json` makes the same of."""
        return {"epilogue": list(self.epilogue), "siblings": self.siblings}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Surroundings:
        """The surroundings that `to_json` wrote."""
        return cls(tuple(value["epilogue"]), value["siblings"])


ALONE = Surroundings()


def are_read(options: Mapping[str, Any]) -> bool:
    """Whether a search of a model takes its layers' surroundings from the model's graph.

    Not if the options name some, be it "none", and not for a step of training.

    Args:
        options: Of `ksopt.search.options.SearchOptions`, by name, as they were given.

    Example:
        >>> are_read({"batch": 4}), are_read({"epilogue": "none"}), are_read({"siblings": 3})
        (True, False, False)
    """
    named = options.get("epilogue") or options.get("siblings", 1) != 1
    return not named and not options.get("train")


def in_words(epilogue: Sequence[str]) -> str:
    """What follows a layer, in words; empty for nothing.

    Example:
        >>> in_words(("bias", "gelu", "residual"))
        'a bias, a GELU and a residual'
    """
    *first, last = [_STEPS[step] for step in epilogue] or [""]
    return f"{', '.join(first)} and {last}" if first else last


def most(counted: Iterable[tuple[Surroundings, int]]) -> Surroundings:
    """The surroundings of most layers; of several with as many, those that came first.

    Args:
        counted: Surroundings, each with how many layers have them.
    """
    totals: dict[Surroundings, int] = {}
    for around, count in counted:
        totals[around] = totals.get(around, 0) + count
    return max(totals, key=totals.__getitem__, default=ALONE)
