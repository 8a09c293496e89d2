"""Rewrite recognised products as calls of ``torch.ops.ksopt.ks_mm``.

Only what is still read is rewritten, where it is read. Walking the graph backwards from its ends,
`uses` finds the nodes whose values must be computed from the new operators (*exits*), the products
that these need, and the nodes that nobody reads any more. `lower` then inserts the new nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from ksopt import ops
from ksopt.compile.emission import Emitter, fake_result, has_strides_of, is_torchs
from ksopt.compile.index import Atoms, NotNestedError, identity
from ksopt.compile.recognition import weight_dims, x_dims
from ksopt.compile.running import holds_all
from ksopt.compile.sizes import plain
from ksopt.compile.tracking import Tracker
from ksopt.compile.values import (
    Biased,
    Cast,
    Combined,
    Compact,
    Contraction,
    Region,
    Root,
    Stacked,
    Trace,
    View,
)
from ksopt.compile.weights import Weights


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
    if isinstance(origin, Stacked | Combined) and root.holder is None:
        return [piece.root for piece in origin.pieces]
    return []


@dataclass
class Uses:
    """Who reads what, if the chosen products are rewritten.

    Attributes:
        exits: nodes to replace, and the view that each is; in the order of the graph.
        readers: for each product that is needed: the exits and roots that read it.
        dead: nodes that nobody reads any more, in the order of the graph.
    """

    exits: dict[fx.Node, View] = field(default_factory=dict)
    readers: dict[Root, list[fx.Node | Root]] = field(default_factory=dict)
    dead: list[fx.Node] = field(default_factory=list)


def uses(graph: fx.Graph, trace: Trace, chosen: Collection[Root]) -> Uses:
    """See `Uses`.

    Raises:
        CannotLowerError: a chosen product reads what no node holds.
    """
    found = Uses()
    # A node without users is there for its effect, as are those that write in place.
    live = {node for node in graph.nodes if not node.users} | trace.writers
    needed: set[Root] = set()

    def need(root: Root, reader: fx.Node | Root, product: Root) -> None:
        found.readers.setdefault(root, []).append(reader)
        if root in needed:
            return
        needed.add(root)
        below = operands(root, chosen)
        inside = root if isinstance(root.origin, Contraction) and root in chosen else product
        for other in below:
            need(other, root, inside)
        if not below:
            if root.holder is None:
                raise CannotLowerError(product, _no_node(root))
            live.add(root.holder[0])

    for node in reversed(graph.nodes):
        if node not in live:
            continue
        view = trace.views.get(node)
        if view is not None and is_rewritten(view.root, chosen) and holds_all(view):
            found.exits[node] = view
            need(view.root, node, product_of(view.root))
        else:
            live.update(node.all_input_nodes)
    found.exits = dict(reversed(found.exits.items()))
    found.dead = [node for node in graph.nodes if node not in live or node in found.exits]
    return found


def check(tracker: Tracker, found: Uses, chosen: Collection[Root]) -> None:
    """Refuse what rewriting would change.

    Raises:
        CannotLowerError: the first product that must stay as it is.
    """
    trace = tracker.trace
    exits: dict[Root, list[fx.Node]] = {}
    for node, view in found.exits.items():
        exits.setdefault(view.root, []).append(node)
    for root in found.readers:
        product = product_of(root) if is_rewritten(root, chosen) else None
        if product is None:
            continue
        for below in operands(root, chosen):
            if not is_rewritten(below, chosen) and tracker.is_written_after(below):
                raise CannotLowerError(product, "an operand is written in place in the graph")
        if root in trace.reshaped:  # the fake results of its nodes have the later shape
            raise CannotLowerError(product, "its result is given another shape in place")
        if tracker.is_written_after(root) and len(found.readers[root]) != 1:
            raise CannotLowerError(product, "its result is written in place and read elsewhere too")
        made_in = trace.regions.get(root.made_at) if root.made_at is not None else None
        for node in exits.get(root, ()):
            _check_region(product, made_in, trace.regions[_insertion_point(node, trace)])


def _check_region(product: Root, made_in: Region | None, read_in: Region) -> None:
    if made_in is None:
        return
    if made_in.grad != read_in.grad:
        raise CannotLowerError(product, "gradients are switched on or off between it and its use")
    if read_in.autocast is not None and product.dtype != read_in.autocast:
        raise CannotLowerError(
            product,
            f"it computes in {str(product.dtype).removeprefix('torch.')}, but autocast is on "
            "where it is used",
        )
    if read_in.vmap_depth:
        raise CannotLowerError(product, "it is used inside the vmap that it is in")


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
    lowering = _Lowering(tracker, chosen, emitted)
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


class _Lowering:
    def __init__(self, tracker: Tracker, chosen: Collection[Root], emitted: list[fx.Node]) -> None:
        self.tracker = tracker
        self.trace = tracker.trace
        self.weights = Weights(tracker.trace)
        self.strides_changed = False
        self.chosen = chosen
        self.emitted = emitted
        self.known: dict[Hashable, Any] = {}
        self.built: dict[Root, tuple[fx.Node, tuple[Atoms, ...]]] = {}

    def exits(self, found: Uses) -> dict[fx.Node, fx.Node]:
        """Build what each exit reads, where it reads it."""
        new = {}
        points = {node: _insertion_point(node, self.trace) for node in found.exits}
        for node in sorted(points, key=lambda exit_: self.trace.order[points[exit_]]):
            view, point = found.exits[node], points[node]
            product = product_of(view.root)
            like = product.made_at or node
            self.emit = Emitter(point, like, self.emitted, self.known)
            self.point = self.trace.order[point]
            self.product = product
            try:
                have, dims = self.build(view.root)
                replacement = self.emit.move(have, dims, view.map.dims)
                new[node] = self._fitting(node, view, replacement)
            except NotNestedError as error:
                raise CannotLowerError(product, f"its digits do not nest: {error}") from error
        return new

    def _fitting(self, node: fx.Node, view: View, replacement: fx.Node) -> fx.Node:
        """The replacement with the strides that the readers of a node rely on."""
        wanted = fake_result(node)
        if not isinstance(wanted, Tensor) or has_strides_of(replacement, wanted):
            return replacement
        must = self.tracker.is_written_after(view.root) or wanted.is_contiguous()
        if must or not all(is_torchs(user) for user in node.users):
            return self.emit.laid_out_like(replacement, wanted)
        self.strides_changed = True
        return replacement

    def build(self, root: Root) -> tuple[fx.Node, tuple[Atoms, ...]]:
        """A node for a root, and the dims that it is of it."""
        if root not in self.built:
            self.built[root] = self._build(root)
        return self.built[root]

    def _build(self, root: Root) -> tuple[fx.Node, tuple[Atoms, ...]]:
        origin, whole = root.origin, identity(root.shape).dims
        below = operands(root, self.chosen)
        if not below:
            return self._held(root)
        if isinstance(origin, Contraction):
            x = self._all_of(origin.x, x_dims(origin.factor))
            return self._product(root, x), whole
        if isinstance(origin, Biased):
            product = self.moved(origin.product, origin.product.map.dims)
            return self.emit.call(torch.add, product, self._bias(origin.bias)), whole
        if isinstance(origin, Cast):
            node, dims = self.build(origin.source)
            return self.emit.method("to", node, root.dtype), dims
        if isinstance(origin, Stacked):
            pieces = [self.moved(piece, piece.map.dims) for piece in origin.pieces]
            return self.emit.call(torch.stack, pieces), whole
        if isinstance(origin, Combined):
            pieces = [self.moved(piece, piece.map.dims) for piece in origin.pieces]
            return self.emit.call(torch.einsum, origin.equation, *pieces), whole
        assert isinstance(origin, Compact)
        return self._compact(origin), whole

    def _product(self, root: Root, x: fx.Node) -> fx.Node:
        """The operator, told whose memory its weight is."""
        assert isinstance(root.origin, Contraction)
        dims, last = weight_dims(root.origin.factor), root.origin.factor.batch_last
        stored = self.weights.stored(root)
        if stored is not None:
            weight = self._all_of(stored.root, dims)
            if weight is stored.owner and stored.root is root.origin.weight:
                return self.emit.call(ops.ks_mm, x, weight, last)
            return self.emit.call(ops.ks_mm, x, weight, last, stored.owner)
        weight = self._all_of(root.origin.weight, dims)
        return self.emit.call(ops.ks_mm_once, x, weight, last)

    def _all_of(self, root: Root, dims: Collection[Atoms]) -> fx.Node:
        return self.moved(View(root, identity(root.shape)), dims)

    def moved(self, view: View, want: Collection[Atoms]) -> fx.Node:
        """A node for a root, with the dims that are wanted."""
        node, dims = self.build(view.root)
        return self.emit.move(node, dims, tuple(want))

    def _held(self, root: Root) -> tuple[fx.Node, tuple[Atoms, ...]]:
        if root.holder is None or self.trace.order[root.holder[0]] >= self.point:
            raise CannotLowerError(self.product, _no_node(root))
        return root.holder[0], root.holder[1].dims

    def _bias(self, bias: View) -> fx.Node:
        """A bias with dims of size 1 where it is repeated."""
        dims = tuple(
            () if all(atom.axis is None for atom in atoms) else atoms for atoms in bias.map.dims
        )
        return self.moved(bias, dims)

    def _compact(self, origin: Compact) -> fx.Node:
        """The canonical weight [a, b, c, d] as a view of the dense matrix [M, N]."""
        a, b, c, d = origin.pattern.weight_shape
        node, dims = self.build(origin.matrix)
        node = self.emit.move(node, dims, identity(origin.matrix.shape).dims)
        row, column = map(plain, fake_result(node).stride())
        if isinstance(row, int) and isinstance(column, int):
            # Row i*b*d + k*d + j, column i*c*d + l*d + j. Inductor copies diagonals.
            strides = [row * b * d + column * c * d, row * d, column * d, row + column]
            return self.emit.call(torch.as_strided, node, [a, b, c, d], strides)
        node = self.emit.call(torch.unflatten, node, 1, [a, c, d])
        node = self.emit.call(torch.unflatten, node, 0, [a, b, d])
        # [a, b, d, a, c, d] -> [b, d, c, d, a] -> [b, c, a, d] -> [a, b, c, d]
        node = self.emit.call(torch.diagonal, node, 0, 0, 3)
        node = self.emit.call(torch.diagonal, node, 0, 1, 3)
        return self.emit.call(torch.permute, node, [2, 0, 1, 3])


def product_of(root: Root) -> Root:
    """The product that a root is, bias apart; the root itself if it is none plus a bias."""
    return root.origin.product.root if isinstance(root.origin, Biased) else root


def _insertion_point(node: fx.Node, trace: Trace) -> fx.Node:
    """Where to compute what replaces a node: there, or behind the vmaps that it is in."""
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
