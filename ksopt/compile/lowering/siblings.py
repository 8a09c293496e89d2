"""Siblings: layers of the same patterns on one input in one launch, as queries, keys and values.

Their results are side by side in one tensor, of which each reader gets its part. Those that are
trained become ``ks_chain_siblings``, whose results have a gradient each.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace as with_changes
from typing import Any

import torch
from torch import fx

from ksopt import ops
from ksopt.compile.capture.nodes import fake_result
from ksopt.compile.lowering.emit import Emitter, is_torch_function, views_to_reshapes
from ksopt.compile.lowering.layer import Layer, vector
from ksopt.compile.lowering.output_strides import may_leave_as_a_view
from ksopt.kernels.problem import Problem

_MOST = 4
_MOST_STEPS = 20


def problem_of(layers: Iterable[Layer]) -> Problem:
    """The problem that siblings form."""
    first, *others = layers
    return with_changes(first.problem, siblings=1 + len(others))


def groups(
    graph: fx.Graph,
    layers: Mapping[fx.Node, Layer],
    is_whole: Callable[..., bool],
) -> Iterator[list[fx.Node]]:
    """Groups of siblings that are computed faster together.

    Args:
        graph: of the layers.
        layers: the layer of each node.
        is_whole: judges the problem of all of a group; called with it and the layers.
    """
    order = {node: at for at, node in enumerate(graph.nodes)}
    alike: dict[Any, list[fx.Node]] = {}
    for node, layer in layers.items():
        after = layer.problem.epilogue
        is_plain = after.activation == "none" and not after.residual and not after.in_float32
        if is_plain and _may_be_a_part(node):
            alike.setdefault((layer.x, layer.problem), []).append(node)
    for nodes in alike.values():
        nodes.sort(key=order.__getitem__)
        for at in range(0, len(nodes), _MOST):
            group = nodes[at : at + _MOST]
            if len(group) < 2 or not _can_be_first(group, layers, order):
                continue
            together = [layers[node] for node in group]
            problem = problem_of(together)
            if is_whole(problem, *together):
                yield group


def _may_be_a_part(node: fx.Node) -> bool:
    """Whether nothing observes that a result's rows are not adjacent."""
    return all(map(is_torch_function, node.users)) and not may_leave_as_a_view(node)


def _can_be_first(
    group: list[fx.Node], layers: Mapping[fx.Node, Layer], order: Mapping[fx.Node, int]
) -> bool:
    """Whether all inputs of a group can be available before the first one's result."""
    needed = [one for node in group for one in _read(layers[node])]
    return all(_is_movable(one, order[group[0]], order) for one in needed)


def _read(layer: Layer) -> list[fx.Node]:
    bias = () if layer.bias is None else (layer.bias,)
    return [*layer.weights, *layer.owners, *bias]


def _is_movable(node: fx.Node, before: int, order: Mapping[fx.Node, int]) -> bool:
    """Whether a node precedes a place, or is computed from inputs of the graph alone."""
    left, steps = [node], 0
    while left:
        one = left.pop()
        if order[one] < before:
            continue
        steps += 1
        if one.op not in ("call_function", "call_method") or steps > _MOST_STEPS:
            return False
        left += one.all_input_nodes
    return True


def replace(
    graph: fx.Graph, layers: Mapping[fx.Node, Layer], are_trained: bool
) -> dict[fx.Node, fx.Node]:
    """Replace siblings by one operator, at the first one's result.

    Args:
        graph: of the layers.
        layers: of one group, in its order.
        are_trained: whether gradients of the group are recorded.

    Returns:
        The replacement of each node.
    """
    first = next(iter(layers))
    order = {node: at for at, node in enumerate(graph.nodes)}
    for layer in layers.values():
        for node in _read(layer):
            _move(node, first, order)
    emit = Emitter(first, first, [], {})
    together = list(layers.values())
    biases = [vector(emit, layer.bias) for layer in together if layer.bias is not None]
    x, count = together[0].x, len(together)
    weights = [one for layer in together for one in layer.weights]
    owners = [one for layer in together for one in layer.owners]
    if are_trained:
        value = emit.call(ops.ks_chain_siblings, x, weights, biases, count, owners)
        parts = [emit.call(operator.getitem, value, at) for at in range(count)]
    else:
        bias = emit.call(torch.cat, biases) if biases else None
        features = together[0].problem.out_features
        value = emit.call(ops.ks_chain, x, weights, bias, None, "none", False, count, owners)
        places = range(0, count * features, features)
        parts = [emit.call(torch.narrow, value, -1, at, features) for at in places]
    new = {}
    for at, (node, layer) in enumerate(layers.items()):
        new[node] = parts[at] = reshaped(emit, parts[at], layer)
        node.replace_all_uses_with(parts[at], delete_user_cb=_is_not_of(layer))
    for user in [] if are_trained else list(parts[0].users):
        if _puts_side_by_side(user, parts):
            new[user] = value
            user.replace_all_uses_with(value)
            graph.erase_node(user)
    views_to_reshapes(graph)
    return new


def _puts_side_by_side(node: fx.Node, parts: list[fx.Node]) -> bool:
    """Whether a node concatenates exactly the parts of a tensor, in their order."""
    if node.target not in (torch.cat, torch.concat, torch.concatenate) or not node.args:
        return False
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    last = fake_result(parts[0]).dim() - 1
    return list(node.args[0]) == parts and dim in (-1, last)  # type: ignore[arg-type]


def _is_not_of(layer: Layer) -> Callable[[fx.Node], bool]:
    return lambda user: user not in layer.inner


def _move(node: fx.Node, before: fx.Node, order: dict[fx.Node, int]) -> None:
    """Move a node and its operands before another node; in ``order``, too."""
    if order[node] < order[before]:
        return
    for one in node.all_input_nodes:
        _move(one, before, order)
    before.prepend(node)
    order[node] = -1  # others may read it, too: it stays where it is


def reshaped(emit: Emitter, value: fx.Node, layer: Layer) -> fx.Node:
    """A layer's result in the shape that its node has."""
    for node in layer.reshapes:
        if node.op == "call_function":
            value = emit.call(node.target, value, *node.args[1:], **node.kwargs)  # type: ignore
        else:
            name = "reshape" if node.target == "view" else str(node.target)
            value = emit.method(name, value, *node.args[1:])
    return value
