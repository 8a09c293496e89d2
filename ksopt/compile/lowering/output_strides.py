"""Strides of the tensors that leave a graph: those that they have in the author's code.

The replacement of a result may have other strides, and elementwise functions propagate them. Inside
the graph nothing depends on strides (`memory_aliasing` handles the copies that do). The caller of
the graph can observe them: by a `view`, or by a copy by strides in the graph behind a break. So can
an operator that is not torch's own. The tensors that callers and such operators read are therefore
restored to the author's order in memory: permuted to it, made contiguous and permuted back. That
costs a copy only if the strides differ when AOTAutograd traces the graph. Before that, strides are
not known.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator

from ksopt.compile.capture.nodes import (
    REPLACES,
    authors_result,
    holds_memory,
    memory_of,
    reached,
)
from ksopt.compile.capture.symbolic import is_contiguous
from ksopt.compile.capture.values import Trace
from ksopt.compile.lowering.emit import Emitter, is_torch_function, order_in_memory

BODIES = ("tag_activation_checkpoint", "wrap", "wrap_activation_checkpoint")
"""Higher-order operators that call their first argument, a graph, with the others."""

_VIEWS = frozenset(
    {
        *("alias", "detach", "diagonal", "expand", "expand_as", "flatten", "getattr", "getitem"),
        *("movedim", "mT", "narrow", "permute", "reshape", "reshape_as", "select", "squeeze"),
        *("swapaxes", "swapdims", "T", "t", "to", "transpose", "unflatten", "unfold", "unsqueeze"),
        *("view", "view_as"),
    }
)
"""Names of operations that may return a view of their input."""


def restore_strides(graph: fx.Graph, changed: Collection[fx.Node], trace: Trace) -> None:
    """Restore the author's strides of the tensors that leave a graph.

    Args:
        graph: a rewritten one.
        changed: replacements whose strides differ from the author's.
        trace: of the original graph.
    """
    affected = reached(changed, lambda node: node.users)
    known: dict[Hashable, Any] = {}
    bases = dict.fromkeys(_base(node, trace) for node in _leaving(graph))
    for base in bases:
        # Other replacements already have the author's strides.
        may_differ = base in changed or (base in affected and REPLACES not in base.meta)
        if may_differ and _is_dense(authors_result(base)):
            _put_in_order(base, trace, known)


def may_leave_as_a_view(node: fx.Node) -> bool:
    """Whether a caller, or an operator that is not torch's own, may observe a result's strides."""
    seen: set[fx.Node] = set()
    left = [node]
    while left:
        one = left.pop()
        for user in one.users:
            if user.op == "output" or _observes_strides(user):
                return True
            if user not in seen and _may_be_a_view(user, one):
                seen.add(user)
                left.append(user)
    return False


def _may_be_a_view(user: fx.Node, of: fx.Node) -> bool:
    target = user.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return name in _VIEWS or (memory_of(of) is not None and memory_of(user) == memory_of(of))


def _leaving(graph: fx.Graph) -> Iterator[fx.Node]:
    """Nodes that are returned, or read by nodes that observe strides."""
    for node in graph.nodes:
        if node.op == "output" or _observes_strides(node):
            yield from node.all_input_nodes


def _observes_strides(node: fx.Node) -> bool:
    """Whether a node's result may depend on the strides of its inputs."""
    if node.op not in ("call_function", "call_method", "call_module"):
        return False
    if node.target is getattr or str(node.target).startswith("ksopt."):
        return False
    if isinstance(node.target, HigherOrderOperator) and node.target.name() in BODIES:
        name = node.args[0].target if isinstance(node.args[0], fx.Node) else None
        body = getattr(node.graph.owning_module, str(name), None)
        return not isinstance(body, fx.GraphModule) or any(map(_observes_strides, body.graph.nodes))
    if node.target in ("view_as_complex", torch.view_as_complex):
        return True
    if node.target in ("view", torch.Tensor.view) and torch.dtype in map(type, node.args):
        return True  # it needs contiguous elements
    return not is_torch_function(node)


def _base(node: fx.Node, trace: Trace) -> fx.Node:
    """The node that allocated the memory of a node's result, outside the vmaps of others."""
    memory = memory_of(node)
    at = node
    while memory is not None and not _is_in_vmap(at, trace):
        same = [one for one in at.all_input_nodes if holds_memory(one, memory)]
        if not same:
            break
        at = same[0]
        if memory_of(at) == memory:
            node = at
    return node


def _is_in_vmap(node: fx.Node, trace: Trace) -> bool:
    return node in trace.regions and trace.regions[node].vmap_depth > 0


def _is_dense(value: Any) -> bool:
    """Whether a tensor is contiguous in memory for some order of its dims."""
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return False
    return is_contiguous(value.permute(order_in_memory(value)))


def _put_in_order(base: fx.Node, trace: Trace, known: dict[Hashable, Any]) -> None:
    """Redirect all readers of a result to a copy in the author's order in memory."""
    readers = list(base.users)
    emit = Emitter(base.next, base, [], known)
    value = emit.in_order_of(base, authors_result(base))
    if base in trace.memory and trace.writes.get(trace.memory[base][0]):
        value = emit.without_view(value)
    value.meta[REPLACES] = authors_result(base)
    for reader in readers:
        reader.replace_input_with(base, value)
