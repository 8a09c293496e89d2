"""Which tensors the weight cache (weight_cache.py) may have an entry for, for the host library.

A training step's product has something to forget only where something is kept of its weight; all
others run without Python: see csrc/host/cached_weights.cpp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ksopt.jit import host

_places: set[int] = set()  # addresses; of a few of them nothing is kept any more


def may_hold(root: Tensor) -> bool:
    """Whether something may be kept with a tensor; False is certain."""
    return root._cdata in _places


def add(root: Tensor) -> int:
    """Note that something is kept with a tensor, which is no view; returns its place."""
    place = root._cdata
    _places.add(place)
    if host.is_loaded():
        torch.ops.ksopt_host.set_cached(place, True)
    return place


def discard(place: int) -> None:
    """Note that nothing is kept any more with the tensor at a place."""
    if place in _places:
        _places.discard(place)
        if host.is_loaded():
            torch.ops.ksopt_host.set_cached(place, False)


def clear() -> None:
    """Note that nothing is kept any more."""
    _places.clear()
    if host.is_loaded():
        torch.ops.ksopt_host.clear_cached()


def _tell_all() -> None:
    for place in tuple(_places):
        torch.ops.ksopt_host.set_cached(place, True)


host.when_loaded(_tell_all)
