"""Prepared weights that recorded CUDA graphs read, and their update before replays.

A graph holds the addresses of what it read when it was recorded, and a weight that the model stores
may be written before the next replay. So the graph's prepared weights are updated in place before
the function that replays it is called (`RecordedWeights`). ksopt runs no
code before the replay of a graph that the user captured. Such a graph prepares its weights itself,
at each replay (weight_cache.py), unless the user promises to call `ksopt.refresh` after writes
(`prepared_weights`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ksopt.kernels import weight_cache
from ksopt.kernels.weight_scopes import recorded_by

Prepare = Callable[[Sequence[Tensor]], Tensor]


@dataclass
class _Source:
    """The base of weights: an argument of the function, or any other tensor.

    Attributes:
        index: of the argument; None for any other tensor, such as another preparation's result.
        owner: the tensor, when the weights were prepared last.
        address: of its first element, which decides whether the graph is replayed.
        version: of the owner, when the weights were prepared last.
    """

    index: int | None
    owner: weakref.ref[Tensor]
    address: int
    version: int

    def present(self, arguments: Sequence[Any]) -> Tensor | None:
        """The tensor as it is now; None if its address has changed: the graph is not replayed then.

        Only addresses are compared, as torch's trees of CUDA graphs do. The weight of a second
        model may have the address of a deleted model's weight, whose graph is then replayed.
        """
        owner = self.owner() if self.index is None else arguments[self.index]
        if owner is None or owner.data_ptr() != self.address:
            return None
        return owner

    def is_written(self, owner: Tensor) -> bool:
        return owner is not self.owner() or owner._version != self.version


@dataclass(frozen=True)
class _Preparation:
    """A tensor that a graph reads, computed by ``prepare`` from views of the sources.

    Attributes:
        views: size, stride and offset from the source's own, in elements.
    """

    sources: tuple[_Source, ...]
    views: tuple[tuple[torch.Size, tuple[int, ...], int], ...]
    prepared: Tensor
    prepare: Prepare

    def refresh(self, arguments: Sequence[Any], is_forced: bool) -> None:
        owners = [owner for one in self.sources if (owner := one.present(arguments)) is not None]
        if len(owners) < len(self.sources):
            return
        pairs = list(zip(self.sources, owners, strict=True))
        if not is_forced and not any(source.is_written(owner) for source, owner in pairs):
            return
        weights = [
            owner.detach().as_strided(size, stride, owner.storage_offset() + offset)
            for owner, (size, stride, offset) in zip(owners, self.views, strict=True)
        ]
        self.prepared.copy_(self.prepare(weights))
        for source, owner in pairs:
            source.owner, source.version = weakref.ref(owner), owner._version


def _preparation_of(
    weights: Sequence[Tensor],
    owners: Sequence[Tensor],
    indices: Sequence[int | None],
    prepared: Tensor,
    prepare: Prepare,
) -> _Preparation:
    sources, views = [], []
    for weight, owner, index in zip(weights, owners, indices, strict=True):
        sources.append(_Source(index, weakref.ref(owner), owner.data_ptr(), owner._version))
        offset = int(weight.storage_offset() - owner.storage_offset())
        views.append((weight.shape, weight.stride(), offset))
    return _Preparation(tuple(sources), tuple(views), prepared, prepare)


def _are_views(weights: Sequence[Tensor], owners: Sequence[Tensor]) -> bool:
    """Whether weights can be read through their owners: not where these have another dtype."""
    return all(weight.dtype == owner.dtype for weight, owner in zip(weights, owners, strict=True))


class RecordedWeights:
    """A function that replays CUDA graphs, with the prepared weights that these read.

    Args:
        function: of parameters, buffers and inputs.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._preparations: list[_Preparation] = []
        self._seen: list[tuple[int, weakref.ref[Tensor], int]] = []
        self._forgotten = 0
        self._arguments: Sequence[Any] = ()

    def __call__(self, *arguments: Any) -> Any:
        """Prepare again the weights written since the last call, then call the function."""
        if self._preparations:
            self._refresh(arguments)
        self._arguments = arguments
        try:
            with recorded_by(self):
                return self._function(*arguments)
        finally:
            self._arguments = ()

    def add(
        self,
        weights: Sequence[Tensor],
        owners: Sequence[Tensor],
        prepared: Tensor,
        prepare: Prepare,
    ) -> bool:
        """Let the graph that is being recorded read a preparation.

        Args:
            weights: views of the owners' memory.
            owners: arguments of the present call, or preparations that were added before.
            prepared: of the weights, as they are now.
            prepare: prepares them.

        Returns:
            False if a write to an owner would go unseen: the graph then prepares the weights.
        """
        if any(one.prepared is prepared for one in self._preparations):
            return True
        indices = [
            next((at for at, one in enumerate(self._arguments) if one is owner), None)
            for owner in owners
        ]
        for index, owner in zip(indices, owners, strict=True):
            if index is None and not any(one.prepared is owner for one in self._preparations):
                return False
        if not _are_views(weights, owners):
            return False
        self._preparations.append(_preparation_of(weights, owners, indices, prepared, prepare))
        if len(self._preparations) == 1:
            self._forgotten = weight_cache.forgotten()
        self._see(self._arguments)
        return True

    def _refresh(self, arguments: Sequence[Any]) -> None:
        forgotten = weight_cache.forgotten()
        is_forced = forgotten != self._forgotten
        if not is_forced:
            for index, owner, version in self._seen:
                known = owner()
                if known is None or known is not arguments[index] or known._version != version:
                    break
            else:
                return
        with torch.inference_mode(False), torch.no_grad():
            for one in self._preparations:
                one.refresh(arguments, is_forced)
        self._forgotten = forgotten
        self._see(arguments)

    def _see(self, arguments: Sequence[Any]) -> None:
        """Store the state of the arguments, whose change leads to a new preparation."""
        indices = {source.index for one in self._preparations for source in one.sources}
        self._seen = [
            (index, weakref.ref(arguments[index]), arguments[index]._version)
            for index in sorted(index for index in indices if index is not None)
        ]


