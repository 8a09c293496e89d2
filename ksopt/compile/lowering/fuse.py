"""Fuse what surrounds a product into its launch: bias, activation, residual, cast, siblings, MLP.

`lowering.rewrite` emits an operator per factor, and Inductor fuses the rest into one kernel behind
the last. If one launch computes a whole layer faster, the nodes become one ``ks_chain``; if one
launch computes two layers faster than one each, they become one ``ks_mlp``. A ``ks_chain`` of the
author's that is slower as a whole becomes an operator per factor (apart.py).

Only single readers are followed: a node that has other readers stays. So does an activation that
elementwise arithmetic reads, as in a gate, where one kernel of Inductor's for both is faster than a
launch with the activation, and a bias or residual behind several launches where the kernel of a
norm that reads the sum adds it faster. A graph that must write in place is not changed
(`in_place_epilogues`). Where gradients are recorded an operator takes a chain of two trained
factors and its bias, siblings of such, or two around an activation, whose input is saved. It does
so, too, where one launch computes several of their gradients faster (`join_gradients`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from ksopt import ops
from ksopt.compile.capture.in_place import writes_in_place
from ksopt.compile.capture.nodes import fake_result
from ksopt.compile.lowering import apart, gates, mlps, siblings
from ksopt.compile.lowering.emit import Emitter
from ksopt.compile.lowering.in_place_epilogues import remove_in_place
from ksopt.compile.lowering.layer import (
    CHAINS,
    PRODUCTS,
    Layer,
    is_one_call,
    product,
    sizes_behind,
    vector,
    with_decomposed,
    with_next,
)
from ksopt.compile.lowering.operations import ARITHMETIC, IN_READERS_KERNEL
from ksopt.compile.lowering.whole_layer import Weights
from ksopt.kernels.problem import EMPTY, Epilogue, Problem
from ksopt.ops.trained_chain import have_joint_gradients

_INPUTS = ("placeholder", "get_attr")
_SWITCHES = (torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast)

IsWhole = Callable[[Problem, int, torch.device, Weights, Epilogue | None], bool]
"""(problem, rows, device, kind of weights, the epilogue without what a reader can compute) ->
whether one launch computes the problem faster than several."""


@dataclass(frozen=True)
class Fused:
    """A layer that is one operator, which one launch computes.

    Attributes:
        problem: the part of this layer in the operator.
        launch: all that the operator computes.
        weights: the kind of weights.
        products: the nodes that computed its products before.
        beside: the other layer that the operator computes, in words; empty for none.
        by_author: whether the author called the operator.
    """

    problem: Problem
    launch: Problem
    weights: Weights
    products: tuple[fx.Node, ...]
    beside: str = ""
    by_author: bool = False


def fuse(gm: fx.GraphModule, is_whole: IsWhole) -> list[Fused]:
    """Replace layers that one launch computes, siblings and MLPs by one operator each.

    Args:
        gm: a rewritten graph.
        is_whole: judges each layer.

    Returns:
        The layers that one launch computes.
    """
    graph = gm.graph
    if not any(node.target in PRODUCTS | CHAINS for node in graph.nodes):
        return []
    if not remove_in_place(gm):
        return []
    trains = records_gradients(graph)
    layers = _layers(graph, trains)
    judged = functools.cache(is_whole)  # the layers of a model repeat
    inputs = {id(fake_result(node)) for node in graph.nodes if node.op in _INPUTS}

    def weights_of(*together: Layer) -> Weights:
        owners = [owner for layer in together for owner in layer.owners]
        if trains:
            return "trained"
        return "stored" if all(_is_of_input(owner, inputs) for owner in owners) else "computed"

    def is_faster(
        problem: Problem, *together: Layer, beside_reader: Epilogue | None = None
    ) -> bool:
        first = together[0]
        device = fake_result(first.x).device
        return judged(problem, first.rows, device, weights_of(*together), beside_reader)

    def fused_of(
        problem: Problem, launch: Problem, layer: Layer, *others: Layer, beside: str = ""
    ) -> Fused:
        products = tuple(node for node in layer.inner if node.target in PRODUCTS | CHAINS)
        weights, by_author = weights_of(layer, *others), is_one_call(layer) and not others
        return Fused(problem, launch, weights, products, beside, by_author)

    gated = {} if trains else dict(gates.pairs(graph, layers, is_faster))
    inside = {inner for one in gated.values() for inner in one.inner}
    whole = dict(_largest(layers, is_faster, inside))
    fused_nodes = {inner for layer in whole.values() for inner in layer.inner} | inside
    fused = []
    # A layer may read another one's result, which an operator has replaced by then.
    new: dict[fx.Node, fx.Node] = {}
    for node, both in gated.items():
        for layer, other in ((both.first, both.second), (both.second, both.first)):
            beside = f"the layer it is multiplied with, {other.problem.chain}"
            fused.append(fused_of(both.problem, both.problem, layer, other, beside=beside))
        new[node] = gates.replace(node, both, new)
        fused_nodes.add(node)

    def are_together(problem: Problem, *layers: Layer) -> bool:
        if not trains:
            return is_faster(problem, *layers)
        is_one = is_faster(problem, *layers) or _have_joint_gradients(*layers)
        return is_one and not _switches_gradients(graph)

    for group in siblings.groups(graph, whole, are_together):
        several = [whole[node] for node in group]
        problem = siblings.problem_of(several)
        if is_faster(problem, *several):
            fused += [fused_of(problem, problem, one, *several) for one in several]
        else:  # than a launch each, but not their gradients
            fused += [fused_of(one.problem, one.problem, one) for one in several]
        layers_of_group = {node: whole.pop(node).renewed(new) for node in group}
        new |= siblings.replace(graph, layers_of_group, trains)
    # One launch may compute two layers though neither alone is faster as one launch, such as two
    # layers of one factor each.
    every = _with_activated(graph, whole) if trains else _with_others(whole, layers, fused_nodes)

    def are_mlp(problem: Problem, first: Layer, second: Layer) -> bool:
        if not trains:
            return is_faster(problem, first, second)
        return first.activation != "none" and is_faster(first.problem, first)

    for node, mlp in list(mlps.pairs(every, are_mlp)):
        one, two = mlp.first, mlp.second
        fused_nodes |= {*one.inner, *two.inner}
        for layer, other, where in ((one, two, "behind"), (two, one, "ahead of")):
            beside = f"the layer {where} it, {other.problem.chain}"
            launch = layer.problem if trains else mlp.problem
            fused.append(fused_of(layer.problem, launch, layer, other, beside=beside))
        new[node] = mlps.replace(node, mlp, new)
        for either in (node, mlp.hidden, *one.inner):
            whole.pop(either, None)
    for node, layer in whole.items():
        fused.append(fused_of(layer.problem, layer.problem, layer))
        if not is_one_call(layer):
            new[node] = _replace(node, layer.renewed(new))
    _erase_unread(graph, fused_nodes)
    if not trains:
        at_work = {product for one in fused for product in one.products}
        for node, call in _slower_calls(graph, at_work, lambda one: weights_of(one) != "stored"):
            bare = replace(call, activation="none", residual=None, in_float32=False)
            is_one = bare != call and is_faster(bare.problem, bare)
            if is_one:
                fused.append(fused_of(bare.problem, bare.problem, call))
            apart.replace(node, call, is_one)
    return fused


def _slower_calls(
    graph: fx.Graph, fused: Container[fx.Node], is_repacked: Callable[[Layer], bool]
) -> Iterator[tuple[fx.Node, Layer]]:
    """Calls of ``ks_chain`` that were judged slower as a whole, but would be one operator."""
    judged: dict[tuple[Problem, int, bool], bool] = {}  # the layers of a model repeat
    for node in list(graph.nodes):
        call = product(node, {}) if node.target in CHAINS and node not in fused else None
        if call is None or call.is_cast_by_autocast or len({*_dtypes(call)}) > 1:
            continue
        key = (call.problem, call.rows, is_repacked(call))
        if key not in judged:
            judged[key] = apart.is_one_operator(call, key[-1])
        if judged[key]:
            yield node, call


def _dtypes(layer: Layer) -> Iterator[torch.dtype]:
    summands = [one for one in (layer.bias, layer.residual) if one is not None]
    for node in (layer.x, *layer.weights, *summands):
        yield fake_result(node).dtype


def join_gradients(gm: fx.GraphModule) -> int:
    """Replace trained chains by one operator where one launch computes several gradients.

    It takes one chain or siblings. Its forward pass is a launch per factor: those that one launch
    computes are left, as `fuse` replaces them.

    Args:
        gm: a graph after `fuse`.

    Returns:
        The number of chains replaced.
    """
    graph = gm.graph
    if not records_gradients(graph) or writes_in_place(graph):
        return 0
    layers = _layers(graph, trains=True)
    joined = set[fx.Node]()
    count = 0
    new: dict[fx.Node, fx.Node] = {}
    largest = _largest(layers, lambda *_, **__: True, joined)
    groups = siblings.groups(
        graph, dict(largest), lambda _, *layers: _have_joint_gradients(*layers)
    )
    for group in [] if _switches_gradients(graph) else list(groups):
        several = {node: layers[node].renewed(new) for node in group}
        joined.update(inner for layer in several.values() for inner in layer.inner)
        new |= siblings.replace(graph, several, are_trained=True)
        count += len(group)
    for node, layer in reversed(list(layers.items())):  # the largest of those that overlap first
        if node not in joined and not is_one_call(layer) and _have_joint_gradients(layer):
            joined.update(layer.inner)
            _replace(node, layer.renewed(new))
            count += 1
    _erase_unread(graph, joined)
    return count


def _layers(graph: fx.Graph, trains: bool) -> dict[fx.Node, Layer]:
    """The layers of a graph by their last nodes; of a graph of training, those of trained ones."""
    layers: dict[fx.Node, Layer] = {}
    is_switched = _switches_autocast(graph)
    for node in graph.nodes:
        layer = product(node, layers) or with_next(node, layers) or layers.get(node)
        if layer is None or (trains and not _is_trained(layer)):
            continue
        if is_switched and layer.is_cast_by_autocast:
            continue  # the place of its operator would determine its dtype
        layers[node] = layer
        if not trains:
            layers |= dict(with_decomposed(node, layer))  # a later node's
    return layers


def _with_activated(graph: fx.Graph, whole: Mapping[fx.Node, Layer]) -> dict[fx.Node, Layer]:
    """Trained layers, and those with the activation that alone reads them, or is in their call."""
    several = dict[fx.Node, Layer]()
    for node in graph.nodes if not _switches_autocast(graph) else ():
        call = product(node, {}) if node.target in CHAINS else None
        if call is not None and _is_trained(replace(call, activation="none")):
            several[node] = call
    for node, layer in whole.items():
        several[node] = layer
        at: fx.Node | None = node
        while at is not None and layer.activation == "none":
            decomposed = next(with_decomposed(at, layer), None)
            (reader,) = at.users if len(at.users) == 1 else (None,)
            extended = None if reader is None else with_next(reader, {at: layer})
            if decomposed is not None:
                at, layer = decomposed
            elif extended is not None and extended.residual is None:
                at, layer = reader, extended
            else:
                at = None
        if at is not None:
            several[at] = layer
    return several


def _have_joint_gradients(*layers: Layer) -> bool:
    """Whether a launch computes several gradients of a layer, or that of x of siblings, faster."""
    first = layers[0]
    if len(first.weights) != 2:
        return False
    nodes = [first.x, *(one for layer in layers for one in layer.weights)]
    x, *weights = (fake_result(node).to(first.dtype) for node in nodes)
    biases = [fake_result(layer.bias) for layer in layers if layer.bias is not None]
    return have_joint_gradients(x, weights, biases)


def _switches_gradients(graph: fx.Graph) -> bool:
    """Whether gradients are recorded in parts of a graph only: from these nothing is moved."""
    return any(node.target is torch._C._set_grad_enabled for node in graph.nodes)


def _switches_autocast(graph: fx.Graph) -> bool:
    return any(node.target in _SWITCHES for node in graph.nodes)


def _erase_unread(graph: fx.Graph, nodes: Container[fx.Node]) -> None:
    for node in reversed(list(graph.nodes)):
        if node in nodes and not node.users:
            graph.erase_node(node)


def _largest(
    layers: Mapping[fx.Node, Layer], is_whole: Callable[..., bool], taken: set[fx.Node]
) -> Iterator[tuple[fx.Node, Layer]]:
    """Layers that one launch computes, of nodes not taken; of two that overlap, the larger one."""
    done = set(taken)
    for node, layer in reversed(list(layers.items())):
        if node in done or len(layer.weights) + (not layer.problem.epilogue.is_empty) < 2:
            continue
        if is_whole(layer.problem, layer, beside_reader=_beside_reader(node, layer, done)):
            done.update(layer.inner)
            yield node, layer


def _with_others(
    whole: Mapping[fx.Node, Layer], layers: Mapping[fx.Node, Layer], taken: set[fx.Node]
) -> dict[fx.Node, Layer]:
    """Layers that one launch computes, and the largest ones of all other nodes, the last first."""
    done, several = set(taken), dict(whole)
    for node, layer in reversed(list(layers.items())):
        if node not in done:
            done.update(layer.inner)
            several[node] = layer
    order = {node: at for at, node in enumerate(layers)}
    return dict(sorted(several.items(), key=lambda one: order[one[0]], reverse=True))


def _beside_reader(node: fx.Node, layer: Layer, taken: set[fx.Node]) -> Epilogue | None:
    """A layer's epilogue without what Inductor can compute in the kernel of a reader."""
    after, readers = layer.problem.epilogue, list(node.users)
    if after.activation != "none" and not after.residual:
        targets = ARITHMETIC if len(readers) == 1 else ()
    else:
        targets = IN_READERS_KERNEL
    are_kernels = [one.target in targets and one not in taken for one in readers]
    if after.residual:  # the kernel writes the sum for the others
        return replace(after, residual=False) if any(are_kernels) else None
    return EMPTY if are_kernels and all(are_kernels) and not after.is_empty else None


