"""The cache of prepared weights: each form is prepared once per version of a weight.

A prepared form lives as long as its weight, beside it and not in it: nothing is added
to modules, their state_dicts or their copies. It is reused only for the same memory in the same
version (torch counts in-place changes), so an optimizer's step, ``copy_``, ``load_state_dict``,
``.to()`` and ``weight.data = ...`` all lead to a new preparation. Views (a transposed weight) are
cached with the tensor that they view. A tensor that compiled code created on the same memory does
not know what it is a view of, and counts versions of its own: see `weight_scopes.owned_by`.

A weight is prepared on every call:

- while autograd records a weight's gradient or computes it (see `weight_scopes.repacked`);
- for what a compiled graph computes (see `ksopt.ops.graph_inputs`);
- while a CUDA graph is captured: the preparation becomes part of the graph, because the weight may
  have changed when the graph is replayed (cuda_graph_weights.py has the exceptions);
- for inference tensors, which count no versions, for subclasses of Tensor, and for lazily negated
  views;
- where caching it would take more memory than `limit_bytes`.

A product under autograd also drops the entries of its weight, so that an evaluation after training
steps prepares the weight again, whatever the steps did to it. The step of a torch optimizer drops
the entries of all weights but those declared frozen (see `weight_scopes.frozen`): fused optimizers
do not count versions of the weights that they train (seen with 2.13), and a teacher that follows
its student is often written to through ``.data``.

Otherwise, writes that torch does not count go unseen: one through ``weight.data``, one to the same
memory from outside torch, and one under ``torch.autograd._unsafe_preserve_version_counter``, as
FSDP's gathering of shards is. After such a write, call ``ksopt.refresh()``.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from ksopt.jit import host
from ksopt.kernels import cached_tensors
from ksopt.kernels.weight_scopes import root_of, thread_state

Prepare = Callable[[Tensor], Tensor]

_LIMIT_SHARE = 0.1  # of a GPU's memory
_LIMIT_CPU = 2**30


@dataclass(frozen=True)
class CachedWeight:
    """A prepared weight and the state of the weight that it was prepared from.

    It is ``lasting`` if it was prepared while gradients passed through the weight. The weak
    reference keeps the storage's address from being reused, so equal addresses mean the same
    storage. The ``token`` is an alias of ``prepared`` that only this entry holds: the host library
    holds it weakly, and by it checks that this entry is still cached. The library has a note of it
    for each form and stream in ``noted``.
    """

    version: int
    storage: StorageWeakRef
    prepared: Tensor
    token: Tensor
    stream: int
    ready: torch.cuda.Event | None
    lasting: bool
    noted: set[tuple[int, int]] = field(default_factory=set)

    def is_of(self, weight: Tensor, owner: Tensor) -> bool:
        return (
            self.version == owner._version and self.storage.cdata == weight.untyped_storage()._cdata
        )

    def on_current_stream(self) -> Tensor:
        """The prepared weight, after the current stream waits until it may read it."""
        if self.ready is not None and _stream(self.prepared) != self.stream:
            current = torch.cuda.current_stream(self.prepared.device)
            current.wait_event(self.ready)
            self.prepared.record_stream(current)
        return self.prepared


_FormKey = tuple[str, int, torch.Size, tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class _Forms:
    """The cached forms of one weight, and the forms that are mere views of it."""

    owner: weakref.ref[Tensor]
    cached: dict[_FormKey, CachedWeight]
    views: set[_FormKey]


_by_weight: dict[int, _Forms] = {}
# Reentrant, for a weight may die, and its reference call back, while the lock is held.
_lock = threading.RLock()


partners: dict[int, set[int]] = {}
"""Ids of tensors by a tensor's id: those whose entries were prepared from both."""


def join(owner: Tensor, first: Tensor) -> None:
    """Register that an entry of ``first`` was prepared from ``owner``'s values, too."""
    with _lock:
        partners.setdefault(id(owner), set()).add(id(first))
        cached_tensors.add(owner)


def _after_fork() -> None:
    # The thread that held it is not in the child.
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def are_marked_repacked() -> bool:
    """Whether this is inside `weight_scopes.repacked`."""
    return thread_state.repacked


