"""Metadata of graph nodes: the fake result, and the memory it lies in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves


def fake_result(node: fx.Node) -> Any:
    """The fake result of a node; None if it has none."""
    return node.meta.get("example_value", node.meta.get("val"))


def on_fakes(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of a function on fake tensors, without gradients."""
    fakes = [leaf for leaf in tree_leaves((args, kwargs)) if hasattr(leaf, "fake_mode")]
    mode = fakes[0].fake_mode if fakes else contextlib.nullcontext()
    with mode, torch.no_grad():
        return function(*args, **kwargs)


REPLACES = "ksopt_replaces"
"""Key in a node's meta: the fake result of the author's node that it replaces."""


def authors_result(node: fx.Node) -> Any:
    """The fake result in the author's graph of a node, or of the node that it replaces."""
    return node.meta.get(REPLACES, fake_result(node))


def memory_of(node: fx.Node) -> int | None:
    """Identity of the memory of a node's result in the author's graph."""
    return _memory(authors_result(node))


def holds_memory(node: fx.Node, memory: int) -> bool:
    """Whether a node's result, or one of its several results, lies in a memory."""
    known = authors_result(node)
    every = known if isinstance(known, list | tuple) else [known]
    return any(_memory(one) == memory for one in every)


def reached(nodes: Iterable[fx.Node], step: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """Nodes reachable from some nodes in one or more steps."""
    seen: set[fx.Node] = set()
    left = [other for node in nodes for other in step(node)]
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            left += step(node)
    return seen


def _memory(value: Any) -> int | None:
    try:
        return value.untyped_storage()._cdata if isinstance(value, Tensor) else None
    except (NotImplementedError, RuntimeError):  # sparse tensors and some subclasses have none
        return None
