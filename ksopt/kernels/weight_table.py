"""Registers prepared weights with the host library, which then multiplies by them without Python.

weight_cache.py stores prepared weights and alone decides for how long. This module registers the
ones used last in the library's table (csrc/host/cached_weights.cpp), where the next call looks them
up. A note holds nothing alive: when weight_cache.py drops an entry (a training step,
`ksopt.refresh`, the memory limit, the weight's death), its note is void.

A note serves a call if these match the weight, or all weights that were prepared together:

- each weight's storage, its address, its strides, and the version of what it is a view of:
  csrc/host/cached_weights.cpp;
- its form, that the current stream may read it, and that no CUDA graph is captured:
  csrc/host/dispatch_table.hpp.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ksopt.jit import host
from ksopt.kernels import weight_cache

_numbers: dict[tuple[Any, ...], int] = {}
_next_number = itertools.count(1)

# The overload's own implementation, once the library is loaded.
_note_in_library: Callable[..., None] | None = None


def number_of(form: str, shape: tuple[int, ...], dtype: str) -> int:
    """A number, never 0, of a form of weights with a shape and dtype; constant in a process.

    Example:
        >>> number_of("adbc", (1, 2, 3, 4), "float32") == number_of("adbc", (1, 2, 3, 4), "float32")
        True
    """
    key = (form, tuple(shape), dtype)
    return _numbers.get(key) or _numbers.setdefault(key, next(_next_number))


def prepared(weight: Tensor, form: str, number: int, prepare: weight_cache.Prepare) -> Tensor:
    """The result of `weight_cache.prepared`, registered where later calls may use it.

    Args:
        weight, form, prepare: as there.
        number: `number_of` the form.
    """
    result = weight_cache.prepared(weight, form, prepare)
    note_prepared((weight,), form, number, result)
    return result


def of(weight: Tensor, owner: Tensor | None = None) -> list[tuple[Tensor, int]]:
    """The registered forms of a weight with their numbers, the newest first.

    Args:
        weight: any tensor with memory.
        owner: the tensor that it is declared a view of, or None.

    Returns:
        The forms prepared from the weight's present values that are still cached; none without the
        library.
    """
    if not host.is_loaded():
        return []
    tensors, numbers = torch.ops.ksopt_host.prepared_of(weight, owner)
    return list(zip(tensors, numbers, strict=True))


def note_prepared(
    weights: Sequence[Tensor],
    form: str,
    number: int,
    result: Tensor,
    versions: Sequence[int] = (),
) -> None:
    """Register an entry of weight_cache.py with the library, where later calls may use it.

    Args:
        weights: those that it was prepared from; the entry belongs to the first.
        form, number: as for `prepared`.
        result: the tensor that weight_cache.py has returned.
        versions: of all but the first weight, when it was prepared.
    """
    if _note_in_library is None or weight_cache.are_marked_repacked():
        return
    first = weights[0]
    owners = [weight_cache.owner_of(weight) for weight in weights]
    cached = weight_cache.cached_of(first, owners[0], form)
    if cached is None or cached.prepared is not result:
        return
    stream = torch._C._cuda_getCurrentRawStream(first.get_device()) if first.is_cuda else 0
    if (number, stream) not in cached.noted:
        when = (cached.version, *versions)
        _note_in_library(weights, owners, when, cached.token, result, number, stream)
        cached.noted.add((number, stream))


def _follow_host() -> None:
    global _note_in_library
    _note_in_library = torch.ops.ksopt_host.note_prepared.default._op


host.when_loaded(_follow_host)