def are_repacked(device: int) -> bool:
    """Whether weights on CUDA are not cached: marked as changing, or a graph is captured.

    Args:
        device: the weights', which need not be the current one.
    """
    return thread_state.repacked or (thread_state.recorder is None and is_capturing(device))


def prepared(weight: Tensor, form: str, prepare: Prepare) -> Tensor:
    """``prepare(weight)``, or what an earlier call with this form and version of weight returned.

    Args:
        weight: on any device, any strides; a real tensor, not a fake or batched one.
        form: names what ``prepare`` does; equal names must mean equal results.
        prepare: computes a new tensor from a detached weight; if it returns a view of its argument
            nothing is cached.

    Returns:
        The prepared weight, which must not be written to.

    Example:
        >>> weight = torch.arange(4.0).reshape(1, 2, 2, 1)
        >>> first = prepared(weight, "double", lambda w: 2 * w)
        >>> prepared(weight, "double", lambda w: 2 * w) is first
        True
        >>> _ = weight.add_(1)
        >>> prepared(weight, "double", lambda w: 2 * w) is first
        False
    """
    owner = owner_of(weight)
    if not is_cacheable(weight, owner):
        return prepare(weight.detach())
    cached = cached_of(weight, owner, form)
    if is_recorded(weight):
        read = recorded((weight,), (owner,), cached, lambda weights: prepare(weights[0]))
        return prepare(weight.detach()) if read is None else read
    if cached is not None:
        return cached.on_current_stream()
    key = _key(weight, form)
    forms = _by_weight.get(id(owner))
    if forms is not None and key in forms.views:
        return prepare(weight.detach())
    return _prepare(weight, owner, key, prepare)


def cached_of(weight: Tensor, owner: Tensor, form: str) -> CachedWeight | None:
    """The entry of this version of a weight in this form; None if there is none.

    Args:
        weight, form: as for `prepared`.
        owner: its `owner_of`.
    """
    forms = _by_weight.get(id(owner))
    cached = None if forms is None else forms.cached.get(_key(weight, form))
    return cached if cached is not None and cached.is_of(weight, owner) else None


def is_recorded(weight: Tensor) -> bool:
    """Whether a CUDA graph is captured whose weights are prepared again before its replays."""
    return (
        thread_state.recorder is not None and weight.is_cuda and is_capturing(weight.get_device())
    )


def recorded(
    weights: Sequence[Tensor],
    owners: Sequence[Tensor],
    cached: CachedWeight | None,
    prepare: Callable[[Sequence[Tensor]], Tensor],
) -> Tensor | None:
    """The cached form of weights, where a graph that is being captured may read it.

    Args:
        weights, prepare: of the preparation.
        owners: their `owner_of`.
        cached: their entry; torch has waited for it before it captures.

    Returns:
        None where the graph has to prepare them itself.
    """
    assert thread_state.recorder is not None
    if cached is not None and thread_state.recorder.add(weights, owners, cached.prepared, prepare):
        return cached.prepared
    return None


def _key(weight: Tensor, form: str) -> _FormKey:
    return (form, weight.data_ptr(), weight.shape, weight.stride(), weight.dtype)


def cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous copy of a weight in another dtype, cached like all prepared forms.

    It is a weight itself, of which other forms may be prepared; of a stored weight it is a stored
    one, too.

    Args:
        weight: as for `prepared`.
        dtype: another one than the weight's.

    Example:
        >>> weight = torch.ones(1, 2, 2, 1)
        >>> cast(weight, torch.bfloat16) is cast(weight, torch.bfloat16)
        True
    """

    is_of_module = is_stored(owner_of(weight))

    def casted(stored: Tensor) -> Tensor:
        copy = stored.to(dtype, memory_format=torch.contiguous_format)
        return torch.nn.Parameter(copy, requires_grad=False) if is_of_module else copy

    return prepared(weight, f"cast {dtype}", casted)


def drop(weight: Tensor, is_outdated: Callable[[str, Tensor], bool]) -> None:
    """Drop some of the cached forms of a weight.

    Args:
        weight: as for `prepared`.
        is_outdated: (form, prepared weight) -> whether to drop it.
    """
    with _lock:
        forms = _by_weight.get(id(owner_of(weight)))
        cached = {} if forms is None else forms.cached
        for key in [key for key, one in cached.items() if is_outdated(key[0], one.prepared)]:
            del cached[key]


def forget(weight: Tensor) -> None:
    """Drop the cached forms of a weight and of its views: it is being trained.

    Example:
        >>> weight = torch.arange(4.0).reshape(1, 2, 2, 1)
        >>> first = prepared(weight, "double", lambda w: 2 * w)
        >>> forget(weight)
        >>> prepared(weight, "double", lambda w: 2 * w) is first
        False
    """
    _count_forgotten()
    root = root_of(weight)
    if cached_tensors.may_hold(root):
        with _lock:
            for other in (id(root), *partners.pop(id(root), ())):
                _by_weight.pop(other, None)
            cached_tensors.discard(root._cdata)


@_disable_dynamo  # which leaves it in place behind a compiled step, whose versions stay, too
def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Drop the forms of weights that the step, or code after it, may have changed unseen."""
    _count_forgotten()
    with _lock:
        for place, forms in list(_by_weight.items()):
            for key in [key for key, cached in forms.cached.items() if not cached.lasting]:
                del forms.cached[key]
            if not forms.cached and not forms.views:
                _by_weight.pop(place, None)
    for group in optimizer.param_groups if _by_weight else ():
        for parameter in group["params"]:
            forget(parameter)


@functools.cache
def _watch_optimizers() -> None:
    # Only once something is cached: until then ksopt changes nothing of torch's.
    register_optimizer_step_post_hook(_after_step)


_times_forgotten = 0


def forgotten() -> int:
    """A counter that changes whenever weights may have been written unseen by their versions."""
    by_library: int = torch.ops.ksopt_host.times_forgotten() if host.is_loaded() else 0
    return _times_forgotten + by_library


def _count_forgotten() -> None:
    global _times_forgotten
    _times_forgotten += 1


refreshes = 0
"""The number of `refresh` calls, which other caches of weights' values compare."""


_when_refreshed: list[Callable[[], None]] = []


def when_refreshed(update: Callable[[], None]) -> None:
    """Call a function at the end of each `refresh`."""
    _when_refreshed.append(update)


def refresh() -> None:
    """Drop all prepared weights, after a change to a weight that torch does not count.

    Those are writes through ``weight.data``, and writes to its memory from outside torch. After any
    change at all, where CUDA graphs were captured in `ksopt.prepared_weights`: what they read is
    prepared again, in place, on the current stream.

    Example:
        >>> import ksopt
        >>> layer = ksopt.KSLinear(4, 4, "(1,2,2,2)*(2,2,2,1)")
        >>> _ = layer.weights[0].data.zero_()
        >>> ksopt.refresh()
    """
    global refreshes
    with _lock:
        _by_weight.clear()
        partners.clear()
        cached_tensors.clear()
        refreshes += 1
    _count_forgotten()
    for update in _when_refreshed:
        update()


def cached_bytes(device: torch.device) -> int:
    """Bytes of all prepared weights that are cached on ``device``."""
    with _lock:
        return sum(
            cached.prepared.untyped_storage().nbytes()
            for forms in list(_by_weight.values())
            for cached in list(forms.cached.values())
            if cached.prepared.device == device
        )


def limit_bytes(device: torch.device) -> int:
    """The most bytes that prepared weights may take on ``device``."""
    if device.type != "cuda":
        return _LIMIT_CPU
    return int(_LIMIT_SHARE * torch.cuda.get_device_properties(device).total_memory)


def is_stored(weight: Tensor) -> bool:
    """Whether a weight is a module's parameter, or a view of one, and not computed for a call."""
    return isinstance(weight, torch.nn.Parameter) or isinstance(weight._base, torch.nn.Parameter)


def has_room(size_bytes: int, device: torch.device) -> bool:
    """Whether prepared weights of such a size may be added to those cached on ``device``."""
    return cached_bytes(device) + size_bytes <= limit_bytes(device)


