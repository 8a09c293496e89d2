"""Results of which a caller can tell which tensors share their memory.

What replaces a result may have other strides, and so may what is computed from that. A copy by
strides, as `flatten`, is then a view where the author's is a copy, or the other way round. A caller
can tell the two apart where both the copy and what it is of are returned, where one is written and
the other read, and where gradients are off (a view requires gradients there, a copy does not).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence

import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket

from ksopt.compile.capture.nodes import fake_result, memory_of, reached
from ksopt.compile.capture.symbolic import is_contiguous
from ksopt.compile.capture.values import Region, Root, Trace
from ksopt.compile.lowering.products import CannotLowerError, is_rewritten, product_of


def fixed_in_memory(
    graph: fx.Graph, trace: Trace, chosen: Collection[Root]
) -> tuple[dict[Root, fx.Node], set[Root]]:
    """Such results with their first nodes, and those of them that may be no views.

    The node that made such a result is replaced by a tensor of its strides, and all its views and
    copies are taken of that as the author took them.

    Raises:
        CannotLowerError: no node's value is all of such a result when it is made.
    """
    names: dict[Root, set[fx.Node]] = {}
    for node, view in trace.views.items():
        if is_rewritten(view.root, chosen):
            names.setdefault(view.root, set()).add(node)
    returned = _returned(graph)
    copies = CopiesByStrides(graph, trace)
    inputs_share = writes_inputs_that_share(graph, trace)
    fixed, written = {}, set()
    for root, nodes in names.items():
        sharing = may_share_memory(nodes)
        is_written = not all(
            trace.is_intact(trace.memory[node]) for node in nodes | sharing if node in trace.memory
        )
        is_named_twice = sum(node in sharing for node in returned) > 1
        if not is_written and not is_named_twice and not copies.tell_strides_of(root, nodes):
            continue
        first = root.holder
        if first is None or first.node is not root.made_at:
            raise CannotLowerError(
                product_of(root),
                "its result is written in place, returned under two names, or copied where "
                "gradients are off, and no node holds it where it is made",
            )
        fixed[root] = first.node
        if is_written or (is_named_twice and inputs_share):
            written.add(root)
    return fixed, written


def writes_inputs_that_share(graph: fx.Graph, trace: Trace) -> bool:
    """Whether two inputs of a graph share memory that it writes.

    AOTAutograd (seen in 2.13) then takes the number of the tensor that two returned views are of
    for the number of an input, and fails when the graph is called. So such a tensor is returned as
    it is, as the author's is, and not as a view.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder" and node in trace.memory]
    storages = Counter(trace.memory[node][0] for node in inputs)
    return any(count > 1 and trace.writes.get(storage) for storage, count in storages.items())


def _returned(graph: fx.Graph) -> list[fx.Node]:
    return [one for node in graph.nodes if node.op == "output" for one in node.all_input_nodes]


# These copy or take a view, by the strides of what they read. A view is one of the author's, and a
# reshape where other strides came before it (`emit.views_to_reshapes`).
_COPIES_BY_STRIDES = frozenset(
    {
        *("contiguous", "einsum", "flatten", "ravel", "reshape", "reshape_as", "to", "type"),
        *("view", "view_as"),
    }
)


