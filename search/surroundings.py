"""Surroundings of layers: where a search takes them from. Pure Python: no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ksopt.patterns.surroundings import ALONE, Surroundings

USUAL = (
    Surroundings(("bias", "gelu")),
    Surroundings(("bias", "residual")),
    Surroundings(("bias",), siblings=3),
)
"""Surroundings in which the layers of transformers occur: the first layer of an MLP, the last one
of an attention or an MLP, and q, k and v."""


def may_be_surrounded(options: Mapping[str, Any]) -> bool:
    """Whether a search times layers alone, so that it says nothing of layers that are not.

    Not with an epilogue or siblings, of the options or of a model's graph, for a step of training,
    and in batch_last, which the layers of models do not take.

    Args:
        options: Of `ksopt.search.options.SearchOptions`, by name.

    Example:
        >>> may_be_surrounded({"batch": 4}), may_be_surrounded({"siblings": 3})
        (True, False)
    """
    around = Surroundings(tuple(options.get("epilogue", ())), options.get("siblings", 1))
    is_first = options.get("layout", "batch_first") == "batch_first"
    return around == ALONE and is_first and not options.get("train")


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


def most_frequent(counted: Iterable[tuple[Surroundings, int]]) -> Surroundings:
    """The surroundings of most layers; of ties the first.

    Args:
        counted: Surroundings with their numbers of layers.
    """
    totals: dict[Surroundings, int] = {}
    for around, count in counted:
        totals[around] = totals.get(around, 0) + count
    return max(totals, key=totals.__getitem__, default=ALONE)