def owner_of(weight: Tensor) -> Tensor:
    """The tensor that a weight is a view of, or itself: the cache's entries belong to it."""
    base = weight._base
    if base is not None:
        return base
    owner = thread_state.owner
    if owner is not None and owner is not weight and _share_memory(owner, weight):
        return owner
    return next((one for one in thread_state.owners if _share_memory(one, weight)), weight)


def _share_memory(one: Tensor, other: Tensor) -> bool:
    # Subclasses may have no memory of their own.
    plain = _is_plain(one) and _is_plain(other)
    return plain and one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor or type(tensor) is torch.nn.Parameter


def is_cacheable(weight: Tensor, owner: Tensor) -> bool:
    """Whether forms of a weight may be cached; ``owner`` is its `owner_of`."""
    return not (
        thread_state.repacked
        or not _is_plain(weight)
        or owner.is_inference()
        or weight.is_neg()  # its memory holds other values
        or (thread_state.recorder is None and weight.is_cuda and is_capturing(weight.get_device()))
    )


def _prepare(weight: Tensor, owner: Tensor, key: _FormKey, prepare: Prepare) -> Tensor:
    version = owner._version
    if weight.is_cuda:
        result = _in_a_thread_of_its_own(_prepare_for_cache, weight, prepare)
    else:
        result = _prepare_for_cache(weight, prepare)
    storage = weight.untyped_storage()
    if result.untyped_storage()._cdata == storage._cdata:
        # A view: it would keep the weight alive, and costs little to recreate without a thread.
        with _lock:
            _forms_of(owner).views.add(key)
        return result
    size = result.untyped_storage().nbytes()
    _watch_optimizers()
    with _lock:
        forms = _forms_of(owner)
        outdated = [
            k for k, cached in forms.cached.items() if k == key or not cached.is_of(weight, owner)
        ]
        for stale in outdated:
            del forms.cached[stale]
        if has_room(size, result.device):
            ready = None
            if result.is_cuda:
                ready = torch.cuda.Event()
                ready.record(torch.cuda.current_stream(result.device))
            stream, token = _stream(result), result.detach()
            forms.cached[key] = CachedWeight(
                version, StorageWeakRef(storage), result, token, stream, ready, thread_state.frozen
            )
    return result


def _prepare_for_cache(weight: Tensor, prepare: Prepare) -> Tensor:
    # It outlives this call, so it must be usable outside inference mode too.
    with torch.inference_mode(False), torch.no_grad():
        return prepare(weight.detach())


def _in_a_thread_of_its_own(function: Callable[..., Tensor], weight: Tensor, *args: Any) -> Tensor:
    """``function(weight, *args)`` on the current stream, its memory from torch's common pool.

    This thread's memory may come from a pool that is cleared: in the first run of a graph
    that ``torch.compile(mode="reduce-overhead")`` is about to capture, torch refuses tensors still
    alive there at the end, or reuses their memory. Torch redirects one thread, not all.
    """
    stream = torch.cuda.current_stream(weight.device)

    def work() -> Tensor:
        with torch.cuda.stream(stream):
            return function(weight, *args)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


def _forms_of(owner: Tensor) -> _Forms:
    """The entry of ``owner``, created if it is missing; the lock is held."""
    place = id(owner)
    forms = _by_weight.get(place)
    if forms is None or forms.owner() is not owner:

        def gone(reference: weakref.ref[Tensor]) -> None:
            with _lock:
                entry = _by_weight.get(place)
                if entry is not None and entry.owner is reference:
                    del _by_weight[place]
                cached_tensors.discard(address)

        address = cached_tensors.add(owner)
        forms = _by_weight[place] = _Forms(weakref.ref(owner, gone), {}, set())
    return forms


def is_capturing(device: int) -> bool:
    """Whether work on the current stream of CUDA device ``device`` becomes part of a graph."""
    if torch.cuda.device_count() <= 1 or device == torch.cuda.current_device():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _stream(tensor: Tensor) -> int:
    """The current stream of the tensor's device; 0 on a CPU."""
    if not tensor.is_cuda:
        return 0
    return torch.cuda.current_stream(tensor.device).cuda_stream