class _CapturedWeights:
    """The prepared weights that graphs of the user's read, each for as long as its weights live."""

    def __init__(self) -> None:
        self._preparations: list[_Preparation] = []
        weight_cache.when_refreshed(self._refresh)

    def add(
        self,
        weights: Sequence[Tensor],
        owners: Sequence[Tensor],
        prepared: Tensor,
        prepare: Prepare,
    ) -> bool:
        """Do what `RecordedWeights.add` does, for any weights."""
        if any(one.prepared is prepared for one in self._preparations):
            return True
        if not _are_views(weights, owners):
            return False
        added = _preparation_of(weights, owners, [None] * len(owners), prepared, prepare)
        self._preparations.append(added)
        for owner in owners:
            weakref.finalize(owner, self._drop, weakref.ref(added)).atexit = False
        return True

    def _drop(self, dropped: weakref.ref[_Preparation]) -> None:
        self._preparations = [one for one in self._preparations if one is not dropped()]

    def _refresh(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for one in self._preparations:
                one.refresh((), is_forced=True)


_captured = _CapturedWeights()


def prepared_weights() -> recorded_by:
    """A scope in which the CUDA graphs that you capture read weights that were prepared before.

    Outside of it such a graph prepares its weights at each replay, because they may change between
    two. Inside you promise to call `ksopt.refresh` after each change to them, before the next
    replay: it prepares them again, where the graphs read them. Without that call, replays
    multiply by the old weights. Graphs that ``torch.compile`` captures need no such promise.
    A graph that writes weights itself, as one of a whole training step does, is captured outside.

    Call the model once before the capture, with the same shapes: what is not prepared then is
    prepared by the graph. What a graph reads takes memory for as long as the weights live.

    Example:
        >>> import ksopt
        >>> model, x = ksopt.KSLinear(4, 4, "(1,2,2,2)*(2,2,2,1)"), torch.ones(1, 4)
        >>> with torch.no_grad(), ksopt.prepared_weights():
        ...     y = model(x)  # then the same inside of torch.cuda.graph(...)
    """
    return recorded_by(_captured)
