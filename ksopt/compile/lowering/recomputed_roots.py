"""Roots that are recomputed if some products are lowered, and their operands."""

from __future__ import annotations

from collections.abc import Collection

from ksopt.compile.capture.values import (
    Applied,
    Biased,
    Cast,
    Combined,
    Compact,
    Contraction,
    Root,
    Stacked,
)


class CannotLowerError(Exception):
    """A product cannot be rewritten.

    Attributes:
        root: the product.
        reason: a clause.
    """

    def __init__(self, root: Root, reason: str) -> None:
        super().__init__(reason)
        self.root = root
        self.reason = reason


def is_rewritten(root: Root, chosen: Collection[Root]) -> bool:
    """Whether new operators compute a root: a chosen product, or one plus a bias."""
    if isinstance(root.origin, Biased):
        return is_rewritten(root.origin.product.root, chosen)
    return isinstance(root.origin, Contraction) and root in chosen


def operands(root: Root, chosen: Collection[Root]) -> list[Root]:
    """The roots that a root is recomputed from; empty if a node holds it."""
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


def product_of(root: Root) -> Root:
    """The product that a root is, without a bias."""
    return root.origin.product.root if isinstance(root.origin, Biased) else root
