"""Tracker of the tensors of a graph through its ATen operators.

`Tracker` is a dispatch mode: while the graph runs on fake tensors it sees each ATen operator,
whatever torch function the author called. Operators with a rule
(`ksopt.compile.capture.rule_table`) keep track of their result; the result of any other is a root
of its own, which is always correct.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ksopt.compile.capture.index_map import IndexMap, NotNestedError, identity
from ksopt.compile.capture.nodes import fake_result
from ksopt.compile.capture.rule_table import RULES
from ksopt.compile.capture.symbolic import Size, is_marked_dynamic, plain
from ksopt.compile.capture.values import (
    Cast,
    Kind,
    Miss,
    Origin,
    Region,
    Root,
    Structured,
    Trace,
    View,
)
from ksopt.patterns.chain import Pattern


class FixedSizeNeeded(Exception):
    """A symbolic number of features must be fixed at its present value, and the run restarted.

    Raised by `Tracker.fix`.
    """

    def __init__(self, size: Size) -> None:
        super().__init__(str(size))
        self.size = size


class FrozenPattern(Protocol):
    """The pattern of the values of a placeholder's frozen weight; None if there is none."""

    def __call__(self, node: fx.Node) -> Pattern | None: ...

    def has_zeros(self, node: fx.Node) -> bool:
        """Whether a placeholder is a frozen weight with zeros among its values."""
        ...


