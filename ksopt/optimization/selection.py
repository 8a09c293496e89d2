"""The layers of a model that `ksopt.optimize` does not search, and the reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import nn

from ksopt.conversion.layers import find
from ksopt.errors import InvalidInputError
from ksopt.patterns.size import Dims

LEAST_WORK = 0.01
"""Sizes whose layers do a smaller share of the work of the heaviest size are not searched."""


def uncalled_layers(model: nn.Module, rows: Mapping[str, int]) -> tuple[str, ...]:
    """The layers that the inputs do not reach, or whose weight another module reads."""
    names = [place.name for place in find(model)[0]]
    if not any(name in rows for name in names):
        raise InvalidInputError(
            "optimize: none of the model's linear layers is called with these inputs"
        )
    return tuple(name for name in names if name not in rows)


def slight_layers(model: nn.Module, rows: Mapping[str, int]) -> dict[str, str]:
    """The layers of sizes whose work is too small to search for minutes, with the reason.

    A typical one is a head of ten classes after layers of thousands of features.
    """
    places = [place for place in find(model)[0] if place.name in rows]
    work = Counter[Dims]()
    for place in places:
        size = Dims(place.in_features, place.out_features)
        work[size] += rows[place.name] * size.dense_parameters
    ((most, its_work),) = work.most_common(1)
    slight = {}
    for place in places:
        size = Dims(place.in_features, place.out_features)
        if work[size] < LEAST_WORK * its_work:
            slight[place.name] = (
                f"layers of its size do {100 * work[size] / its_work:.2g}% of the work of those of "
                f"{most}, so none was searched for."
            )
    return slight
