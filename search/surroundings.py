"""Surroundings of a model's layers: where they come from. Pure Python: no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ksopt.patterns.surroundings import ALONE, Surroundings


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
