"""Several weights prepared as one tensor, as a kernel of a whole chain reads them.

The result is cached with the first weight, by the rules of weight_cache.py, for as long as all of
them are unchanged: the same tensors with the same memory in the same version.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ksopt.kernels import weight_cache, weight_table
from ksopt.precision import dtype_name


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One of several weights that were prepared together.

    Attributes:
        owner: the tensor that counts its versions, not that of another name of the same memory.
        storage, address, strides, version: of the weight when it was prepared. Who holds this
            keeps the storage's address from being reused.
    """

    owner: weakref.ref[Tensor]
    storage: int
    address: int
    strides: tuple[int, ...]
    version: int

    @classmethod
    def of(cls, weight: Tensor, owner: Tensor) -> Part:
        """The present state of a weight; ``owner`` is its `weight_cache.owner_of`."""
        return cls(weakref.ref(owner), *_state(weight, owner))

    @property
    def is_outdated(self) -> bool:
        """Whether the weight has changed or is gone."""
        owner = self.owner()
        if owner is None or owner._version != self.version:
            return True
        return owner.untyped_storage()._cdata != self.storage

    def is_of(self, weight: Tensor, owner: Tensor) -> bool:
        """Whether a weight is unchanged since it was prepared."""
        state = (self.storage, self.address, self.strides, self.version)
        return self.owner() is owner and not weight.is_neg() and state == _state(weight, owner)


def _state(weight: Tensor, owner: Tensor) -> tuple[int, int, tuple[int, ...], int]:
    storage = weight.untyped_storage()._cdata
    return storage, weight.data_ptr(), weight.stride(), owner._version


def prepared_together(
    weights: Sequence[Tensor], form: str, prepare: Callable[[Sequence[Tensor]], Tensor]
) -> Tensor:
    """``prepare(weights)``, or what an earlier call with this form of the same weights returned.

    Args:
        weights: of a chain's factors, of all siblings; on any device, any strides.
        form: names what ``prepare`` does; equal names must mean equal results.
        prepare: computes a new tensor from detached weights.

    Returns:
        The prepared weights, which must not be written to.

    Example:
        >>> import torch
        >>> weights = [torch.ones(1, 2, 2, 1), torch.ones(1, 2, 2, 1)]
        >>> def side_by_side(weights):
        ...     return torch.cat([weight.flatten() for weight in weights])
        >>> first = prepared_together(weights, "side by side", side_by_side)
        >>> prepared_together(weights, "side by side", side_by_side) is first
        True
        >>> _ = weights[1].add_(1)
        >>> prepared_together(weights, "side by side", side_by_side)[-1]
        tensor(2.)
    """
    result = _together(weights, form, prepare)
    assert result is not None
    return result


def cached_together(
    weights: Sequence[Tensor],
    form: str,
    prepare: Callable[[Sequence[Tensor]], Tensor],
    size_bytes: int,
    is_sound: Callable[[Tensor], bool],
) -> Tensor | None:
    """`prepared_together`, but only where the result is cached.

    Args:
        weights, form, prepare: as there.
        size_bytes: memory of the prepared weights.
        is_sound: whether a result may be used; else it is not cached.

    Returns:
        None where they would not be cached, or would become part of a CUDA graph: nothing is
        prepared then. None, too, where they are not sound.
    """
    try:
        return _together(weights, form, prepare, size_bytes, is_sound)
    except _UnsoundError:
        return None


class _UnsoundError(Exception):
    """The prepared weights may not be used."""


def _together(
    weights: Sequence[Tensor],
    form: str,
    prepare: Callable[[Sequence[Tensor]], Tensor],
    size_bytes: int | None = None,
    is_sound: Callable[[Tensor], bool] | None = None,
) -> Tensor | None:
    """Do as `cached_together`: without ``size_bytes`` always, without ``is_sound`` unchecked.

    Raises:
        _UnsoundError: the result may not be used.
    """
    must_stay = size_bytes is not None
    owners = [weight_cache.owner_of(weight) for weight in weights]

    def prepared_anew() -> Tensor:
        return prepare([weight.detach() for weight in weights])

    if not all(map(weight_cache.is_cacheable, weights, owners)):
        return None if must_stay else prepared_anew()
    first, *others = weights
    parts = tuple(map(Part.of, others, owners[1:]))
    dtype = dtype_name(first.dtype)
    number = number_of(form, [weight.shape for weight in weights], dtype)
    whole_form = _whole_form(form, others, parts)
    cached = _cached(weights, owners, whole_form)
    if weight_cache.is_recorded(first):
        read = weight_cache.recorded(weights, owners, cached, prepare)
        return prepared_anew() if read is None and not must_stay else read
    if cached is not None:
        result = cached.on_current_stream()
        weight_table.note_prepared(weights, whole_form, number, result, _versions(parts))
        return result
    # Other groups' entries with the same first weight stay if they are still current.
    weight_cache.drop(first, lambda _, tensor: any(part.is_outdated for part in _parts_of(tensor)))
    if size_bytes is not None and not weight_cache.has_room(size_bytes, first.device):
        return None
    for owner in owners[1:]:
        weight_cache.join(owner, owners[0])

    def prepared(_: Tensor) -> Tensor:
        result = prepared_anew()
        if is_sound is not None and not is_sound(result):
            raise _UnsoundError
        result.parts = parts  # type: ignore[attr-defined]
        # While these live, no other storage gets the address of one of theirs.
        result.storages_of_weights = [  # type: ignore[attr-defined]
            StorageWeakRef(weight.untyped_storage()) for weight in others
        ]
        return result

    result = weight_cache.prepared(first, whole_form, prepared)
    weight_table.note_prepared(weights, whole_form, number, result, _versions(parts))
    return result


def is_cached(weights: Sequence[Tensor], form: str) -> bool:
    """Whether this form of these weights is cached: `cached_together` then returns it."""
    owners = [weight_cache.owner_of(weight) for weight in weights]
    parts = tuple(map(Part.of, weights[1:], owners[1:]))
    return _cached(weights, owners, _whole_form(form, weights[1:], parts)) is not None


def _parts_of(prepared: Tensor) -> tuple[Part, ...]:
    """All weights but the first that a tensor was prepared from; none where it was one."""
    return getattr(prepared, "parts", ())


def _whole_form(form: str, others: Sequence[Tensor], parts: Sequence[Part]) -> str:
    """The form's name in the first weight's entry, which identifies the other weights."""
    kinds = [
        (tuple(weight.shape), str(weight.dtype), part.storage)
        for weight, part in zip(others, parts, strict=True)
    ]
    places = [(part.address, part.strides, part.version) for part in parts]
    return f"{form} {kinds} {places}"


def _cached(
    weights: Sequence[Tensor], owners: Sequence[Tensor], whole_form: str
) -> weight_cache.CachedWeight | None:
    cached = weight_cache.cached_of(weights[0], owners[0], whole_form)
    if cached is None or not all(
        map(Part.is_of, _parts_of(cached.prepared), weights[1:], owners[1:])
    ):
        return None
    return cached


def _versions(parts: Sequence[Part]) -> list[int]:
    return [part.version for part in parts]


def number_of(form: str, shapes: Sequence[Sequence[int]], dtype: str) -> int:
    """The `weight_table.number_of` a form of several weights, of one dtype.

    Example:
        >>> number_of("packed", [(1, 2, 3, 4)], "float16") > 0
        True
    """
    return weight_table.number_of(form, tuple(n for shape in shapes for n in shape), dtype)
