"""The tensors that the weight cache (weight_cache.py) may have entries for, for the host library.

A product of a training step has to drop entries only where its weight has some; all other products
run without Python: see csrc/host/cached_weights.cpp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ksopt.jit import host

_places: set[int] = set()  # addresses; a few of them have no entry any more


def may_hold(root: Tensor) -> bool:
    """Whether the cache may have an entry for a tensor; False is certain."""
    return root._cdata in _places


def add(root: Tensor) -> int:
    """Register that a tensor, which is no view, has an entry; returns the tensor's address."""
    place = root._cdata
    _places.add(place)
    if host.is_loaded():
        torch.ops.ksopt_host.set_cached(place, True)
    return place


def discard(place: int) -> None:
    """Register that the tensor at an address has no entry any more."""
    if place in _places:
        _places.discard(place)
        if host.is_loaded():
            torch.ops.ksopt_host.set_cached(place, False)


def clear() -> None:
    """Register that no tensor has an entry any more."""
    _places.clear()
    if host.is_loaded():
        torch.ops.ksopt_host.clear_cached()


def _register_all() -> None:
    for place in tuple(_places):
        torch.ops.ksopt_host.set_cached(place, True)


host.when_loaded(_register_all)
