"""Where a rewrite is safe: the nodes it replaces, the values it reads, and the obstacles.

Only values that are still read are rewritten, and they are computed where the author computed them:
there the operands hold the values that the author's code read, and gradients are on or off as they
were. Walking the graph backwards from its ends, `uses` finds the nodes whose values must be
computed from the new operators (*exits*), the products that these need, and the nodes without
readers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from ksopt.compile.capture.interpreter import holds_all
from ksopt.compile.capture.nodes import memory_of
from ksopt.compile.capture.tracker import Tracker
from ksopt.compile.capture.values import (
    Combined,
    Compact,
    Contraction,
    Holder,
    Region,
    Root,
    Stacked,
    Trace,
    View,
)
from ksopt.compile.lowering.fusion_context import is_product
from ksopt.compile.lowering.layer import has_epilogue
from ksopt.compile.lowering.memory_aliasing import fixed_in_memory
from ksopt.compile.lowering.recomputed_roots import (
    CannotLowerError,
    is_rewritten,
    operands,
    product_of,
)


@dataclass
class Uses:
    """Readers of roots and nodes if the chosen products are rewritten.

    Attributes:
        exits: nodes to replace, and their views; in the order of the graph.
        readers: for each product that is needed: the exits and roots that read it.
        dead: nodes without readers, in the order of the graph.
        fixed: see `fixed_in_memory`.
        written: roots of ``fixed`` that may not be views, as those written in place.
        products: for each root that is recomputed: the product that it is part of.
        held: reads of the graph's own values by products: the product, where, and the value.
    """

    exits: dict[fx.Node, View] = field(default_factory=dict)
    readers: dict[Root, list[fx.Node | Root]] = field(default_factory=dict)
    dead: list[fx.Node] = field(default_factory=list)
    fixed: dict[Root, fx.Node] = field(default_factory=dict)
    written: set[Root] = field(default_factory=set)
    products: dict[Root, Root] = field(default_factory=dict)
    held: list[tuple[Root, fx.Node, Holder]] = field(default_factory=list)


def uses(graph: fx.Graph, trace: Trace, chosen: Collection[Root]) -> Uses:
    """The uses of a graph's values if the chosen products are rewritten.

    Raises:
        CannotLowerError: a chosen product reads a value that no node holds there.
    """
    fixed, written = fixed_in_memory(graph, trace, chosen)
    result = Uses(fixed=fixed, written=written)
    # A node without users is there for its effect, as are those that write in place.
    live = {node for node in graph.nodes if not node.users} | trace.writers
    needed: set[Root] = set()

    def need(root: Root, reader: fx.Node | Root, product: Root, at: fx.Node) -> None:
        result.readers.setdefault(root, []).append(reader)
        below = operands(root, chosen)
        if not below:
            holder = held(trace, root, at, product)
            result.held.append((product, at, holder))
            live.add(holder.node)
        if root in needed or not below:
            return
        needed.add(root)
        inside = root if isinstance(root.origin, Contraction) and root in chosen else product
        result.products[root] = inside
        here = at if isinstance(root.origin, Compact) else computed_at(root, trace, inside)
        for other in below:
            need(other, root, inside, here)

    for node in reversed(graph.nodes):
        if node not in live:
            continue
        view = trace.views.get(node)
        if (
            view is not None
            and is_rewritten(view.root, chosen)
            and holds_all(view)
            and _records_like_its_root(node, view.root, trace)
            and result.fixed.get(view.root, node) is node
        ):
            result.exits[node] = view
            need(view.root, node, product_of(view.root), insertion_point(node, trace))
        else:
            live.update(node.all_input_nodes)
    result.exits = dict(reversed(result.exits.items()))
    result.dead = [node for node in graph.nodes if node not in live or node in result.exits]
    return result


def _records_like_its_root(node: fx.Node, root: Root, trace: Trace) -> bool:
    """Whether gradients flow at a node as at the producer of its root.

    If not, the node's value is an earlier node's, as with a `float()` without effect: that node is
    replaced.
    """
    if root.producer is None:
        return True
    return trace.regions[node].records_like(trace.regions[root.producer])


def held(trace: Trace, root: Root, at: fx.Node, product: Root) -> Holder:
    """The first node that still holds a root just before another node.

    Raises:
        CannotLowerError: none does; ``product`` would read it.
    """
    before = trace.order[at]
    holders = [one for one in root.holders if trace.order[one.node] < before]
    for holder in holders:
        if trace.is_intact(holder.storage, before):
            return holder
    if holders:
        raise CannotLowerError(product, "an operand is written in place before it is read")
    raise CannotLowerError(product, _no_node(root))


def computed_at(root: Root, trace: Trace, product: Root) -> fx.Node:
    """The node before which a root is recomputed: where the author computed it.

    There its operands have the values that the author's node read, before later writes.
    """
    if root.producer is None:
        raise CannotLowerError(product, _no_node(root))
    node = root.producer
    # Nodes inside a vmap are recomputed behind it, and behind earlier insertions.
    while _is_in_vmap(node, trace) and node.next.op != "root":
        node = node.next
    return node


def _is_in_vmap(node: fx.Node, trace: Trace) -> bool:
    return node not in trace.regions or trace.regions[node].vmap_depth > 0


def insertion_point(node: fx.Node, trace: Trace) -> fx.Node:
    """The node before which a replacement is inserted: the node, or behind the vmaps around it."""
    users = set(node.users)
    while _is_in_vmap(node, trace) and node not in users and node.next.op != "root":
        node = node.next
    return node


def check(tracker: Tracker, usage: Uses, chosen: Collection[Root]) -> None:
    """Reject products whose rewriting would change results.

    Raises:
        CannotLowerError: the first product that must not be rewritten.
    """
    trace = tracker.trace
    makers = _makers(trace)
    written_inputs = _written_inputs(trace)
    for product, at, holder in usage.held:
        if trace.regions[at].grad and _may_be_recomputed(holder.node, at, written_inputs, trace):
            # AOTAutograd may do so in the backward pass (seen in 2.13), from written inputs.
            raise CannotLowerError(product, _WRITTEN_BEHIND)
        maker = makers.get(memory_of(holder.node))
        if trace.regions[at].grad and maker in trace.regions:
            if trace.regions[maker].inference:  # autograd refuses to save such tensors
                raise CannotLowerError(product, "an operand is made in a torch.inference_mode")
            recorded = [trace.regions[node].grad for node in (maker, holder.node)]
            if recorded == [True, False] and holder.storage[1] > 0:
                # torch refuses views of views that were created and written so.
                raise CannotLowerError(
                    product, "an operand is a view, written where no gradients are recorded"
                )
        if trace.regions[at].grad and not trace.is_intact(holder.storage):
            # The operators may need it for gradients where the author's do not; and AOTAutograd
            # computes activations again from inputs that were written since (seen in 2.13).
            raise CannotLowerError(product, _WRITTEN_BEHIND)
    for product in {*usage.products.values()}:
        if product.producer is not None and _is_written_behind(product.producer, trace):
            # If the author's operator saved its input, torch refuses the backward pass.
            raise CannotLowerError(product, _WRITTEN_BEHIND)
    for node, view in usage.exits.items():
        if trace.regions[insertion_point(node, trace)].vmap_depth:
            product = product_of(view.root)
            raise CannotLowerError(product, "it is used inside the vmap that it is in")
    for root, readers in usage.readers.items():
        if not operands(root, chosen) or isinstance(root.origin, Compact):
            continue  # read where it is held
        product = usage.products[root]
        if root in trace.reshaped:  # the fake results of its nodes have the later shape
            raise CannotLowerError(product, "its result is given another shape in place")
        here = computed_at(root, trace, product)
        _check_region(root, product, trace.regions[here], trace)
        for reader in readers:
            if not isinstance(reader, Root) or root.storage is None:
                continue
            there = computed_at(reader, trace, product)
            if not trace.is_intact(root.storage, trace.order[there]):
                raise CannotLowerError(
                    product, "its result is written in place and read elsewhere too"
                )
            if trace.regions[there].grad and not trace.is_intact(root.storage):
                # The author's operator may save a copy, where the new one saves the result.
                raise CannotLowerError(usage.products[reader], _WRITTEN_BEHIND)


_WRITTEN_BEHIND = "an operand is written in place behind it, and gradients are on"


def _is_written_behind(node: fx.Node, trace: Trace) -> bool:
    """Whether an input of a node with gradients on is written in place later."""
    if not trace.regions[node].grad:
        return False
    memories = [trace.memory[one][0] for one in node.all_input_nodes if one in trace.memory]
    order = trace.order[node]
    return any(at > order for memory in memories for at in trace.writes.get(memory, ()))


def _written_inputs(trace: Trace) -> dict[fx.Node, int]:
    """The graph's inputs that are written in place, and the position of the last write."""
    inputs = [node for node in trace.memory if node.op in ("placeholder", "get_attr")]
    writes = {node: trace.writes.get(trace.memory[node][0]) for node in inputs}
    return {node: max(orders) for node, orders in writes.items() if orders}


