"""Rewrite recognised products as calls of ``torch.ops.ksopt.ks_mm``.

Only what is still read is rewritten, and it is computed where the author computed it: there its
operands hold what the author's code read, and gradients are on or off as they were. Walking the
graph backwards from its ends, `uses` finds the nodes whose values must be computed from the new
operators (*exits*), the products that these need, and the nodes that nobody reads any more. `lower`
then inserts the new nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from ksopt import ops
from ksopt.compile.applied import emit_applied
from ksopt.compile.emission import Emitter, fake_result, has_strides_of, is_torchs
from ksopt.compile.index import Atoms, NotNestedError, identity
from ksopt.compile.recognition import weight_dims, x_dims
from ksopt.compile.running import holds_all
from ksopt.compile.sizes import plain
from ksopt.compile.tracking import Tracker
from ksopt.compile.values import (
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
from ksopt.compile.weights import Weights, memory_of


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
            and result.fixed.get(view.root, node) is node
        ):
            result.exits[node] = view
            need(view.root, node, product_of(view.root), _insertion_point(node, trace))
        else:
            live.update(node.all_input_nodes)
    result.exits = dict(reversed(result.exits.items()))
    result.dead = [node for node in graph.nodes if node not in live or node in result.exits]
    return result


def _fixed_in_memory(
    graph: fx.Graph, trace: Trace, chosen: Collection[Root]
) -> dict[Root, fx.Node]:
    """Results that are written in place, or returned under several names, and their first nodes.

    Which of their views share memory shows then. So the node that made a result is replaced, and
    all its views and copies are taken of the replacement as the author took them.

    Raises:
        CannotLowerError: no node's value is all of such a result when it is made.
    """
    names: dict[Root, list[fx.Node]] = {}
    for node, view in trace.views.items():
        if is_rewritten(view.root, chosen):
            names.setdefault(view.root, []).append(node)
    returned = [memory_of(one) for node in graph.nodes if node.op == "output"
                for one in node.all_input_nodes]  # fmt: skip
    fixed = {}
    for root, nodes in names.items():
        memories = {memory_of(node) for node in nodes} - {None}
        written = not all(trace.is_intact(trace.memory[node]) for node in nodes)
        if not written and sum(memory in memories for memory in returned) < 2:
            continue
        first = root.holder
        if first is None or first.node is not root.made_at:
            raise CannotLowerError(
                product_of(root),
                "its result is written in place, or returned under two names, and no node holds "
                "it where it is made",
            )
        fixed[root] = first.node
    return fixed


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
    while trace.regions[node].vmap_depth and node.next.op != "root":
        node = node.next  # what runs inside a vmap is computed behind it
    return node


def check(tracker: Tracker, found: Uses, chosen: Collection[Root]) -> None:
    """Refuse what rewriting would change.

    Raises:
        CannotLowerError: the first product that must stay as it is.
    """
    trace = tracker.trace
    for product, at, holder in found.held:
        if trace.regions[at].grad and not trace.is_intact(holder.storage):
            # The operators may need it for gradients where the author's do not; and AOTAutograd
            # computes activations again from inputs that were written since (seen in 2.13).
            raise CannotLowerError(
                product, "an operand is written in place behind it, and gradients are on"
            )
    for node, view in found.exits.items():
        if trace.regions[_insertion_point(node, trace)].vmap_depth:
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


def lower(
    gm: fx.GraphModule, tracker: Tracker, found: Uses, chosen: Collection[Root]
) -> list[fx.Node]:
    """Insert the operators, replace the exits, erase what is not read any more.

    Returns:
        The new nodes.

    Raises:
        CannotLowerError: nothing has been changed then.
    """
    emitted: list[fx.Node] = []
    lowering = _Lowering(tracker, chosen, emitted, found.fixed)
    try:
        new = lowering.exits(found)
    except CannotLowerError:
        for node in reversed(emitted):
            gm.graph.erase_node(node)
        raise
    for node, replacement in new.items():
        node.replace_all_uses_with(replacement)
    for node in reversed(found.dead):
        if node.op != "placeholder" and not node.users:
            gm.graph.erase_node(node)
    if lowering.strides_changed:
        _views_to_reshapes(gm.graph)
    _close_empty_vmaps(gm.graph)
    return emitted


@dataclass(frozen=True)
class _Place:
    """Where nodes are inserted, and for which product.

    Attributes:
        before: the node that they are inserted before.
        emit: inserts them.
        product: the product that they compute, or that reads them.
    """

    before: fx.Node
    emit: Emitter
    product: Root


_Built = tuple[fx.Node, tuple[Atoms, ...]]


class _Lowering:
    def __init__(
        self,
        tracker: Tracker,
        chosen: Collection[Root],
        emitted: list[fx.Node],
        fixed: Mapping[Root, fx.Node],
    ) -> None:
        self.tracker = tracker
        self.trace = tracker.trace
        self.weights = Weights(tracker.trace)
        self.strides_changed = False
        self.chosen = chosen
        self.emitted = emitted
        self.fixed = fixed
        self.known: dict[Hashable, Any] = {}
        self.built: dict[Root, _Built] = {}

    def exits(self, found: Uses) -> dict[fx.Node, fx.Node]:
        """Build what each exit reads, and the exit's view of it where the exit is."""
        new = {}
        points = {node: _insertion_point(node, self.trace) for node in found.exits}
        for node in sorted(points, key=lambda exit_: self.trace.order[points[exit_]]):
            view = found.exits[node]
            at = self._place(points[node], product_of(view.root), node)
            try:
                have, dims = self.build(view.root, at)
                replacement = at.emit.move(have, dims, view.map.dims)
                new[node] = self._fitting(at, node, view, replacement)
            except NotNestedError as error:
                raise CannotLowerError(at.product, f"its digits do not nest: {error}") from error
        return new

    def _place(self, before: fx.Node, product: Root, like: fx.Node | None = None) -> _Place:
        like = product.made_at or like or before
        return _Place(before, Emitter(before, like, self.emitted, self.known), product)

    def _fitting(self, at: _Place, node: fx.Node, view: View, replacement: fx.Node) -> fx.Node:
        """The replacement with the strides that the readers of a node rely on."""
        wanted = fake_result(node)
        if not isinstance(wanted, Tensor) or has_strides_of(replacement, wanted):
            return replacement
        must = view.root in self.fixed or wanted.is_contiguous()
        if must or not all(is_torchs(user) for user in node.users):
            return at.emit.laid_out_like(replacement, wanted)
        self.strides_changed = True
        return replacement

    def build(self, root: Root, at: _Place) -> _Built:
        """A node for a root that is read at a place, and the dims that it is of it.

        What is computed is computed once, where the author did; what is only read, where it is
        read.
        """
        if not operands(root, self.chosen):
            holder = held(self.trace, root, at.before, at.product)
            return holder.node, holder.map.dims
        if isinstance(root.origin, Compact):
            return self._compact(root.origin, at), identity(root.shape).dims
        if root not in self.built:
            is_product = isinstance(root.origin, Contraction)
            is_biased = isinstance(root.origin, Biased)
            product = root if is_product else product_of(root) if is_biased else at.product
            here = computed_at(root, self.trace, product)
            self.built[root] = self._build(root, self._place(here, product))
        return self.built[root]

    def _build(self, root: Root, at: _Place) -> _Built:
        origin, whole = root.origin, identity(root.shape).dims
        if isinstance(origin, Contraction):
            dims, last = x_dims(origin.factor), origin.factor.batch_last
            try:
                x = self._all_of(origin.x, dims, at)
            except NotNestedError:
                # One dim may hold two sizes of the batch that are both dynamic: it stays one.
                x = self._all_of(origin.x, _with_one_batch_dim(dims, last), at)
                whole = _with_one_batch_dim(whole, last)
            return self._product(root, x, at), whole
        if isinstance(origin, Biased):
            summand = self.moved(origin.product, origin.product.map.dims, at)
            return at.emit.call(torch.add, summand, self._bias(origin.bias, at)), whole
        if isinstance(origin, Cast):
            node, whole = self.build(origin.source, at)
            return at.emit.method("to", node, root.dtype), whole
        if isinstance(origin, Stacked):
            pieces = [self.moved(piece, piece.map.dims, at) for piece in origin.pieces]
            return at.emit.call(torch.stack, pieces), whole
        assert isinstance(origin, Combined | Applied)
        pieces = [self.moved(piece, piece.map.dims, at) for piece in origin.pieces]
        if isinstance(origin, Applied):
            return emit_applied(at.emit, origin, pieces), whole
        return at.emit.call(torch.einsum, origin.equation, *pieces), whole

    def _product(self, root: Root, x: fx.Node, at: _Place) -> fx.Node:
        """The operator, told whose memory its weight is."""
        assert isinstance(root.origin, Contraction)
        dims, last = weight_dims(root.origin.factor), root.origin.factor.batch_last
        stored = self.weights.stored(root)
        if stored is not None:
            weight = self._all_of(stored.root, dims, at)
            if weight is stored.owner and stored.root is root.origin.weight:
                return at.emit.call(ops.ks_mm, x, weight, last)
            return at.emit.call(ops.ks_mm, x, weight, last, stored.owner)
        weight = self._all_of(root.origin.weight, dims, at)
        return at.emit.call(ops.ks_mm_once, x, weight, last)

    def _all_of(self, root: Root, dims: Collection[Atoms], at: _Place) -> fx.Node:
        return self.moved(View(root, identity(root.shape)), dims, at)

    def moved(self, view: View, want: Collection[Atoms], at: _Place) -> fx.Node:
        """A node for a root, with the dims that are wanted."""
        node, dims = self.build(view.root, at)
        return at.emit.move(node, dims, tuple(want))

    def _bias(self, bias: View, at: _Place) -> fx.Node:
        """A bias with dims of size 1 where it is repeated."""
        dims = tuple(
            () if all(atom.axis is None for atom in atoms) else atoms for atoms in bias.map.dims
        )
        return self.moved(bias, dims, at)

    def _compact(self, origin: Compact, at: _Place) -> fx.Node:
        """The canonical weight [a, b, c, d] as a view of the dense matrix [M, N]."""
        a, b, c, d = origin.pattern.weight_shape
        node, dims = self.build(origin.matrix, at)
        node = at.emit.move(node, dims, identity(origin.matrix.shape).dims)
        row, column = map(plain, fake_result(node).stride())
        if isinstance(row, int) and isinstance(column, int):
            # Row i*b*d + k*d + j, column i*c*d + l*d + j. Inductor copies diagonals.
            strides = [row * b * d + column * c * d, row * d, column * d, row + column]
            return at.emit.call(torch.as_strided, node, [a, b, c, d], strides)
        node = at.emit.call(torch.unflatten, node, 1, [a, c, d])
        node = at.emit.call(torch.unflatten, node, 0, [a, b, d])
        # [a, b, d, a, c, d] -> [b, d, c, d, a] -> [b, c, a, d] -> [a, b, c, d]
        node = at.emit.call(torch.diagonal, node, 0, 0, 3)
        node = at.emit.call(torch.diagonal, node, 0, 1, 3)
        return at.emit.call(torch.permute, node, [2, 0, 1, 3])


