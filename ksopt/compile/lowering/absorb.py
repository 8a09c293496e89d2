"""Put what surrounds a product into the operator: chain, bias, activation, residual, siblings, MLP.

`lowering.rewrite` emits an operator a factor, and Inductor fuses the rest into one kernel behind
the last. Where one launch computes all of a layer, and faster, the nodes become one ``ks_chain``;
where one computes two layers, faster than one each, they become one ``ks_mlp``.

Followed are single readers only: a node that something else reads too stays. Nothing is done where
the graph writes in place. Where gradients are recorded an operator takes a chain of two trained
factors and its bias: the backward pass reads what activations are applied to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from ksopt import ops
from ksopt.compile.capture.in_place import writes_in_place
from ksopt.compile.capture.nodes import fake_result
from ksopt.compile.lowering import mlps, siblings
from ksopt.compile.lowering.emit import Emitter
from ksopt.compile.lowering.layer import (
    CHAINS,
    PRODUCTS,
    Layer,
    is_one_call,
    product,
    sizes_behind,
    vector,
    with_next,
    with_spelled,
)
from ksopt.kernels.problem import Problem

IsWhole = Callable[[Problem, int, torch.device, bool], bool]
"""Whether one launch computes a problem, for so many rows, faster than several; in training?"""


@dataclass(frozen=True)
class Absorbed:
    """A layer that became one operator.

    Attributes:
        problem: what that computes, of this layer.
        products: the nodes that computed its products before.
        beside: the other layer that the operator computes, in words; empty for none.
    """

    problem: Problem
    products: tuple[fx.Node, ...]
    beside: str = ""


def absorb(gm: fx.GraphModule, is_whole: IsWhole) -> list[Absorbed]:
    """Make one operator of each layer that one launch computes, of siblings, and of MLPs.

    Args:
        gm: a rewritten graph.
        is_whole: judges each layer.

    Returns:
        What became one operator.
    """
    graph = gm.graph
    if writes_in_place(graph):
        return []
    trains = _records_gradients(graph)
    layers: dict[fx.Node, Layer] = {}
    for node in graph.nodes:
        layer = product(node, layers) or with_next(node, layers) or layers.get(node)
        if layer is None or (trains and not _is_trained(layer)):
            continue
        layers[node] = layer
        layers |= dict(with_spelled(node, layer))  # a later node's

    @functools.cache  # the layers of a model repeat
    def is_faster(problem: Problem, rows: int, device: torch.device) -> bool:
        return is_whole(problem, rows, device, trains)

    whole = dict(_largest(layers, is_faster))
    made = {inner for layer in whole.values() for inner in layer.inner}
    absorbed = []
    for group in () if trains else siblings.groups(graph, whole, is_faster):
        together = siblings.problem_of(whole[node] for node in group)
        absorbed += [_absorbed(whole[node], together) for node in group]
        siblings.replace(graph, {node: whole.pop(node) for node in group})
    for node, mlp in () if trains else list(mlps.pairs(whole, is_faster)):
        one, two = mlp.first, mlp.second
        absorbed.append(_absorbed(one, one.problem, f"the layer behind it, {two.problem.chain}"))
        absorbed.append(_absorbed(two, two.problem, f"the layer ahead of it, {one.problem.chain}"))
        mlps.replace(node, mlp)
        del whole[node], whole[mlp.hidden]
    for node, layer in whole.items():
        if not is_one_call(layer):
            absorbed.append(_absorbed(layer, layer.problem))
            _replace(node, layer)
    for node in reversed(list(graph.nodes)):
        if node in made and not node.users:
            graph.erase_node(node)
    return absorbed


def _largest(
    layers: Mapping[fx.Node, Layer], is_whole: Callable[[Problem, int, torch.device], bool]
) -> Iterator[tuple[fx.Node, Layer]]:
    """Layers that one launch computes; of two with the same nodes, the larger one."""
    done: set[fx.Node] = set()
    for node, layer in reversed(list(layers.items())):
        if node in done or len(layer.weights) + (not layer.problem.epilogue.is_empty) < 2:
            continue
        if is_whole(layer.problem, layer.rows, fake_result(node).device):
            done.update(layer.inner)
            yield node, layer


def _absorbed(layer: Layer, problem: Problem, beside: str = "") -> Absorbed:
    products = (node for node in layer.inner if node.target in PRODUCTS | CHAINS)
    return Absorbed(problem, tuple(products), beside)


def _is_trained(layer: Layer) -> bool:
    """Whether a layer is trained weights' product, and at most a bias: what training absorbs."""
    after = layer.problem.epilogue
    weights = [fake_result(owner) for owner in layer.owners]
    return (
        after.activation == "none"
        and not after.residual
        and len(weights) <= 2
        and all(weight.requires_grad for weight in weights)
    )


def _records_gradients(graph: fx.Graph) -> bool:
    switched = any(node.target is torch._C._set_grad_enabled for node in graph.nodes)
    if not torch.is_grad_enabled() and not switched:
        return False
    inputs = (fake_result(node) for node in graph.nodes if node.op in ("placeholder", "get_attr"))
    return any(isinstance(value, Tensor) and value.requires_grad for value in inputs)


def _replace(node: fx.Node, layer: Layer) -> None:
    """Put one operator in the place of a layer's nodes."""
    emit = Emitter(node, node, [], {})
    bias = None if layer.bias is None else vector(emit, layer.bias)
    residual = layer.residual
    if residual is not None and layer.reshapes:
        shape = sizes_behind(emit, layer.x, layer.problem.out_features)
        residual = emit.call(torch.reshape, residual, shape)
    value = emit.call(
        *(ops.ks_chain, layer.x, list(layer.weights), bias, residual, layer.activation),
        *(False, 1, list(layer.owners)),
    )
    value = siblings.reshaped(emit, value, layer)
    node.replace_all_uses_with(value, delete_user_cb=lambda user: user not in layer.inner)
