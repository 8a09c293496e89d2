"""Put what surrounds a product into the operator: its chain, bias, activation, residual.

`lowering.rewrite` emits an operator a factor, and Inductor fuses the rest into one kernel behind
the last. Where one launch computes all of a layer, and faster, the nodes become one ``ks_chain``.

Followed are single readers only: a node that something else reads too stays. Nothing is done where
gradients are recorded, or where the graph writes in place.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from ksopt import ops
from ksopt.compile.capture.in_place import writes_in_place
from ksopt.compile.capture.nodes import fake_result
from ksopt.compile.capture.symbolic import hint, same
from ksopt.compile.lowering.epilogue import ACTIVATIONS
from ksopt.epilogue import Activation
from ksopt.kernels.problem import Epilogue, Problem, is_exact
from ksopt.patterns.chain import Chain, Pattern

IsWhole = Callable[[Problem, int, torch.device], bool]
"""Whether one launch computes a problem, for so many rows, faster than several."""

_PRODUCTS = {torch.ops.ksopt.ks_mm, ops.ks_mm}
_CHAINS = {torch.ops.ksopt.ks_chain, ops.ks_chain}
_ADDITIONS = {operator.add, torch.add, "add"}
_RESHAPES = {
    *("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"),
    *(torch.reshape, torch.flatten, torch.unflatten, torch.squeeze, torch.unsqueeze),
}
_CHAIN_ARGUMENTS = (
    *("x", "weights", "bias", "residual", "activation", "batch_last", "siblings", "owners"),
)


@dataclass(frozen=True)
class _Layer:
    """What a node's value is: a layer's result, perhaps in another shape.

    Attributes:
        x: its input.
        weights: of its chain, left to right.
        owners: the parameters and buffers that they are views of.
        bias, residual: None for none.
        activation: see `ksopt.epilogue`.
        reshapes: the nodes that change the result's shape, in order.
        inner: the nodes that all of it is made of, this one's included.
    """

    x: fx.Node
    weights: tuple[fx.Node, ...]
    owners: tuple[fx.Node, ...]
    bias: fx.Node | None = None
    activation: Activation = "none"
    residual: fx.Node | None = None
    reshapes: tuple[fx.Node, ...] = ()
    inner: tuple[fx.Node, ...] = ()

    @property
    def problem(self) -> Problem:
        """What is computed."""
        x = fake_result(self.x)
        dtype = str(x.dtype).removeprefix("torch.")
        patterns = (Pattern(*map(int, fake_result(one).shape)) for one in self.weights)
        after = Epilogue(self.bias is not None, self.activation, self.residual is not None)
        return Problem(Chain(tuple(patterns)), dtype, False, is_exact(dtype), after)

    @property
    def rows(self) -> int:
        """Rows of x, of the batch at hand where that is dynamic."""
        total = 1
        for size in fake_result(self.x).shape[:-1]:
            total *= hint(size) or 1
        return total


@dataclass(frozen=True)
class Absorbed:
    """A layer that became one operator.

    Attributes:
        problem: what it computes.
        products: the nodes that computed its products before.
    """

    problem: Problem
    products: tuple[fx.Node, ...]


def absorb(gm: fx.GraphModule, is_whole: IsWhole) -> list[Absorbed]:
    """Make one operator of each layer that one launch computes.

    Args:
        gm: a rewritten graph.
        is_whole: judges each layer.

    Returns:
        What became one operator.
    """
    graph = gm.graph
    if writes_in_place(graph) or _records_gradients(graph):
        return []
    layers: dict[fx.Node, _Layer] = {}
    for node in graph.nodes:
        layer = _product(node, layers) or _next(node, layers)
        if layer is not None:
            layers[node] = layer
    done: set[fx.Node] = set()
    absorbed = []
    for node, layer in reversed(layers.items()):
        if node in done or len(layer.weights) + (not layer.problem.epilogue.is_empty) < 2:
            continue
        if not is_whole(layer.problem, layer.rows, fake_result(node).device):
            continue
        done.update(layer.inner)
        if not _is_one_call(layer):
            products = (one for one in layer.inner if one.target in _PRODUCTS | _CHAINS)
            absorbed.append(Absorbed(layer.problem, tuple(products)))
            _replace(graph, node, layer)
    for node in reversed(list(graph.nodes)):
        if node in done and not node.users:
            graph.erase_node(node)
    return absorbed


def _records_gradients(graph: fx.Graph) -> bool:
    switched = any(node.target is torch._C._set_grad_enabled for node in graph.nodes)
    if not torch.is_grad_enabled() and not switched:
        return False
    inputs = (fake_result(node) for node in graph.nodes if node.op in ("placeholder", "get_attr"))
    return any(isinstance(value, Tensor) and value.requires_grad for value in inputs)


def _product(node: fx.Node, layers: Mapping[fx.Node, _Layer]) -> _Layer | None:
    """A product by one factor, behind another one where that is its only reader; or a layer."""
    if node.op != "call_function" or not isinstance(fake_result(node), Tensor):
        return None
    if node.target in _CHAINS:
        return _native(node)
    if node.target not in _PRODUCTS or node.kwargs:
        return None
    x, weight, last, owner = (*node.args, *(False, None)[len(node.args) - 2 :])
    if last or not _are_nodes(x, weight) or not _are_alike(x, weight, node):
        return None
    own = weight if owner is None else owner
    before = layers.get(x)
    if before is not None and len(x.users) == 1 and not before.reshapes and _is_bare(before):
        weights, owners = (weight, *before.weights), (own, *before.owners)
        return _Layer(before.x, weights, owners, inner=(*before.inner, node))
    return _Layer(x, (weight,), (own,), inner=(node,))


def _native(node: fx.Node) -> _Layer | None:
    """A call of ``ks_chain`` by the author."""
    arguments: dict[str, Any] = dict(zip(_CHAIN_ARGUMENTS, node.args, strict=False))
    arguments |= node.kwargs
    weights = tuple(arguments["weights"])
    named = [arguments.get(name) for name in ("bias", "residual")]
    nodes = [arguments["x"], *weights, *(one for one in named if one is not None)]
    if arguments.get("batch_last") or arguments.get("siblings", 1) != 1:
        return None
    if arguments.get("owners") is not None or not _are_nodes(*nodes) or not _are_alike(*nodes):
        return None
    return _Layer(
        *(arguments["x"], weights, weights, named[0], arguments.get("activation", "none")),
        *(named[1], (), (node,)),
    )


def _next(node: fx.Node, layers: Mapping[fx.Node, _Layer]) -> _Layer | None:
    """A layer's result with what its only reader adds to it."""
    for value in node.all_input_nodes:
        layer = layers.get(value)
        if layer is None or len(value.users) != 1 or not isinstance(fake_result(node), Tensor):
            continue
        inner = (*layer.inner, node)
        if node.target in _RESHAPES and node.args and node.args[0] is value:
            return replace(layer, reshapes=(*layer.reshapes, node), inner=inner)
        if not _are_alike(node, value):
            continue
        activation = _activation(node)
        if activation is not None and node.args[0] is value:
            if layer.activation == "none" and layer.residual is None:
                return replace(layer, activation=activation, inner=inner)
        elif node.target in _ADDITIONS and len(node.args) == 2 and not node.kwargs:
            added = node.args[1] if node.args[0] is value else node.args[0]
            if isinstance(added, fx.Node) and added is not value and _are_alike(added, value):
                return _with_summand(layer, value, added, inner)
    return None