def _may_be_recomputed(
    node: fx.Node, at: fx.Node, written: Mapping[fx.Node, int], trace: Trace
) -> bool:
    """Whether a node depends, without a product between, on an input written behind ``at``."""
    if not any(order > trace.order[at] for order in written.values()):
        return False
    seen: set[fx.Node] = set()
    left = [node]
    while left:
        one = left.pop()
        if one in seen:
            continue
        seen.add(one)
        if written.get(one, -1) > trace.order[at]:
            return True
        # The epilogue of ks_chain is recomputed, too.
        if not is_product(one) or has_epilogue(one):
            left += one.all_input_nodes
    return False


def _makers(trace: Trace) -> dict[int | None, fx.Node]:
    """The first node of each memory."""
    first: dict[int | None, fx.Node] = {}
    for node in trace.memory:
        if memory_of(node):
            first.setdefault(memory_of(node), node)
    return first


def _check_region(root: Root, product: Root, here: Region, trace: Trace) -> None:
    """Reject a root that would be computed in another region than its own."""
    if root.producer is None:
        return
    if not trace.regions[root.producer].records_like(here):
        raise CannotLowerError(product, "gradients are switched on or off between it and its use")
    if here.inference and not next(iter(trace.regions.values())).inference:
        # AOTAutograd refuses views of other tensors inside such a region.
        raise CannotLowerError(product, "it is inside a torch.inference_mode of the model's own")
    if here.autocast is None:
        return
    multiplies = isinstance(root.origin, Contraction | Combined)
    # Autocast lets torch.stack take float32 and its own type only.
    stacks = isinstance(root.origin, Stacked) and root.dtype != torch.float32
    if (multiplies or stacks) and root.dtype != here.autocast:
        raise CannotLowerError(
            product,
            f"it computes in {str(root.dtype).removeprefix('torch.')}, but autocast is on "
            "where it is computed",
        )


def _no_node(root: Root) -> str:
    if root.storage is not None and root.storage[1]:  # number of earlier writes
        return "an operand was written in place before, through another view of its memory"
    where = "" if root.producer is None else f" inside {root.producer.name}"
    return f"an operand is made{where} and no node holds it"
