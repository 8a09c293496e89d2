"""Activations written as several elementwise operations, as GPT-2 does its GELU.

They are recognised by their values: the nodes that depend on a value alone are run in float64 on
samples, and compared with the activations that an epilogue may have.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ksopt.compile.capture.nodes import fake_result
from ksopt.compile.capture.symbolic import same_shape
from ksopt.compile.lowering.operations import POINTWISE
from ksopt.epilogue import ACTIVATIONS, Activation, with_epilogue

_MOST_NODES = 16
"""GPT-2's GELU has 8."""
_REACH = 64
"""Nodes of the graph that are searched; those of an activation need not be adjacent."""
_TOLERANCE = 1e-6
"""Largest difference: constants are often written with ten digits; the two GELUs differ by 5e-4."""


@dataclass(frozen=True)
class Decomposed:
    """An activation of a value, computed by several nodes.

    Attributes:
        activation: its name.
        nodes: the nodes that compute it, in the order of the graph; the last is its result.
    """

    activation: Activation
    nodes: tuple[fx.Node, ...]


def decomposed_activation(value: fx.Node) -> Decomposed | None:
    """The activation that is the only use of a value; None if there is none.

    Args:
        value: a node that holds a tensor.
    """
    for nodes in _closed(value):
        result = _evaluated(value, nodes)
        if result is None:
            return None
        for activation in ACTIVATIONS:
            expected = with_epilogue(_samples(), activation=activation)
            if activation != "none" and (result - expected).abs().max() <= _TOLERANCE:
                return Decomposed(activation, nodes)
    return None


def _closed(value: fx.Node) -> Iterator[tuple[fx.Node, ...]]:
    """Groups of elementwise nodes on a value, of which only the last is read by others."""
    nodes: list[fx.Node] = []
    inside = {value}
    node = value
    for _ in range(_REACH):
        node = node.next
        if node.op in ("output", "root") or len(nodes) == _MOST_NODES:
            return
        if not inside.intersection(node.all_input_nodes):
            continue
        if not _is_elementwise_of(node, inside, value):
            return  # it reads an intermediate result
        nodes.append(node)
        if all(user in inside or user is node for one in inside for user in one.users):
            yield tuple(nodes)
        inside.add(node)


def _is_elementwise_of(node: fx.Node, inside: Collection[fx.Node], value: fx.Node) -> bool:
    is_known = node.op in ("call_function", "call_method") and node.target in POINTWISE
    own, other = fake_result(node), fake_result(value)
    return (
        is_known
        and all(one in inside for one in node.all_input_nodes)
        and isinstance(own, Tensor)
        and own.dtype == other.dtype
        and same_shape(own.shape, other.shape)
    )


def _samples() -> Tensor:
    return torch.linspace(-12, 12, 481, dtype=torch.float64)


def _evaluated(value: fx.Node, nodes: Collection[fx.Node]) -> Tensor | None:
    """The last node's value for each of `_samples`; None if it cannot be computed."""
    known: dict[fx.Node, Any] = {value: _samples()}
    try:
        with torch.no_grad():
            for node in nodes:
                args = fx.map_arg(node.args, known.__getitem__)
                kwargs = fx.map_arg(node.kwargs, known.__getitem__)
                if node.op == "call_method":
                    known[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
                else:
                    known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, TypeError, ValueError):
        return None
    result: Tensor = known[node]
    return result if result.isfinite().all() else None
