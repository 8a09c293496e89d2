"""Surroundings of a linear layer in a model, which are timed with it. Pure Python: no torch."""

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
    """The epilogue of a layer, and the number of layers on its input.

    Args:
        epilogue: Steps in their order, as in `ksopt.search.options.SearchOptions`.
        siblings: Number of layers of its size on its input, including itself.

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
        """The surroundings as JSON values, see `from_json`."""
        return {"epilogue": list(self.epilogue), "siblings": self.siblings}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Surroundings:
        """The inverse of `to_json`."""
        return cls(tuple(value["epilogue"]), value["siblings"])


ALONE = Surroundings()


def reads_surroundings(options: Mapping[str, Any]) -> bool:
    """Whether a search of a model takes its layers' surroundings from the model's graph.

    Not if the options specify some, even "none", and not for a step of training.

    Args:
        options: Of `ksopt.search.options.SearchOptions`, by name.

    Example:
        >>> reads_surroundings({"batch": 4}), reads_surroundings({"siblings": 3})
        (True, False)
    """
    named = options.get("epilogue") or options.get("siblings", 1) != 1
    return not named and not options.get("train")


def in_words(epilogue: Sequence[str]) -> str:
    """An epilogue as a phrase; empty if it has no steps.

    Example:
        >>> in_words(("bias", "gelu", "residual"))
        'a bias, a GELU and a residual'
    """
    *first, last = [_STEPS[step] for step in epilogue] or [""]
    return f"{', '.join(first)} and {last}" if first else last


def most(counted: Iterable[tuple[Surroundings, int]]) -> Surroundings:
    """The surroundings of most layers; of ties the first.

    Args:
        counted: Surroundings with their numbers of layers.
    """
    totals: dict[Surroundings, int] = {}
    for around, count in counted:
        totals[around] = totals.get(around, 0) + count
    return max(totals, key=totals.__getitem__, default=ALONE)