class Tracker(TorchDispatchMode):
    """Dispatch mode that records a `View` of every tensor while a graph runs.

    Attributes:
        trace: the records so far.
        node: the graph's node that is running.
        frozen_pattern: see `FrozenPattern`.
        paused: whether operators run without being noted.
        unfixable: expressions of sizes that cannot be fixed, see `fix`.
        records_somewhere: whether gradients are on at any node of the graph.
    """

    def __init__(
        self,
        frozen_pattern: FrozenPattern | None = None,
        unfixable: frozenset[Any] = frozenset(),
        records_somewhere: bool = True,
    ) -> None:
        super().__init__()
        self.records_somewhere = records_somewhere
        self.unfixable = unfixable
        self.trace = Trace()
        self.node: fx.Node | None = None
        self.structured: dict[Root, Structured | None] = {}
        self.lost: dict[Root, str | None] = {}
        self.frozen_pattern = frozen_pattern
        self.paused = False
        self._views: dict[int, tuple[View, tuple[int, int]]] = {}
        self._casts: dict[tuple[Root, torch.dtype, Any], Root] = {}
        self._values: set[int] = set()
        self._taken_elsewhere: set[Root] = set()
        self._created_in: dict[int, Region] = {}
        self._alive: list[Tensor] = []
        self._written: dict[int, Kind] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an ATen operator, then record its result."""
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        following = RULES.get(func.overloadpacket)
        if following is None and _is_composite(func):
            # Under inference_mode composite operators arrive whole.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if following is not None and self._reshapes_temporary(func, args):
            view = self.view(args[0])
            try:
                following(self, func, args, kwargs, result)
            except NotNestedError:
                self.fresh(result, view.root.kind)
        elif func._schema.is_mutable:
            self._write(func, args, kwargs)
        elif following is not None:
            with contextlib.suppress(NotNestedError):
                following(self, func, args, kwargs, result)
        self._note_rest(args, kwargs, result)
        return result

    def view(self, tensor: Tensor) -> View:
        """The view that a tensor is; of itself, if nothing is known."""
        known = self._views.get(id(tensor))
        if known is not None and known[1] == self.stamp(tensor):
            return known[0]
        kind = known[0].root.kind if known is not None else Kind.ACTIVATION
        # It may have been written through another view of its memory.
        return self.fresh(tensor, kind | self._written.get(self.stamp(tensor)[0], Kind.CONSTANT))

    def knows(self, tensor: Tensor) -> bool:
        """Whether a tensor is recorded."""
        return id(tensor) in self._views

    def note(self, tensor: Tensor, view: View) -> View:
        """Record the view that a tensor is."""
        self._views[id(tensor)] = (view, self.stamp(tensor))
        self._alive.append(tensor)  # an id is unique only among the living
        return view

    def fresh(self, tensor: Tensor, kind: Kind, origin: Origin | None = None) -> View:
        """Record a tensor as a root of its own."""
        root = self.root(tensor.shape, tensor.dtype, kind, origin, tensor)
        return self.note(tensor, View(root, identity(root.shape)))

    def records_like_now(self, root: Root) -> bool:
        """Whether gradients flow through the running node as through the producer of a root.

        Only such roots may become part of a product that is computed by several nodes.
        """
        if self.node is None or root.producer is None or root.producer is self.node:
            return True
        now, then = self.trace.regions[self.node], self.trace.regions[root.producer]
        if root.producer.op != "placeholder":
            return now.records_like(then)
        value = fake_result(root.producer)
        if isinstance(value, Tensor) and value.requires_grad:
            # Its gradient is recorded where it is read with gradients on. A view that is taken of
            # it with gradients off has none, which shows only where they are on later.
            return now.grad if self.records_somewhere else now.records_like(then)
        # No gradient ends at a frozen weight, wherever it is read.
        frozen = root.kind is Kind.WEIGHT and isinstance(value, Tensor)
        return frozen or now.records_like(then)

    def as_value_of(self, node: fx.Node, value: Tensor) -> View:
        """The view that a node's value is.

        A view taken where gradients are off of a tensor created where they are on (or vice versa)
        has the same elements and other gradients: it is a root of its own. So is a copy of such a
        view: gradients may later flow through the view, but never through the copy.
        """
        view = self.view(value)
        region = self.trace.regions[node]
        created_in = self._created_in.setdefault(self.stamp(value)[0], region)
        if id(value) not in self._values:
            if view.root.producer is node and not region.records_like(created_in):
                self._taken_elsewhere.add(view.root)  # a view that could not be followed
            elif not self.records_like_now(view.root):
                view = self.fresh(value, view.root.kind)
                self._taken_elsewhere.add(view.root)
            elif view.root in self._taken_elsewhere and self._is_copy(value, view.root):
                view = self.fresh(value, view.root.kind)
        self._values.add(id(value))
        self.trace.views[node] = view
        self.trace.memory[node] = self.stamp(value)
        return view

    def _is_copy(self, value: Tensor, root: Root) -> bool:
        return root.storage is None or root.storage[0] != self.stamp(value)[0]

    def cast(self, root: Root, dtype: torch.dtype) -> Root:
        """A root in another dtype, one for all nodes through which gradients flow alike."""
        region = None if self.node is None else self.trace.regions[self.node]
        flags = None if region is None else (region.grad, region.inference)
        key = (root, dtype, flags)
        if key not in self._casts:
            self._casts[key] = self.root(root.shape, dtype, root.kind, Cast(root))
        return self._casts[key]

    def fix(self, size: Size) -> None:
        """Fix a symbolic size at its value in the current call.

        Raises:
            FixedSizeNeeded: it can be fixed.
            NotNestedError: it is no multiple of one size of an input, or depends on a dim that the
                caller marked as dynamic.
        """
        if size.node.expr in self.unfixable:
            reason = "is marked dynamic" if is_marked_dynamic(size) else "depends on the batch"
            self.miss(f"its number of features, {size}, {reason}")
            raise NotNestedError(f"the size {size} cannot be fixed")
        raise FixedSizeNeeded(size)

    def root(
        self,
        shape: Any,
        dtype: torch.dtype,
        kind: Kind,
        origin: Origin | None = None,
        tensor: Tensor | None = None,
    ) -> Root:
        """A new root; ``tensor`` holds it in memory, if anything does."""
        sizes: tuple[Size, ...] = tuple(plain(size) for size in shape)
        storage = None if tensor is None else self.stamp(tensor)
        return Root(sizes, dtype, kind, self.node, origin, storage=storage)

    def moved(self, result: Tensor, source: Tensor, index_map: IndexMap) -> None:
        """Record that a result holds a source's elements in other positions."""
        self.note(result, View(self.view(source).root, index_map))

    def miss(self, reason: str, pattern: Pattern | None = None) -> None:
        """Record that a product by a weight at this node cannot be lowered."""
        if self.node is not None:
            self.trace.misses.append(Miss(self.node, reason, pattern))

    def stamp(self, tensor: Tensor) -> tuple[int, int]:
        try:
            storage = tensor.untyped_storage()._cdata
        except (NotImplementedError, RuntimeError):  # sparse tensors have none
            storage = -id(tensor)
        return storage, len(self.trace.writes.get(storage, ()))

    def _reshapes_temporary(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether an operator reshapes in place a tensor that is not the value of a node.

        Decompositions do so to their own results. Reshaping an earlier node's value in place would
        invalidate the record of that node; it counts as a write.
        """
        if torch.Tag.inplace_view not in func.tags:
            return False
        return self.node is not None and self.view(args[0]).root.producer is self.node

    def _write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.node is not None:
            self.trace.writers.add(self.node)
        for argument, value in _arguments(func, args, kwargs):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for tensor in tree_leaves(value):
                if isinstance(tensor, Tensor):
                    storage = self.stamp(tensor)[0]
                    kind = self._kind_of(args, kwargs)
                    if torch.Tag.inplace_view in func.tags:
                        self.trace.reshaped.add(self.view(tensor).root)
                    self.note_write(storage, kind)
                    self.fresh(tensor, kind)

    def note_write(self, storage: int, kind: Kind = Kind.ACTIVATION) -> None:
        """Record that the running node writes a storage, and the kind of what is written."""
        self._written[storage] = self._written.get(storage, kind) | kind
        at = -1 if self.node is None else self.trace.order[self.node]
        self.trace.writes.setdefault(storage, []).append(at)

    def _note_rest(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        kind = None
        for tensor in tree_leaves(result):
            if not isinstance(tensor, Tensor):
                continue
            known = self._views.get(id(tensor))
            if known is None or known[1] != self.stamp(tensor):
                kind = kind or self._kind_of(args, kwargs)
                self.fresh(tensor, kind)

    def _kind_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kind:
        kind = Kind.CONSTANT
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                kind |= self.view(leaf).root.kind
        return kind


def _is_composite(func: Any) -> bool:
    return func.namespace == "aten" and torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), torch._C.DispatchKey.CompositeImplicitAutograd
    )


def _arguments(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[Any, Any]]:
    for argument, value in zip(func._schema.arguments, args, strict=False):
        yield argument, value
    named = {argument.name: argument for argument in func._schema.arguments}
    for name, value in kwargs.items():
        yield named[name], value