class CopiesByStrides:
    """The copies by strides of a graph.

    Attributes:
        sources: each copy, and what it is of.
        told: those that a caller can tell from views wherever they are taken.
    """

    def __init__(self, graph: fx.Graph, trace: Trace) -> None:
        self._trace = trace
        self._returned = _returned(graph)
        self._last_read = _last_reads(graph, trace)
        self.sources = {
            node: node.all_input_nodes[0] for node in graph.nodes if _copies_by_strides(node)
        }
        self.told = {node for node in self.sources if self._is_told(node)}

    def tell_strides_of(self, root: Root, nodes: Collection[fx.Node]) -> bool:
        """Whether a copy of a root, or of what is computed from it, tells what strides it has.

        Args:
            root: the root.
            nodes: its views. A contiguous one is replaced by one that is contiguous.
        """
        made = None if root.made_at is None else self._trace.regions[root.made_at]
        telling = self._telling(made)
        if not {one for copy in telling for one in (copy, self.sources[copy])}.isdisjoint(nodes):
            return True
        strided = [node for node in nodes if not is_contiguous(fake_result(node))]
        return bool(strided) and not self._told_by(telling).isdisjoint(strided)

    def told_of(self, made: Region | None) -> set[fx.Node]:
        """The nodes whose strides a copy tells, of what is made where this is in force."""
        return self._told_by(self._telling(made))

    def _telling(self, made: Region | None) -> set[fx.Node]:
        """Those that are told, and those taken where gradients are off and not where it is made."""
        regions = self._trace.regions
        return self.told | {
            node
            for node in self.sources
            if made is not None and node in regions and not regions[node].records_like(made)
        }

    def _told_by(self, telling: set[fx.Node]) -> set[fx.Node]:
        told = telling | self._trace.told_strides
        return told | reached(told, lambda node: node.all_input_nodes) if told else told

    def _is_told(self, copy: fx.Node) -> bool:
        """Whether what it is of is returned too, or one is written and the other read later."""
        source = self.sources[copy]
        sharing = may_share_memory([source])
        if sum(node in sharing for node in self._returned) > 1:
            return True
        if copy not in self._trace.memory or source not in self._trace.memory:
            return False
        at, own, other = (
            self._trace.order[copy],
            self._trace.memory[copy][0],
            self._trace.memory[source][0],
        )
        for written, read in ((own, other), (other, own)):
            writes = [order for order in self._trace.writes.get(written, ()) if order > at]
            if writes and min(writes) < self._last_read.get(read, -1):
                return True
        return False


def told_of_inputs(graph: fx.Graph, trace: Trace) -> set[fx.Node]:
    """The inputs of a graph whose strides it tells, to who calls it or to who calls that."""
    first = next(iter(trace.regions.values()), None)
    told = CopiesByStrides(graph, trace).told_of(first)
    return {node for node in told if node.op == "placeholder"}


def _last_reads(graph: fx.Graph, trace: Trace) -> dict[int, float]:
    """For each memory: the position of the last node that reads it.

    A backward pass may read what a node reads where gradients are on: that is after all nodes.
    And so may who calls the graph read its inputs.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder" and node in trace.memory]
    last: dict[int, float] = {trace.memory[node][0]: math.inf for node in inputs}
    for node in graph.nodes:
        is_recorded = node not in trace.regions or trace.regions[node].grad
        for read in node.all_input_nodes:
            if read in trace.memory:
                memory = trace.memory[read][0]
                read_at = math.inf if is_recorded else trace.order[node]
                last[memory] = max(read_at, last.get(memory, -1))
    return last


def may_share_memory(nodes: Collection[fx.Node]) -> set[fx.Node]:
    """Nodes that share memory with one of these, or would if it had other strides."""
    memories = {memory_of(node) for node in nodes} - {None}
    sharing: set[fx.Node] = set()
    to_visit = list(nodes)
    while to_visit:
        node = to_visit.pop()
        if node in sharing:
            continue
        sharing.add(node)
        for user in node.users:
            memory = memory_of(user)
            is_copy_by_strides = memory is not None and _copies_by_strides(user)
            if is_copy_by_strides:
                memories.add(memory)
            if is_copy_by_strides or memory in memories or isinstance(fake_result(user), Sequence):
                to_visit.append(user)
    return {node for node in sharing if memory_of(node) in memories}


def _copies_by_strides(node: fx.Node) -> bool:
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if isinstance(target, OpOverload | OpOverloadPacket):
        name = str(target).split(".")[1]
    if name not in _COPIES_BY_STRIDES or not isinstance(fake_result(node), torch.Tensor):
        return False
    reads = node.all_input_nodes
    return bool(reads) and (name != "einsum" or len(reads) == 1)  # of two it is a product