def _activation(node: fx.Node) -> Activation | None:
    name = ACTIVATIONS.get(node.target)
    others = [*node.args[1:], *node.kwargs.values()]
    if name != "gelu":
        plain = all(one is False for one in others)  # inplace=False
        return name if name in ("relu", "silu") and plain and node.args else None  # type: ignore
    approximate = node.kwargs.get("approximate", "none")
    if len(node.args) != 1 or set(node.kwargs) - {"approximate"}:
        return None
    return {"none": "gelu", "tanh": "gelu_tanh"}.get(str(approximate))  # type: ignore[return-value]


def _with_summand(
    layer: _Layer, value: fx.Node, added: fx.Node, inner: tuple[fx.Node, ...]
) -> _Layer | None:
    """The layer plus a bias, where one value for each feature is added, or plus a residual."""
    own, other = fake_result(value), fake_result(added)
    features = layer.problem.chain.out_features
    if own.dim() == other.dim() and all(map(same, own.shape, other.shape)):
        if layer.residual is None and other.is_contiguous():
            return replace(layer, residual=added, inner=inner)
        return None
    trailing = list(other.shape)
    while trailing and same(trailing[0], 1):
        trailing.pop(0)
    count = 1
    for size in trailing:
        count = count * size
    is_bias = count == features and all(map(same, trailing, own.shape[own.dim() - len(trailing) :]))
    if is_bias and other.is_contiguous() and _is_bare(layer):
        return replace(layer, bias=added, inner=inner)
    return None


