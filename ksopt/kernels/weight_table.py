"""Prepared weights that the host library may multiply by at once: found in half a microsecond.

weight_cache.py keeps prepared weights, and is the only one to decide how long. Here is noted,
beside each weight, which of them were used last, so that the next eager call needs no more Python
than this page. A note holds nothing alive: when weight_cache.py forgets what it keeps (a training
step, `ksopt.refresh`, the memory limit, the weight's death), the note is void.

What proves that a preparation is still that of a weight:

- the weight's storage, its address, its strides, and the version of what it is a view of: `of`;
- its shape and dtype, that the current stream may read the preparation, and that no CUDA graph is
  captured: csrc/host/dispatch_table.hpp.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ksopt.kernels import weight_cache

_MOST = 16  # of an owner: the parts of a fused weight, tiles for few and for many rows


@dataclass(frozen=True, slots=True, eq=False)
class Note:
    """Where a prepared weight is kept, and what for.

    Attributes:
        kept: by weight_cache.py; gives None once it is no longer.
        form: `number_of` what the preparation does, to weights of which shape and dtype.
        stream: the CUDA stream that may read it, as the driver's handle.
        address, strides: of the weight.
    """

    kept: weakref.ref[weight_cache.Kept]
    form: int
    stream: int
    address: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Notes:
    """The notes of what one tensor owns, the newest first, for as long as it lives."""

    owner: weakref.ref[Tensor]
    notes: tuple[Note, ...]


_by_owner: dict[int, _Notes] = {}
_numbers: dict[tuple[Any, ...], int] = {}
_next_number = itertools.count(1)


def number_of(form: str, shape: tuple[int, ...], dtype: str) -> int:
    """A number, never 0, for what a preparation does and to which weights; the same in a process.

    Example:
        >>> number_of("adbc", (1, 2, 3, 4), "float32") == number_of("adbc", (1, 2, 3, 4), "float32")
        True
    """
    key = (form, tuple(shape), dtype)
    return _numbers.get(key) or _numbers.setdefault(key, next(_next_number))


def of(weight: Tensor, owner: Tensor | None = None) -> list[tuple[Tensor, Note]]:
    """What was prepared from these values of ``weight`` and is still kept, the newest first.

    Args:
        weight: any tensor.
        owner: the tensor that it is said to be a view of; None to find out (`packed.owner_of`).
            What was kept with that one from other memory than the weight's is not given.

    Returns:
        Empty where weights are said to change (`scopes.changing`), for weights without notes, and
        for lazily negated views, which share the memory of what they negate.
    """
    ready: list[tuple[Tensor, Note]] = []
    if not _by_owner:
        return ready
    if owner is None or weight._base is not None:
        owner = weight_cache.owner_of(weight)
    found = _by_owner.get(id(owner))
    if found is None or weight_cache.are_said_to_change() or weight.is_neg():
        return ready
    address, strides = weight.data_ptr(), weight.stride()
    for note in found.notes:
        if note.address == address and note.strides == strides:
            kept = note.kept()
            if kept is not None and kept.is_of(weight, owner):
                ready.append((kept.prepared, note))
    return ready


def prepared(weight: Tensor, form: str, number: int, prepare: weight_cache.Prepare) -> Tensor:
    """What `packed.prepared` returns, ready on the current stream; noted where it may serve again.

    Args:
        weight, form, prepare: as there.
        number: `number_of` the form.
    """
    result = weight_cache.prepared(weight, form, prepare)
    if not weight_cache.are_said_to_change():
        owner = weight_cache.owner_of(weight)
        kept = weight_cache.kept_of(weight, owner, form)
        if kept is not None and kept.prepared is result:
            stream = (
                torch._C._cuda_getCurrentRawStream(weight.get_device()) if weight.is_cuda else 0
            )
            place = (weight.data_ptr(), weight.stride())
            _add(owner, Note(weakref.ref(kept), number, stream, *place))
    return result


def _add(owner: Tensor, new: Note) -> None:
    found = _by_owner.get(id(owner))
    if found is not None:
        newest = found.notes[0]
        if newest.kept() is new.kept() and newest.stream == new.stream:
            return
    reference, notes = (_reference(owner), ()) if found is None else (found.owner, found.notes)
    replaced = (new.form, new.stream, new.address, new.strides)
    others = [
        note
        for note in notes
        if (note.form, note.stream, note.address, note.strides) != replaced
        and note.kept() is not None
    ]
    _by_owner[id(owner)] = _Notes(reference, (new, *others[: _MOST - 1]))


def _reference(owner: Tensor) -> weakref.ref[Tensor]:
    """To a tensor whose notes go with it."""
    place = id(owner)

    def gone(reference: weakref.ref[Tensor]) -> None:
        found = _by_owner.get(place)
        if found is not None and found.owner is reference:
            del _by_owner[place]

    return weakref.ref(owner, gone)
