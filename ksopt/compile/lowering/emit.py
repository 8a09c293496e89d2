"""Emitter: inserts nodes into a graph, with the metadata that later passes expect.

Inserted nodes carry a fake result (``meta["example_value"]``, or ``meta["val"]`` in an exported
graph) and the stack trace of the author's line that they replace. They call only public torch
functions and ksopt's operator, so that AOTAutograd's cache takes the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils.checkpoint import CheckpointPolicy

from ksopt.compile.capture.index_map import Atoms
from ksopt.compile.capture.nodes import fake_result, on_fakes
from ksopt.compile.capture.reshape_plan import Move, plan
from ksopt.compile.capture.symbolic import same

_COPIED_META = ("stack_trace", "nn_module_stack", "source_fn_stack", "custom")


class Emitter:
    """Inserts nodes before one node, on behalf of another.

    Args:
        before: the node to insert before.
        like: the node whose stack trace the new nodes carry.
        emitted: the list that new nodes are appended to.
        known: results of calls on tensors of the same sizes; the layers of a model repeat them, and
            running one on fake tensors of symbolic sizes takes milliseconds.
    """

    def __init__(
        self,
        before: fx.Node,
        like: fx.Node,
        emitted: list[fx.Node],
        known: dict[Hashable, Any],
    ) -> None:
        self._before = before
        self._like = like
        self._emitted = emitted
        self._known = known

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """A node that calls a function; args are nodes and plain values, kwargs plain values."""
        graph = self._before.graph
        with graph.inserting_before(self._before):
            node = graph.call_function(function, args, kwargs)
        return self._described(node, args, kwargs, function)

    def saved(self, function: Callable[..., Any], *args: Any) -> fx.Node:
        """A call whose result is saved for the backward pass, not recomputed.

        AOTAutograd would read the args again in the backward pass. The author's own call does not,
        and they may have been written by then.
        """
        node = self.call(function, *args)
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        return node

    def method(self, name: str, node: fx.Node, *args: Any) -> fx.Node:
        """A node that calls a tensor's method."""
        graph = self._before.graph
        with graph.inserting_before(self._before):
            created = graph.call_method(name, (node, *args))
        return self._described(
            created, (node, *args), {}, lambda own, *rest: getattr(own, name)(*rest)
        )

    def move(self, node: fx.Node, have: Sequence[Atoms], want: Sequence[Atoms]) -> fx.Node:
        """A node with another view of the same root.

        Raises:
            NotNestedError: there is none.
        """
        return self._moved(node, plan(have, want))

    def _moved(self, node: fx.Node, move: Move) -> fx.Node:
        if move.is_nothing:
            return node
        at = 0
        for split in move.splits:
            if not split:
                node = self.call(torch.squeeze, node, at)  # a dim of size 1
            elif len(split) > 1:
                sizes = [size if isinstance(size, int) else -1 for size in split]
                node = self.call(torch.unflatten, node, at, sizes)
            at += len(split)
        if list(move.order) != sorted(move.order):
            node = self.call(torch.permute, node, list(move.order))
        for at, group in enumerate(move.groups):
            if group == 0:
                node = self.call(torch.unsqueeze, node, at)  # a dim of size 1
            elif group > 1:
                node = self.call(torch.flatten, node, at, at + group - 1)
        return node

    def _described(
        self,
        node: fx.Node,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        function: Callable[..., Any],
    ) -> fx.Node:
        self._emitted.append(node)
        for key in _COPIED_META:
            if key in self._like.meta:
                node.meta[key] = self._like.meta[key]
        known = fx.node.map_arg(args, fake_result)
        call = signature((node.op, node.target, known, kwargs))
        if call not in self._known:
            self._known[call] = on_fakes(function, known, kwargs)
        key = "val" if "val" in self._like.meta else "example_value"
        node.meta[key] = self._known[call]
        return node

    def copied(self, node: fx.Node) -> fx.Node:
        """A contiguous copy."""
        return self.call(torch.clone, node, memory_format=torch.contiguous_format)

    def copied_in_another_order(self, weight: fx.Node) -> fx.Node:
        """A copy of a weight in memory of its own, which Inductor does not eliminate.

        Inductor eliminates copies that have the strides of their source. Of [a, b, c, d] the copy
        is one of matrices [c, b], which the product by the transpose reads directly.
        """
        sizes = fake_result(weight).shape
        if len(sizes) < 2:
            twice = self.call(torch.Tensor.expand, weight, 2, *sizes)
            return self.call(torch.select, self.copied(twice), 0, 0)
        backwards = list(range(len(sizes)))[::-1]
        # Both permutations are their own inverses.
        for order in ([0, 3, 2, 1] if len(sizes) == 4 else backwards, backwards):
            target = torch.empty([sizes[dim] for dim in order], device="meta").permute(order)
            if not has_strides_of(weight, target):
                break
        return self.call(torch.permute, self.copied(self.call(torch.permute, weight, order)), order)

    def without_view(self, node: fx.Node) -> fx.Node:
        """The same tensor, a copy with its strides if it is a view.

        torch 2.11 fails to trace some writes into views: of permuted ones, and of any inside a
        torch.inference_mode where they are views of tensors created outside.
        """
        return self.call(torch.clone, node) if fake_result(node)._is_view() else node

    def laid_out_like(self, node: fx.Node, target: Tensor) -> fx.Node:
        """The same tensor with the strides of ``target``, copied if necessary."""
        own = fake_result(node)
        if own is None or has_strides_of(node, target):
            return node
        return self._in_order_of(node, target, self.copied)

    def in_order_of(self, node: fx.Node, target: Tensor) -> fx.Node:
        """The same tensor, in memory as ``target``; copied if its strides differ."""
        return self._in_order_of(node, target, lambda one: self.method("contiguous", one))

    def _in_order_of(
        self, node: fx.Node, target: Tensor, contiguous: Callable[[fx.Node], fx.Node]
    ) -> fx.Node:
        order = order_in_memory(target)
        if order == sorted(order):
            return contiguous(node)
        node = contiguous(self.call(torch.permute, node, order))
        return self.call(torch.permute, node, [order.index(dim) for dim in range(target.dim())])


