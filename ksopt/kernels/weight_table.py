"""Prepared weights that the host library may multiply by at once: found in half a microsecond.

weight_cache.py keeps prepared weights, and is the only one to decide how long. Here is noted,
beside each weight, which of them were used last, so that the next eager call needs no more Python
than this page. A note holds nothing alive: when weight_cache.py forgets what it keeps (a training
step, `ksopt.refresh`, the memory limit, the weight's death), the note is void.

What proves that a preparation is still that of a weight:

- the weight's storage, its address, its strides, and the version of what it is a view of: `of`;
- of several weights that were prepared together, the same of each: `of_each`;
- its shape and dtype, that the current stream may read the preparation, and that no CUDA graph is
  captured: csrc/host/dispatch_table.hpp.

What was prepared of one weight is noted in the library, too, for products that enter no Python: it
proves the same there (csrc/host/kept_weights.cpp).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ksopt.jit import host
from ksopt.kernels import weight_cache
from ksopt.kernels.weight_scopes import root_of

_MOST = 16  # of an owner: the parts of a fused weight, tiles for few and for many rows


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One of several weights that were prepared together.

    Attributes:
        owner: the tensor that counts its versions, not that of another name of the same memory.
        storage, address, strides, version: of the weight when it was prepared. Who holds this
            keeps the storage's address from being given to another storage.
    """

    owner: weakref.ref[Tensor]
    storage: int
    address: int
    strides: tuple[int, ...]
    version: int

    @classmethod
    def of(cls, weight: Tensor, owner: Tensor) -> Part:
        """As it is now; ``owner`` is its `weight_cache.owner_of`."""
        return cls(weakref.ref(owner), *_state(weight, owner))

    def is_of(self, weight: Tensor, owner: Tensor) -> bool:
        """Whether the weight is what it was."""
        state = (self.storage, self.address, self.strides, self.version)
        return self.owner() is owner and not weight.is_neg() and state == _state(weight, owner)


def _state(weight: Tensor, owner: Tensor) -> tuple[int, int, tuple[int, ...], int]:
    storage = weight.untyped_storage()._cdata
    return storage, weight.data_ptr(), weight.stride(), owner._version


@dataclass(frozen=True, slots=True, eq=False)
class Note:
    """Where a prepared weight is kept, and what for.

    Attributes:
        kept: by weight_cache.py; gives None once it is no longer.
        form: `number_of` what the preparation does, to weights of which shape and dtype.
        stream: the CUDA stream that may read it, as the driver's handle.
        address, strides: of the weight.
        others: the weights that were prepared together with this, the first one; None for a weight
            alone.
    """

    kept: weakref.ref[weight_cache.Kept]
    form: int
    stream: int
    address: int
    strides: tuple[int, ...]
    others: tuple[Part, ...] | None = None


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
    return [one for one in _all_of(weight, owner) if one[1].others is None]


def _all_of(weight: Tensor, owner: Tensor | None) -> list[tuple[Tensor, Note]]:
    """`of`, and what was prepared of the weight as the first of several."""
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


def of_each(
    weights: Sequence[Tensor], owners: Sequence[Tensor] | None
) -> tuple[list[Tensor], list[int]]:
    """What was prepared from these values of a layer's weights, of each alone and of all together.

    Args:
        weights: of a layer.
        owners: what each is said to be a view of; None to find out.

    Returns:
        The prepared weights; and of each three numbers: of which weight, -1 for all of them, in
        which form, and for which stream.
    """
    tensors: list[Tensor] = []
    numbers: list[int] = []
    if not _by_owner:
        return tensors, numbers
    for at, weight in enumerate(weights):
        owner = None if owners is None else root_of(owners[at])
        for tensor, note in _all_of(weight, owner):
            if note.others is None:
                numbers += (at, note.form, note.stream)
            elif at == 0 and _are_of(note.others, weights, owners):
                numbers += (-1, note.form, note.stream)
            else:
                continue
            tensors.append(tensor)
    return tensors, numbers


def _are_of(
    parts: tuple[Part, ...], weights: Sequence[Tensor], owners: Sequence[Tensor] | None
) -> bool:
    """Whether all but the first of a layer's weights are what they were."""
    if len(parts) != len(weights) - 1:
        return False
    for at, part in enumerate(parts, 1):
        weight = weights[at]
        known = owners is not None and weight._base is None
        owner = root_of(owners[at]) if known else weight_cache.owner_of(weight)  # type: ignore[index]
        if owner.is_inference() or not part.is_of(weight, owner):
            return False
    return True


def prepared(weight: Tensor, form: str, number: int, prepare: weight_cache.Prepare) -> Tensor:
    """What `packed.prepared` returns, ready on the current stream; noted where it may serve again.

    Args:
        weight, form, prepare: as there.
        number: `number_of` the form.
    """
    result = weight_cache.prepared(weight, form, prepare)
    note_prepared(weight, form, number, result)
    return result


def note_prepared(
    weight: Tensor,
    form: str,
    number: int,
    result: Tensor,
    others: tuple[Part, ...] | None = None,
) -> None:
    """Note what weight_cache.py keeps of a weight, where it may serve again.

    Args:
        weight, form, number: as for `prepared`.
        result: what it has returned.
        others: as in `Note`.
    """
    if weight_cache.are_said_to_change():
        return
    owner = weight_cache.owner_of(weight)
    kept = weight_cache.kept_of(weight, owner, form)
    if kept is not None and kept.prepared is result:
        stream = torch._C._cuda_getCurrentRawStream(weight.get_device()) if weight.is_cuda else 0
        place = (weight.data_ptr(), weight.stride())
        if _add(owner, Note(weakref.ref(kept), number, stream, *place, others)) and others is None:
            _tell_host(weight, owner, kept, number, stream)


def _tell_host(
    weight: Tensor, owner: Tensor, kept: weight_cache.Kept, number: int, stream: int
) -> None:
    if host.is_loaded():
        note = torch.ops.ksopt_host.note_prepared
        note(weight, owner, kept.token, kept.version, number, stream)


def _add(owner: Tensor, new: Note) -> bool:
    """Whether the note is a new one."""
    found = _by_owner.get(id(owner))
    if found is not None:
        newest = found.notes[0]
        if newest.kept() is new.kept() and newest.stream == new.stream:
            return False
    reference, notes = (_reference(owner), ()) if found is None else (found.owner, found.notes)
    replaced = (new.form, new.stream, new.address, new.strides)
    others = [
        note
        for note in notes
        if (note.form, note.stream, note.address, note.strides) != replaced
        and note.kept() is not None
    ]
    _by_owner[id(owner)] = _Notes(reference, (new, *others[: _MOST - 1]))
    return True


def _reference(owner: Tensor) -> weakref.ref[Tensor]:
    """To a tensor whose notes go with it."""
    place = id(owner)

    def gone(reference: weakref.ref[Tensor]) -> None:
        found = _by_owner.get(place)
        if found is not None and found.owner is reference:
            del _by_owner[place]

    return weakref.ref(owner, gone)
