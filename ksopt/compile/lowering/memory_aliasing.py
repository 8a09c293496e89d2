"""Results whose memory sharing a caller can observe.

The replacement of a result may have other strides, and so may values computed from it. A copy by
strides, as `flatten`, is then a view where the author's is a copy, or vice versa. A caller can
distinguish the two if both the copy and its source are returned, if one is written and the other
read, and if gradients are off (a view requires gradients there, a copy does not).
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
from ksopt.compile.lowering.recomputed_roots import CannotLowerError, is_rewritten, product_of


def fixed_in_memory(
    graph: fx.Graph, trace: Trace, chosen: Collection[Root]
) -> tuple[dict[Root, fx.Node], set[Root]]:
    """Results with observable sharing and their first nodes, and those that may not be views.

    The node that computed such a result is replaced by a tensor of its strides, and all its views
    and copies are taken of that as in the author's code.

    Raises:
        CannotLowerError: no node holds all of such a result where it is computed.
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
        if not is_written and not is_named_twice and not copies.observe_strides_of(root, nodes):
            continue
        first = root.holder
        if first is None or first.node is not root.producer:
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

    AOTAutograd (seen in 2.13) then confuses the number of the tensor that two returned views share
    with the number of an input, and fails when the graph is called. So such a tensor is returned
    itself, as in the author's code, and not as a view.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder" and node in trace.memory]
    storages = Counter(trace.memory[node][0] for node in inputs)
    return any(count > 1 and trace.writes.get(storage) for storage, count in storages.items())


def _returned(graph: fx.Graph) -> list[fx.Node]:
    return [one for node in graph.nodes if node.op == "output" for one in node.all_input_nodes]


# These copy or take a view, depending on the strides of their input. A view is one of the author's,
# and a reshape if its input has other strides (`emit.views_to_reshapes`).
_COPIES_BY_STRIDES = frozenset(
    {
        *("contiguous", "einsum", "flatten", "ravel", "reshape", "reshape_as", "to", "type"),
        *("view", "view_as"),
    }
)


class CopiesByStrides:
    """The copies by strides of a graph.

    Attributes:
        sources: the source of each copy.
        observable: the copies that a caller can distinguish from views wherever they are taken.
    """

    def __init__(self, graph: fx.Graph, trace: Trace) -> None:
        self._trace = trace
        self._returned = _returned(graph)
        self._last_read = _last_reads(graph, trace)
        self.sources = {
            node: node.all_input_nodes[0] for node in graph.nodes if _copies_by_strides(node)
        }
        self.observable = {node for node in self.sources if self._is_observable(node)}

    def observe_strides_of(self, root: Root, nodes: Collection[fx.Node]) -> bool:
        """Whether a copy of a root, or of a value computed from it, makes its strides observable.

        Args:
            root: the root.
            nodes: its views. A contiguous one is replaced by a contiguous one.
        """
        created_in = None if root.producer is None else self._trace.regions[root.producer]
        observing = self._observing(created_in)
        if not {one for copy in observing for one in (copy, self.sources[copy])}.isdisjoint(nodes):
            return True
        strided = [node for node in nodes if not is_contiguous(fake_result(node))]
        return bool(strided) and not self._observed_by(observing).isdisjoint(strided)

    def observed_strides_of(self, created_in: Region | None) -> set[fx.Node]:
        """The nodes whose strides a copy makes observable, for values created in a region."""
        return self._observed_by(self._observing(created_in))

    def _observing(self, created_in: Region | None) -> set[fx.Node]:
        """The observable copies, and those whose region has other gradients than the creation."""
        regions = self._trace.regions
        return self.observable | {
            node
            for node in self.sources
            if created_in is not None
            and node in regions
            and not regions[node].records_like(created_in)
        }

    def _observed_by(self, observing: set[fx.Node]) -> set[fx.Node]:
        observed = observing | self._trace.observed_strides
        return (
            observed | reached(observed, lambda node: node.all_input_nodes)
            if observed
            else observed
        )

    def _is_observable(self, copy: fx.Node) -> bool:
        """Whether a copy's source is returned too, or one is written and the other read later."""
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


def inputs_with_observed_strides(graph: fx.Graph, trace: Trace) -> set[fx.Node]:
    """The inputs of a graph whose strides it makes observable to its direct or indirect callers."""
    first = next(iter(trace.regions.values()), None)
    observed = CopiesByStrides(graph, trace).observed_strides_of(first)
    return {node for node in observed if node.op == "placeholder"}


def _last_reads(graph: fx.Graph, trace: Trace) -> dict[int, float]:
    """The position of the last node that reads each memory.

    Infinite for inputs of nodes with gradients on, which a backward pass may read after all nodes,
    and for inputs of the graph, which its caller may read.
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
    """Nodes that share memory with one of these, or would with other strides."""
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