def _is_trained(layer: Layer) -> bool:
    """Whether training can fuse a layer: a product of trained weights, maybe with bias."""
    after = layer.problem.epilogue
    weights = [fake_result(owner) for owner in layer.owners]
    return (
        after.activation == "none"
        and not after.residual
        and not after.in_float32
        and len(weights) <= 2
        and all(weight.requires_grad for weight in weights)
    )


def _is_of_input(owner: fx.Node, inputs: Container[int]) -> bool:
    """Whether a tensor is an input of the graph, or a view of one: see ops/graph_inputs.py."""
    value = fake_result(owner)
    return id(value) in inputs or id(value._base) in inputs


def records_gradients(graph: fx.Graph) -> bool:
    """Whether a graph is of training: a gradient of one of its inputs is recorded."""
    if not torch.is_grad_enabled() and not _switches_gradients(graph):
        return False
    inputs = (fake_result(node) for node in graph.nodes if node.op in _INPUTS)
    return any(isinstance(value, Tensor) and value.requires_grad for value in inputs)


def _replace(node: fx.Node, layer: Layer) -> fx.Node:
    """Replace a layer's nodes by one operator."""
    emit = Emitter(node, node, [], {})
    bias = None if layer.bias is None else vector(emit, layer.bias)
    residual = layer.residual
    if residual is not None and layer.reshapes:
        shape = sizes_behind(emit, layer.x, layer.problem.out_features)
        residual = emit.call(torch.reshape, residual, shape)
    value = emit.call(
        *(ops.ks_chain, layer.x, list(layer.weights), bias, residual, layer.activation),
        *(False, 1, list(layer.owners)),
        *((True,) if layer.in_float32 else ()),  # a default is left out
    )
    value = siblings.reshaped(emit, value, layer)
    node.replace_all_uses_with(value, delete_user_cb=lambda user: user not in layer.inner)
    return value