def signature(value: Any) -> Hashable:
    """A hashable key of all that the sizes of a call's result depend on."""
    if isinstance(value, Tensor):
        sizes = (*map(signature, value.shape), *map(signature, value.stride()))
        return (sizes, value.dtype, value.device, value.layout)
    if isinstance(value, torch.SymInt):
        return ("symbolic", value.node.expr)
    if isinstance(value, slice):
        return ("slice", signature((value.start, value.stop, value.step)))
    if isinstance(value, tuple | list):
        return tuple(map(signature, value))
    if isinstance(value, dict):
        return tuple((name, signature(one)) for name, one in value.items())
    hashable: Hashable = value
    return hashable


def order_in_memory(tensor: Tensor) -> list[int]:
    """A tensor's dims, that with the largest stride first."""
    return sorted(range(tensor.dim()), key=lambda dim: _Stride(tensor.stride(dim), dim))


class _Stride:
    """Sort key of dims in memory: largest stride first; equal and unknown ones keep their order."""

    def __init__(self, stride: Any, dim: int) -> None:
        self.stride, self.dim = stride, dim

    def __lt__(self, other: _Stride) -> bool:
        if statically_known_true(self.stride == other.stride):
            return self.dim < other.dim
        return statically_known_true(self.stride > other.stride)


def has_strides_of(node: fx.Node, target: Tensor) -> bool:
    """Whether a node's result is known to have the strides of a tensor of its shape."""
    own = fake_result(node)
    return all(
        same(size, 1) or same(ours, theirs)
        for size, ours, theirs in zip(own.shape, own.stride(), target.stride(), strict=True)
    )


def is_torch_function(node: fx.Node) -> bool:
    """Whether a node calls one of torch's own functions: none of them reads strides."""
    if node.op == "call_method":
        return node.target not in ("stride", "is_contiguous", "as_strided", "data_ptr")
    if node.op != "call_function" or isinstance(node.target, HigherOrderOperator):
        return False
    if node.target is getattr:  # a view, as `k.mT`: Dynamo reads no other attributes of tensors
        return True
    if isinstance(node.target, OpOverload | OpOverloadPacket):
        return str(node.target).startswith("aten.") and "as_strided" not in str(node.target)
    module = getattr(node.target, "__module__", "") or "torch"
    return node.target is not torch.as_strided and (
        module.split(".")[0] in ("torch", "_operator", "math")
    )


_RESHAPES: Mapping[Any, Any] = MappingProxyType(
    {
        "view": "reshape",
        "view_as": "reshape_as",
        torch.ops.aten.view: torch.ops.aten.reshape,
        torch.ops.aten.view.default: torch.ops.aten.reshape.default,
    }
)
"""The reshape for each kind of view; it copies where the strides allow no view."""


def views_to_reshapes(graph: fx.Graph) -> None:
    """Replace views by reshapes, so that they work on other strides; most remain views."""
    for node in graph.nodes:
        if node.op not in ("call_method", "call_function") or node.target not in _RESHAPES:
            continue
        if "size" in node.kwargs:  # reshape calls it otherwise
            node.args, node.kwargs = (*node.args, node.kwargs["size"]), {}
        if len(node.args) > 1 and not isinstance(node.args[1], torch.dtype):
            node.target = _RESHAPES[node.target]
