"""Replacement of a model's layers by chains without weights."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from ksopt.conversion.apply import share_weights, swap
from ksopt.conversion.layers import New, Place, replacement
from ksopt.conversion.resolve import Choice


def insert_empty_chains(model: nn.Module, choices: Iterable[Choice]) -> list[New]:
    """Replace layers by chains whose weights are for the caller to fill.

    Bias, dtype, device, mode and hooks are preserved, as with `ksopt.convert`. Layers that share a
    weight share the chain's weights.

    Returns:
        The layers with weights of their own: of those that share, the first.
    """
    own: dict[int, New] = {}
    swaps: list[tuple[Place, New]] = []
    for choice in choices:
        new = replacement(choice.place, choice.chains)
        first = own.setdefault(id(choice.place.parameter), new)
        if first is not new:
            share_weights(first, new)
        swaps.append((choice.place, new))
    swap(model, swaps)
    return list(own.values())
