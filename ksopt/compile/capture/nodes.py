"""What a node of a graph carries: its fake result, and the memory of that."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx


def fake_result(node: fx.Node) -> Any:
    """The fake result that a node carries, None if it carries none."""
    return node.meta.get("example_value", node.meta.get("val"))


def memory_of(node: fx.Node) -> int | None:
    """Identity of the memory of a node's fake result."""
    known = fake_result(node)
    try:
        return known.untyped_storage()._cdata if isinstance(known, Tensor) else None
    except (NotImplementedError, RuntimeError):  # sparse tensors and some subclasses have none
        return None