def _with_one_batch_dim(dims: Sequence[Atoms], batch_last: bool) -> tuple[Atoms, ...]:
    """The dims of an operand, [*batch, N] or [N, *batch], with all batch dims as one."""
    batch, features = (dims[1:], dims[0]) if batch_last else (dims[:-1], dims[-1])
    together = tuple(atom for atoms in batch for atom in atoms)
    return (features, together) if batch_last else (together, features)


def product_of(root: Root) -> Root:
    """The product that a root is, bias apart; the root itself if it is none plus a bias."""
    return root.origin.product.root if isinstance(root.origin, Biased) else root


def _insertion_point(node: fx.Node, trace: Trace) -> fx.Node:
    """Where to put what replaces a node: there, or behind the vmaps that it is in."""
    users = set(node.users)
    while trace.regions[node].vmap_depth and node not in users and node.next.op != "root":
        node = node.next
    return node


def _no_node(root: Root) -> str:
    if root.storage is not None and root.storage[1]:  # by how many writes it is newer
        return "an operand was written in place before, through another view of its memory"
    where = "" if root.made_at is None else f" inside {root.made_at.name}"
    return f"an operand is made{where} and no node holds it"


def _close_empty_vmaps(graph: fx.Graph) -> None:
    """Remove vmaps that nothing runs in any more."""
    opened: list[fx.Node] = []
    for node in list(graph.nodes):
        name = getattr(node.target, "__name__", "")
        if name == "_vmap_increment_nesting":
            opened.append(node)
        elif name == "_vmap_decrement_nesting" and opened:
            start = opened.pop()
            if start.next is node and not start.users and not node.users:
                graph.erase_node(node)
                graph.erase_node(start)


def _views_to_reshapes(graph: fx.Graph) -> None:
    """Let views work on other strides, too; where they worked before they stay views."""
    for node in graph.nodes:
        takes_sizes = len(node.args) > 1 and not isinstance(node.args[1], torch.dtype)
        if node.op == "call_method" and node.target == "view" and takes_sizes:
            node.target = "reshape"
