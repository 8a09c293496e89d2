"""Rewriting of recognised products as calls of ``torch.ops.ksopt.ks_mm``.

`lowering.rewrite_safety` determines the nodes to replace and where they are computed; `lower`
inserts the new nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ksopt import ops
from ksopt.compile.capture.index_map import Atoms, NotNestedError, identity
from ksopt.compile.capture.nodes import REPLACES, fake_result
from ksopt.compile.capture.recognize import weight_dims, x_dims
from ksopt.compile.capture.symbolic import is_contiguous, plain
from ksopt.compile.capture.tracker import Tracker
from ksopt.compile.capture.values import (
    Applied,
    Biased,
    Cast,
    Combined,
    Compact,
    Contraction,
    Kind,
    Root,
    Stacked,
    View,
)
from ksopt.compile.lowering.emit import (
    Emitter,
    has_strides_of,
    is_torch_function,
    views_to_reshapes,
)
from ksopt.compile.lowering.emit_mask import emit_applied
from ksopt.compile.lowering.output_strides import restore_strides
from ksopt.compile.lowering.recomputed_roots import CannotLowerError, operands, product_of
from ksopt.compile.lowering.rewrite_safety import Uses, computed_at, held, insertion_point
from ksopt.compile.lowering.weight_lifetime import Stored, Weights


def lower(
    gm: fx.GraphModule, tracker: Tracker, usage: Uses, chosen: Collection[Root]
) -> tuple[list[fx.Node], dict[Root, fx.Node]]:
    """Insert the operators, replace the exits, erase nodes without readers.

    Returns:
        The new nodes, and the one that computes each product.

    Raises:
        CannotLowerError: a product cannot be rewritten; the graph is unchanged.
    """
    emitted: list[fx.Node] = []
    lowering = _Lowering(tracker, chosen, emitted, usage)
    try:
        new = lowering.exits()
    except CannotLowerError:
        for node in reversed(emitted):
            gm.graph.erase_node(node)
        raise
    for node, replacement in new.items():
        replacement.meta[REPLACES] = fake_result(node)
        node.replace_all_uses_with(replacement)
    for node in reversed(usage.dead):
        if node.op != "placeholder" and not node.users:
            gm.graph.erase_node(node)
    if lowering.changed:
        views_to_reshapes(gm.graph)
        restore_strides(gm.graph, {new[node] for node in lowering.changed}, tracker.trace)
    _close_empty_vmaps(gm.graph)
    built = lowering.built.items()
    return emitted, {
        root: node for root, (node, _) in built if isinstance(root.origin, Contraction)
    }


@dataclass(frozen=True)
class _Place:
    """Insertion place of nodes.

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
        usage: Uses,
    ) -> None:
        self.tracker = tracker
        self.trace = tracker.trace
        self.weights = Weights(tracker.trace)
        self.changed: set[fx.Node] = set()  # exits whose replacements have other strides
        self.chosen = chosen
        self.emitted = emitted
        self.usage = usage
        self.known: dict[Hashable, Any] = {}
        self.built: dict[Root, _Built] = {}

    def exits(self) -> dict[fx.Node, fx.Node]:
        """Build the root of each exit, and at the exit the view that replaces it."""
        new = {}
        exits = self.usage.exits
        points = {node: insertion_point(node, self.trace) for node in exits}
        for node in sorted(points, key=lambda exit_: self.trace.order[points[exit_]]):
            view = exits[node]
            at = self._place(points[node], product_of(view.root), node)
            try:
                have, dims = self.build(view.root, at)
                replacement = at.emit.move(have, dims, view.map.dims)
                replacement = self._fitting(at, node, view, replacement)
                if view.root in self.usage.written:
                    replacement = at.emit.without_view(replacement)
                new[node] = replacement
            except NotNestedError as error:
                raise CannotLowerError(at.product, f"its digits do not nest: {error}") from error
        return new

    def _place(self, before: fx.Node, product: Root, like: fx.Node | None = None) -> _Place:
        like = product.producer or like or before
        return _Place(before, Emitter(before, like, self.emitted, self.known), product)

    def _fitting(self, at: _Place, node: fx.Node, view: View, replacement: fx.Node) -> fx.Node:
        """The replacement with the strides that the readers of a node rely on."""
        target = fake_result(node)
        if not isinstance(target, Tensor) or has_strides_of(replacement, target):
            return replacement
        must = view.root in self.usage.fixed or target.is_contiguous()
        if must or not all(is_torch_function(user) for user in node.users):
            return at.emit.laid_out_like(replacement, target)
        self.changed.add(node)
        # A node of its own: another exit may be the same view, and have its author's strides.
        return at.emit.call(torch.permute, replacement, list(range(target.dim())))

    def build(self, root: Root, at: _Place) -> _Built:
        """A node for a root that is read at a place, and its dims over the root.

        Computed roots are built once, where the author computed them; others where they are read.
        """
        if not operands(root, self.chosen):
            holder = held(self.trace, root, at.before, at.product)
            node, value = holder.node, fake_result(holder.node)
            is_written = holder.storage[1] > 0 and root.kind is not Kind.WEIGHT
            if is_written and isinstance(value, Tensor) and not is_contiguous(value):
                # torch 2.11 treats a written tensor as contiguous, and views of it as copies.
                node = at.emit.copied(node)
            return node, holder.map.dims
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
            return at.emit.saved(torch.add, summand, self._bias(origin.bias, at)), whole
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
        is_trained = self.weights.is_trained(at.product)
        for index, piece in enumerate(origin.pieces):
            if is_trained and self.weights.is_only_copied(piece.root, at.product):
                pieces[index] = at.emit.copied_in_another_order(pieces[index])
        return at.emit.call(torch.einsum, origin.equation, *pieces), whole

    def _product(self, root: Root, x: fx.Node, at: _Place) -> fx.Node:
        """The operator of a product, with the owner of its weight's memory."""
        assert isinstance(root.origin, Contraction)
        dims, last = weight_dims(root.origin.factor), root.origin.factor.batch_last
        stored = self.weights.stored(root)
        copied = self.weights.to_be_copied(root)
        if copied is not None:
            copy = self._copy_of(copied, root, dims, at)
            if stored is None or self.weights.is_trained(root):
                return at.emit.call(ops.ks_mm_once, x, copy, last)
            weight = self._all_of(stored.root, dims, at)
            return at.emit.call(ops.ks_mm_saving, x, weight, copy, stored.owner, last)
        if stored is not None:
            weight = self._all_of(stored.root, dims, at)
            if weight is stored.owner and stored.root is root.origin.weight:
                return at.emit.call(ops.ks_mm, x, weight, last)
            return at.emit.call(ops.ks_mm, x, weight, last, stored.owner)
        weight = self._all_of(root.origin.weight, dims, at)
        return at.emit.call(ops.ks_mm_once, x, weight, last)

    def _copy_of(
        self, stored: Stored, product: Root, dims: Collection[Atoms], at: _Place
    ) -> fx.Node:
        """A weight in memory of its own, for the backward pass of a product."""
        assert isinstance(product.origin, Contraction)
        weight = self._all_of(product.origin.weight, dims, at)
        if stored.root is not product.origin.weight:
            return weight  # a cast
        return at.emit.copied_in_another_order(weight)

    def _all_of(self, root: Root, dims: Collection[Atoms], at: _Place) -> fx.Node:
        return self.moved(View(root, identity(root.shape)), dims, at)

    def moved(self, view: View, want: Collection[Atoms], at: _Place) -> fx.Node:
        """A node for a view's root with the dims ``want``."""
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


def _close_empty_vmaps(graph: fx.Graph) -> None:
    """Remove empty vmaps."""
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
