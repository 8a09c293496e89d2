"""What a rewrite changes: which nodes are replaced, what is read for that, and what forbids it.

Only what is still read is rewritten, and it is computed where the author computed it: there its
operands hold what the author's code read, and gradients are on or off as they were. Walking the
graph backwards from its ends, `uses` finds the nodes whose values must be computed from the new
operators (*exits*), the products that these need, and the nodes that nobody reads any more.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket

from ksopt.compile.capture.interpreter import holds_all
from ksopt.compile.capture.nodes import fake_result, memory_of
from ksopt.compile.capture.symbolic import is_contiguous, same_shape
from ksopt.compile.capture.tracker import Tracker
from ksopt.compile.capture.values import (
    Applied,
    Biased,
    Cast,
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


class CannotLowerError(Exception):
    """A product cannot be rewritten.

    Attributes:
        root: the product.
        reason: a clause that says why.
    """

    def __init__(self, root: Root, reason: str) -> None:
        super().__init__(reason)
        self.root = root
        self.reason = reason


def is_rewritten(root: Root, chosen: Collection[Root]) -> bool:
    """Whether a root will be computed by new operators: a chosen product, or one plus a bias."""
    if isinstance(root.origin, Biased):
        return is_rewritten(root.origin.product.root, chosen)
    return isinstance(root.origin, Contraction) and root in chosen


def operands(root: Root, chosen: Collection[Root]) -> list[Root]:
    """The roots that a root will be computed from; empty where a node holds it as it is."""
    origin = root.origin
    if is_rewritten(root, chosen):
        if isinstance(origin, Contraction):
            return [origin.x, origin.weight]
        assert isinstance(origin, Biased)
        return [origin.product.root, origin.bias.root]
    if isinstance(origin, Cast) and (root.holder is None or is_rewritten(origin.source, chosen)):
        return [origin.source]
    if isinstance(origin, Compact):
        return [origin.matrix]
    if isinstance(origin, Stacked | Combined | Applied) and root.holder is None:
        return [piece.root for piece in origin.pieces]
    return []


@dataclass
class Uses:
    """Who reads what, if the chosen products are rewritten.

    Attributes:
        exits: nodes to replace, and the view that each is; in the order of the graph.
        readers: for each product that is needed: the exits and roots that read it.
        dead: nodes that nobody reads any more, in the order of the graph.
        fixed: see `_fixed_in_memory`.
        products: for each root that is computed anew: the product that it is part of.
        held: what products read of the graph's own values: the product, where, and the value.
    """

    exits: dict[fx.Node, View] = field(default_factory=dict)
    readers: dict[Root, list[fx.Node | Root]] = field(default_factory=dict)
    dead: list[fx.Node] = field(default_factory=list)
    fixed: dict[Root, fx.Node] = field(default_factory=dict)
    products: dict[Root, Root] = field(default_factory=dict)
    held: list[tuple[Root, fx.Node, Holder]] = field(default_factory=list)


def uses(graph: fx.Graph, trace: Trace, chosen: Collection[Root]) -> Uses:
    """See `Uses`.

    Raises:
        CannotLowerError: a chosen product reads what no node holds where the product is computed.
    """
    result = Uses(fixed=_fixed_in_memory(graph, trace, chosen))
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
    """Whether gradients are on or off at a node as where its root is made.

    Where they are not, the node's value is an earlier node's, as of a `float()` that changes
    nothing: that node is replaced.
    """
    if root.made_at is None:
        return True
    return trace.regions[node].records_like(trace.regions[root.made_at])


def _fixed_in_memory(
    graph: fx.Graph, trace: Trace, chosen: Collection[Root]
) -> dict[Root, fx.Node]:
    """Results of which a caller can tell which views share their memory, and their first nodes.

    Those are results that are written in place, returned under several names, or copied by their
    strides where gradients are off (a view requires gradients there, a copy does not). The node
    that made such a result is replaced, and all its views and copies are taken of the replacement
    as the author took them.

    Raises:
        CannotLowerError: no node's value is all of such a result when it is made.
    """
    names: dict[Root, set[fx.Node]] = {}
    for node, view in trace.views.items():
        if is_rewritten(view.root, chosen):
            names.setdefault(view.root, set()).add(node)
    returned = [one for node in graph.nodes if node.op == "output" for one in node.all_input_nodes]
    fixed = {}
    for root, nodes in names.items():
        sharing = _may_share_memory(nodes)
        written = not all(
            trace.is_intact(trace.memory[node]) for node in nodes | sharing if node in trace.memory
        )
        is_named_twice = sum(node in sharing for node in returned) > 1
        is_named_twice = is_named_twice or _is_returned_with_a_copy(nodes, returned)
        if not written and not is_named_twice and not _is_copied_elsewhere(root, sharing, trace):
            continue
        first = root.holder
        if first is None or first.node is not root.made_at:
            raise CannotLowerError(
                product_of(root),
                "its result is written in place, returned under two names, or copied where "
                "gradients are off, and no node holds it where it is made",
            )
        fixed[root] = first.node
    return fixed


# These copy or take a view, by the strides of what they read.
_COPIES_BY_STRIDES = frozenset(
    {"contiguous", "einsum", "flatten", "ravel", "reshape", "reshape_as", "to", "type"}
)


def _may_share_memory(nodes: Collection[fx.Node]) -> set[fx.Node]:
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


def _is_returned_with_a_copy(nodes: Collection[fx.Node], returned: Collection[fx.Node]) -> bool:
    """Whether what is computed elementwise of some nodes is returned beside a copy by strides.

    It has the strides of what it is computed of: with others the copy might be a view.
    """
    memories = {memory_of(one) for one in returned} - {None}
    return any(
        copies and len({memory_of(one) for one in (node, *copies)} & memories) > 1
        for node in _with_the_same_strides(nodes)
        for copies in [[user for user in node.users if _copies_by_strides(user)]]
    )


def _with_the_same_strides(nodes: Collection[fx.Node]) -> set[fx.Node]:
    """Nodes, and what is computed elementwise of them, with the strides of what is read.

    Strides of a contiguous tensor are those of what replaces it: such nodes are not followed.
    """
    left, seen = list(nodes), set(nodes)
    while left:
        node = left.pop()
        own = fake_result(node)
        if not isinstance(own, torch.Tensor) or is_contiguous(own):
            continue
        for user in node.users:
            made = fake_result(user)
            if user in seen or not isinstance(made, torch.Tensor):
                continue
            if same_shape(made.shape, own.shape) and same_shape(made.stride(), own.stride()):
                seen.add(user)
                left.append(user)
    return seen


def _is_copied_elsewhere(root: Root, sharing: Collection[fx.Node], trace: Trace) -> bool:
    """Whether a copy by strides is taken where gradients are recorded otherwise than of a root."""
    if root.made_at is None:
        return False
    made = trace.regions[root.made_at]
    copies = {
        user
        for node in _with_the_same_strides(sharing)
        for user in node.users
        if _copies_by_strides(user)
    }
    return any(
        not trace.regions[node].records_like(made)
        for node in copies | {one for one in sharing if _copies_by_strides(one)}
        if node in trace.regions
    )


def _copies_by_strides(node: fx.Node) -> bool:
    target = node.target
    if isinstance(target, OpOverload | OpOverloadPacket):
        return str(target).split(".")[1] in _COPIES_BY_STRIDES
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return name in _COPIES_BY_STRIDES


def held(trace: Trace, root: Root, at: fx.Node, product: Root) -> Holder:
    """The first node that still holds a root where it is read, before a node.

    Raises:
        CannotLowerError: none does; ``product`` is what would read it.
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
    """Before which node a root is computed anew: where the author computed it.

    There its operands have the values that the author's node read, whatever is written later.
    """
    if root.made_at is None:
        raise CannotLowerError(product, _no_node(root))
    node = root.made_at
    # What runs inside a vmap is computed behind it, and behind what is inserted there already.
    while _is_in_vmap(node, trace) and node.next.op != "root":
        node = node.next
    return node


