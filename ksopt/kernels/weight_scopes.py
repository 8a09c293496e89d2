"""Scopes in which a caller declares properties of weights, for the thread that runs the block.

weight_cache.py needs properties of a weight that its tensor does not have. The host library, which
runs known products without Python, needs to know where weights change.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ksopt.jit import host


class Recorder(Protocol):
    """Updates the prepared weights that recorded CUDA graphs read: see cuda_graph_weights.py."""

    def add(
        self,
        weights: Sequence[Tensor],
        owners: Sequence[Tensor],
        prepared: Tensor,
        prepare: Callable[[Sequence[Tensor]], Tensor],
        /,
    ) -> bool:
        """Let the graph that is being recorded read a preparation; False if it must not."""


class _ThreadState(threading.local):
    repacked = False
    frozen = False
    owner: Tensor | None = None
    owners: tuple[Tensor, ...] = ()
    recorder: Recorder | None = None


thread_state = _ThreadState()
"""The state of the scopes that this thread is in."""

# The overloads' implementations, once the library is loaded. All products of a thread enter Python
# until it has called the first once.
_mark_repacked: Callable[[bool], None] | None = None
_mark_recorded: Callable[[bool], None] | None = None


def sync_host() -> None:
    """Copy this thread's state to the host library, if that is loaded."""
    if _mark_repacked is not None and _mark_recorded is not None:
        _mark_repacked(thread_state.repacked)
        _mark_recorded(thread_state.recorder is not None)


def _follow_host() -> None:
    global _mark_repacked, _mark_recorded
    _mark_repacked = torch.ops.ksopt_host.mark_repacked.default._op
    _mark_recorded = torch.ops.ksopt_host.mark_recorded.default._op


host.when_loaded(_follow_host)


class _Scope:  # a class, because a generator costs twice as much
    __slots__ = ("_before", "_value")
    _what: ClassVar[str]

    def __init__(self, value: Any = True) -> None:
        self._value = value

    def __enter__(self) -> None:
        self._before = getattr(thread_state, self._what)
        setattr(thread_state, self._what, self._value)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        setattr(thread_state, self._what, self._before)


class repacked(_Scope):
    """A scope in which weights are about to change: nothing is cached.

    Args:
        value: False for a block inside such a block whose weights do not change.
    """

    __slots__ = ()
    _what = "repacked"

    def __enter__(self) -> None:
        super().__enter__()
        if self._value != self._before:
            sync_host()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._value != self._before:
            sync_host()


class frozen(_Scope):
    """A scope in which weights are frozen while others are trained: gradients pass through them.

    Their cached forms outlive an optimizer's step.
    """

    __slots__ = ()
    _what = "frozen"


class owned_by(_Scope):
    """A scope in which weights in an owner's memory are cached with it, as its views.

    Inductor passes an operator a new tensor for each view at each call. It has the memory, and none
    of torch's records: which tensor it is a view of, and how often that was changed.

    Args:
        owner: the tensor that a model stores, a parameter or a buffer. Weights in other memory have
            nothing to do with it.
    """

    __slots__ = ()
    _what = "owner"

    def __init__(self, owner: Tensor) -> None:
        super().__init__(root_of(owner))


class owned_by_each(_Scope):
    """The same scope for several weights, each in one owner's memory.

    Args:
        owners: of the weights of a layer.
    """

    __slots__ = ()
    _what = "owners"

    def __init__(self, owners: Sequence[Tensor]) -> None:
        super().__init__(tuple(map(root_of, owners)))


class recorded_by(_Scope):
    """A scope in which CUDA graphs are recorded whose weights are prepared again before replays.

    Args:
        recorder: prepares them again.
    """

    __slots__ = ()
    _what = "recorder"

    def __enter__(self) -> None:
        super().__enter__()
        sync_host()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        sync_host()


def root_of(tensor: Tensor) -> Tensor:
    """The tensor that a tensor is a view of, or itself."""
    base = tensor._base
    return tensor if base is None else base
