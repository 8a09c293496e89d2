"""What the caller says of the weights in a block of code, for the thread that runs it.

Deep inside a product, weight_cache.py has to know more of a weight than the tensor tells. Where
weights change the host library, too, has to know: it runs what it knows without Python.
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
    """What keeps weights prepared that recorded CUDA graphs read: see recorded_weights.py."""

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
    changing = False
    frozen = False
    owner: Tensor | None = None
    owners: tuple[Tensor, ...] = ()
    recorder: Recorder | None = None


thread_state = _ThreadState()
"""The state of the scopes that this thread is in."""

# What the overload itself calls, once the library is loaded. Of a thread that has told it nothing
# yet all products enter Python, which tells it.
_mark_changing: Callable[[bool], None] | None = None


def sync_host() -> None:
    """Tell the host library, if it is loaded, what this thread says."""
    if _mark_changing is not None:
        _mark_changing(thread_state.changing)


def _follow_host() -> None:
    global _mark_changing
    _mark_changing = torch.ops.ksopt_host.mark_changing.default._op


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


class changing(_Scope):
    """In this block weights are about to change: nothing is kept.

    Args:
        value: False for a block inside such a block whose weights do not change.
    """

    __slots__ = ()
    _what = "changing"

    def __enter__(self) -> None:
        super().__enter__()
        if self._value != self._before:
            sync_host()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._value != self._before:
            sync_host()


class frozen(_Scope):
    """In this block weights stay as they are while others are trained: gradients pass through them.

    What is kept of them outlives an optimizer's step.
    """

    __slots__ = ()
    _what = "frozen"


class owned_by(_Scope):
    """In this block weights in an owner's memory are kept with it, as its views.

    Inductor gives an operator a new tensor for each view at each call. It has the memory, and none
    of what torch knows: what it is a view of, and how often that was changed.

    Args:
        owner: the tensor that a model stores, a parameter or a buffer. Weights in other memory have
            nothing to do with it.
    """

    __slots__ = ()
    _what = "owner"

    def __init__(self, owner: Tensor) -> None:
        super().__init__(root_of(owner))


class owned_by_each(_Scope):
    """The same of several weights: each in one owner's memory.

    Args:
        owners: of the weights of a layer.
    """

    __slots__ = ()
    _what = "owners"

    def __init__(self, owners: Sequence[Tensor]) -> None:
        super().__init__(tuple(map(root_of, owners)))


class recorded_by(_Scope):
    """In this block CUDA graphs may be recorded, before whose replays weights are prepared again.

    Args:
        recorder: which does so.
    """

    __slots__ = ()
    _what = "recorder"


def root_of(tensor: Tensor) -> Tensor:
    """The tensor that a tensor is a view of, or itself."""
    base = tensor._base
    return tensor if base is None else base