def _is_in_vmap(node: fx.Node, trace: Trace) -> bool:
    return node not in trace.regions or trace.regions[node].vmap_depth > 0


def check(tracker: Tracker, found: Uses, chosen: Collection[Root]) -> None:
    """Refuse what rewriting would change.

    Raises:
        CannotLowerError: the first product that must stay as it is.
    """
    trace = tracker.trace
    makers = _makers(trace)
    for product, at, holder in found.held:
        maker = makers.get(memory_of(holder.node))
        if trace.regions[at].grad and maker in trace.regions:
            if trace.regions[maker].inference:  # autograd refuses to save such tensors
                raise CannotLowerError(product, "an operand is made in a torch.inference_mode")
            recorded = [trace.regions[node].grad for node in (maker, holder.node)]
            if recorded == [True, False] and holder.storage[1] > 0:
                # torch refuses views of views that were made and written so.
                raise CannotLowerError(
                    product, "an operand is a view, written where no gradients are recorded"
                )
        if trace.regions[at].grad and not trace.is_intact(holder.storage):
            # The operators may need it for gradients where the author's do not; and AOTAutograd
            # computes activations again from inputs that were written since (seen in 2.13).
            raise CannotLowerError(product, _WRITTEN_BEHIND)
    for product in {*found.products.values()}:
        if product.made_at is not None and _is_written_behind(product.made_at, trace):
            # Where the author's operator saved what it read, torch refuses the backward pass.
            raise CannotLowerError(product, _WRITTEN_BEHIND)
    for node, view in found.exits.items():
        if trace.regions[insertion_point(node, trace)].vmap_depth:
            product = product_of(view.root)
            raise CannotLowerError(product, "it is used inside the vmap that it is in")
    for root, readers in found.readers.items():
        if not operands(root, chosen) or isinstance(root.origin, Compact):
            continue  # read where it is held
        product = found.products[root]
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
                raise CannotLowerError(found.products[reader], _WRITTEN_BEHIND)