def _is_bare(layer: _Layer) -> bool:
    return layer.bias is None and layer.activation == "none" and layer.residual is None


def _is_one_call(layer: _Layer) -> bool:
    return len(layer.inner) == 1 and layer.inner[0].target in _CHAINS


def _are_nodes(*values: Any) -> bool:
    return all(isinstance(value, fx.Node) for value in values)


def _are_alike(*nodes: fx.Node) -> bool:
    """Whether all hold tensors of one dtype on one device."""
    first, *others = (fake_result(node) for node in nodes)
    return isinstance(first, Tensor) and all(
        isinstance(one, Tensor) and one.dtype == first.dtype and one.device == first.device
        for one in others
    )


class _At:
    """Inserts calls before a node, with their fake results."""

    def __init__(self, before: fx.Node) -> None:
        self._before = before

    def call(self, function: Callable[..., Any], *args: Any) -> fx.Node:
        with self._before.graph.inserting_before(self._before):
            node = self._before.graph.call_function(function, args)
        return self._described(node, function, args, {})

    def again(self, node: fx.Node, source: fx.Node) -> fx.Node:
        """A call of what another node calls, on another value."""
        args = (source, *node.args[1:])
        with self._before.graph.inserting_before(self._before):
            made = self._before.graph.create_node(node.op, node.target, args, node.kwargs)
        function = node.target if node.op == "call_function" else getattr(Tensor, str(node.target))
        return self._described(made, function, args, node.kwargs)  # type: ignore[arg-type]

    def _described(
        self, node: fx.Node, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> fx.Node:
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "custom"):
            if key in self._before.meta:
                node.meta[key] = self._before.meta[key]
        key = "val" if "val" in self._before.meta else "example_value"
        values = fx.node.map_arg((args, dict(kwargs)), fake_result)
        with fake_result(self._before).fake_mode, torch.no_grad():
            node.meta[key] = function(*values[0], **values[1])
        return node


def _replace(graph: fx.Graph, node: fx.Node, layer: _Layer) -> None:
    """Put one operator in the place of a layer's nodes."""
    at = _At(node)
    bias, residual = layer.bias, layer.residual
    if bias is not None and fake_result(bias).dim() != 1:
        bias = at.call(torch.reshape, bias, [-1])
    if residual is not None and layer.reshapes:
        shape = [*fake_result(layer.x).shape[:-1], layer.problem.out_features]
        if fake_result(residual).dim() != len(shape) or layer.reshapes:
            residual = at.call(torch.reshape, residual, _sizes(at, layer.x, shape))
    value = at.call(
        *(ops.ks_chain, layer.x, list(layer.weights), bias, residual, layer.activation),
        *(False, 1, list(layer.owners)),
    )
    for reshape in layer.reshapes:
        value = at.again(reshape, value)
    node.replace_all_uses_with(value, delete_user_cb=lambda user: user not in layer.inner)


def _sizes(at: _At, x: fx.Node, shape: list[Any]) -> list[Any]:
    """Sizes as a node's arguments: numbers, and nodes where they are symbolic."""
    return [
        size if isinstance(size, int) else at.call(torch.Tensor.size, x, dim)
        for dim, size in enumerate(shape)
    ]
