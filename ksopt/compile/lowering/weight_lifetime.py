"""Lifetime of a product's weight: stored in the model or computed at each call, trained or not.

ksopt's operator caches the prepared form of a weight until the weight changes. That requires a
weight that persists between two calls: a view of a parameter or a buffer. A weight that the graph
computes (masked, stacked, copied into another order) is a new tensor at each call.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from torch import fx

from ksopt.compile.capture.index_map import NotNestedError
from ksopt.compile.capture.nodes import fake_result, memory_of
from ksopt.compile.capture.recognize import weight_dims
from ksopt.compile.capture.reshape_plan import keeps_memory, plan
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
    Trace,
)
from ksopt.compile.lowering.saved_weight import is_saved, needs_grad


@dataclass(frozen=True)
class Stored:
    """A weight that is a view of a parameter or a buffer.

    Attributes:
        owner: the node of that parameter or buffer.
        root: the stored weight, maybe in another dtype than the product's.
    """

    owner: fx.Node
    root: Root


class Weights:
    """The weights of a graph's products.

    Args:
        trace: of the graph.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._owners: dict[int, fx.Node] = {}
        self._saved: dict[Hashable, bool] = {}
        for node, view in trace.views.items():
            if node.op in ("placeholder", "get_attr") and view.root.kind is Kind.WEIGHT:
                memory = memory_of(node)
                if memory is not None:
                    self._owners.setdefault(memory, node)

    def stored(self, product: Root) -> Stored | None:
        """The stored weight of a product; None if it is computed at each call."""
        stored = self._in_memory(product)
        if stored is None:
            return None
        matrix = _matrix(stored.root)
        return None if self._is_written(matrix) else stored

    def to_be_copied(self, product: Root) -> Stored | None:
        """The stored weight of a product, if the author's code saves a copy of it.

        None if nothing is saved, because no gradient of the product's input is recorded, and for a
        trained weight that is cast: the operator casts it, and saves the result.
        """
        assert isinstance(product.origin, Contraction)
        stored = self._in_memory(product)
        if stored is None or not self._records(product) or not self._flows_into(product):
            return None
        if stored.root is not product.origin.weight and self.is_trained(product):
            return None
        return None if is_saved(self._trace, product, stored.owner, self._saved) else stored

    def is_only_copied(self, weight: Root, product: Root) -> bool:
        """Whether the author's product by a stored weight saves no memory of the weight."""
        if weight.holder is None or not self._records(product):
            return False
        owner = self._owners.get(memory_of(weight.holder.node) or 0)
        return owner is not None and not is_saved(self._trace, product, owner, self._saved)

    def _in_memory(self, product: Root) -> Stored | None:
        assert isinstance(product.origin, Contraction)
        root, factor = product.origin.weight, product.origin.factor
        if (
            isinstance(root.origin, Cast)
            and root.origin.source.dtype.is_floating_point
            and self._records_like(root, product)
        ):
            root = root.origin.source
        matrix = _matrix(root)
        if matrix.holder is None:
            return None
        node, index_map = matrix.holder.node, matrix.holder.map
        owner = self._owners.get(memory_of(node) or 0)
        if owner is None:
            return None
        if matrix is root and not _is_view(node, index_map.dims, weight_dims(factor)):
            return None
        return Stored(owner, root)

    def is_trained(self, product: Root) -> bool:
        """Whether gradients of a product's weight are recorded."""
        assert isinstance(product.origin, Contraction)
        held = _held(product.origin.weight)
        return self._records(product) and any(map(needs_grad, held))

    def passes_gradients(self, product: Root) -> bool:
        """Whether gradients of a product's input are recorded."""
        assert isinstance(product.origin, Contraction)
        if not self._records(product) or product.producer is None:
            return False
        for node in product.producer.all_input_nodes:
            view = self._trace.views.get(node)
            if (view is None or view.root.kind is Kind.ACTIVATION) and needs_grad(node):
                return True
        return False

    def _flows_into(self, product: Root) -> bool:
        """Whether a gradient flows into a product's input, which may be a product itself."""
        if self.passes_gradients(product):
            return True
        assert isinstance(product.origin, Contraction)
        x = product.origin.x
        if isinstance(x.origin, Biased):
            x = x.origin.product.root
        if isinstance(x.origin, Contraction):
            return self.is_trained(x) or self._flows_into(x)
        return x.holder is not None and needs_grad(x.holder.node)

    def _records(self, product: Root) -> bool:
        producer = product.producer
        return producer is not None and self._trace.regions[producer].grad

    def _records_like(self, one: Root, other: Root) -> bool:
        """Whether gradients flow alike at the producers of two roots."""
        regions = self._trace.regions
        if one.producer is None or other.producer is None:
            return False
        return regions[one.producer].records_like(regions[other.producer])

    def _is_written(self, root: Root) -> bool:
        return root.storage is not None and root.storage[0] in self._trace.writes


def _matrix(root: Root) -> Root:
    """The root that holds a weight in memory: the dense matrix, if the weight is part of one."""
    return root.origin.matrix if isinstance(root.origin, Compact) else root


def _is_view(node: fx.Node, have: object, want: object) -> bool:
    """Whether moving a node's result into another order of dims takes no copy."""
    try:
        return keeps_memory(fake_result(node).stride(), plan(have, want))  # type: ignore[arg-type]
    except NotNestedError:
        return False


def _held(root: Root) -> Iterator[fx.Node]:
    """The nodes that hold a weight, or the parts it is computed from."""
    if root.holder is not None:
        yield root.holder.node
    elif isinstance(root.origin, Cast):
        yield from _held(root.origin.source)
    elif isinstance(root.origin, Compact):
        yield from _held(root.origin.matrix)
    elif isinstance(root.origin, Stacked | Combined | Applied):
        for piece in root.origin.pieces:
            yield from _held(piece.root)