_WRITTEN_BEHIND = "an operand is written in place behind it, and gradients are on"


def _is_written_behind(node: fx.Node, trace: Trace) -> bool:
    """Whether what a node reads with gradients on is written in place later."""
    if not trace.regions[node].grad:
        return False
    memories = [trace.memory[one][0] for one in node.all_input_nodes if one in trace.memory]
    order = trace.order[node]
    return any(at > order for memory in memories for at in trace.writes.get(memory, ()))


def _makers(trace: Trace) -> dict[int | None, fx.Node]:
    """The first node that has each memory."""
    first: dict[int | None, fx.Node] = {}
    for node in trace.memory:
        if memory_of(node):
            first.setdefault(memory_of(node), node)
    return first


def _check_region(root: Root, product: Root, here: Region, trace: Trace) -> None:
    """Refuse a root that would be computed where something else is in force than at its node."""
    if root.made_at is None:
        return
    if not trace.regions[root.made_at].records_like(here):
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


def product_of(root: Root) -> Root:
    """The product that a root is, bias apart; the root itself if it is none plus a bias."""
    return root.origin.product.root if isinstance(root.origin, Biased) else root


def insertion_point(node: fx.Node, trace: Trace) -> fx.Node:
    """Where to put what replaces a node: there, or behind the vmaps that it is in."""
    users = set(node.users)
    while _is_in_vmap(node, trace) and node not in users and node.next.op != "root":
        node = node.next
    return node


def _no_node(root: Root) -> str:
    if root.storage is not None and root.storage[1]:  # by how many writes it is newer
        return "an operand was written in place before, through another view of its memory"
    where = "" if root.made_at is None else f" inside {root.made_at.name}"
    return f"an operand is made{where} and no node holds it"
