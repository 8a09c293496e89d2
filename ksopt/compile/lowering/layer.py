"""Layers of a rewritten graph: a chain and its epilogue."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, fx

from ksopt import ops
from ksopt.compile.capture.nodes import fake_result
from ksopt.compile.lowering.decomposed_activation import decomposed_activation
from ksopt.compile.lowering.emit import Emitter
from ksopt.compile.lowering.steps import are_alike, step_of
from ksopt.epilogue import Activation
from ksopt.kernels.operands import size_hint
from ksopt.kernels.problem import IN_FLOAT32, Epilogue, Problem, is_exact
from ksopt.patterns.chain import Chain, Pattern
from ksopt.precision import dtype_name

PRODUCTS = frozenset({torch.ops.ksopt.ks_mm, ops.ks_mm})
CHAINS = frozenset({torch.ops.ksopt.ks_chain, ops.ks_chain})
SIBLINGS = frozenset({torch.ops.ksopt.ks_chain_siblings, ops.ks_chain_siblings})
MLPS = frozenset({torch.ops.ksopt.ks_mlp, ops.ks_mlp})
_CHAIN_ARGUMENTS = (
    *("x", "weights", "bias", "residual", "activation", "batch_last", "siblings", "owners"),
    "in_float32",
)


@dataclass(frozen=True)
class Layer:
    """A node's value as a layer's result, perhaps in another shape.

    Attributes:
        x: its input.
        weights: of its chain, left to right.
        owners: the parameters and buffers that the weights are views of.
        bias, residual: None for none.
        activation: see `ksopt.epilogue`.
        in_float32: whether its result is cast to float32; then x is of a 16-bit type.
        reshapes: the nodes that change the result's shape, in order.
        inner: all nodes that compute it, this one included.
    """

    x: fx.Node
    weights: tuple[fx.Node, ...]
    owners: tuple[fx.Node, ...]
    bias: fx.Node | None = None
    activation: Activation = "none"
    residual: fx.Node | None = None
    reshapes: tuple[fx.Node, ...] = ()
    inner: tuple[fx.Node, ...] = ()
    in_float32: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that it is computed in, to which weights, or all operands, may be cast."""
        dtype: torch.dtype = fake_result(self.x if self.in_float32 else self.inner[-1]).dtype
        return dtype

    @property
    def is_cast_by_autocast(self) -> bool:
        """Whether autocast is what its dtype comes from."""
        return bool(fake_result(self.x).dtype != self.dtype)

    @property
    def problem(self) -> Problem:
        """The problem that the layer is."""
        dtype = dtype_name(self.dtype)
        patterns = (Pattern(*map(int, fake_result(one).shape)) for one in self.weights)
        has_bias, has_residual = self.bias is not None, self.residual is not None
        after = Epilogue(has_bias, self.activation, has_residual, self.in_float32)
        return Problem(Chain(tuple(patterns)), dtype, False, is_exact(dtype), after)

    @property
    def rows(self) -> int:
        """Rows of x, of the current batch where that is dynamic."""
        total = 1
        for size in fake_result(self.x).shape[:-1]:
            total *= size_hint(size) or 1
        return total

    def renewed(self, new: Mapping[fx.Node, fx.Node]) -> Layer:
        """The layer with some of its inputs replaced.

        Args:
            new: the replacement of each node.
        """

        def now(node: fx.Node | None) -> fx.Node | None:
            return None if node is None else new.get(node, node)

        x, bias, residual = new.get(self.x, self.x), now(self.bias), now(self.residual)
        return replace(self, x=x, bias=bias, residual=residual)


def product(node: fx.Node, layers: Mapping[fx.Node, Layer]) -> Layer | None:
    """The layer of a product: joined to the one it reads if it is its only reader."""
    if node.op != "call_function" or not isinstance(fake_result(node), Tensor):
        return None
    if node.target in CHAINS:
        return _native(node)
    if node.target not in PRODUCTS or node.kwargs:
        return None
    arguments: tuple[Any, ...] = (*node.args, *(False, None)[len(node.args) - 2 :])
    x, weight, last, owner = arguments
    own = weight if owner is None else owner
    if last or not _are_nodes(x, weight, own) or not are_alike(x, node):
        return None
    if owner is None and not are_alike(weight, node):
        return None
    before = layers.get(x)
    if before is not None and len(x.users) == 1 and not before.reshapes and _is_bare(before):
        weights, owners = (weight, *before.weights), (own, *before.owners)
        return Layer(before.x, weights, owners, inner=(*before.inner, node))
    return Layer(x, (weight,), (own,), inner=(node,))


def _native(node: fx.Node) -> Layer | None:
    """The layer of a call of ``ks_chain`` by the author."""
    arguments = arguments_of_chain(node)
    weights: tuple[Any, ...] = tuple(arguments["weights"])
    named = [arguments.get(name) for name in ("bias", "residual")]
    nodes = [arguments["x"], *weights, *(one for one in named if one is not None)]
    if arguments.get("batch_last") or arguments.get("siblings", 1) != 1:
        return None
    if arguments.get("owners") is not None or not _are_nodes(*nodes):
        return None
    if not all(map(_is_of_floats, nodes)):  # of one dtype, or cast by autocast
        return None
    casts = bool(arguments.get("in_float32")) and fake_result(node).dtype == torch.float32
    if casts and fake_result(arguments["x"]).dtype.itemsize != 2:
        return None  # computed in float32, or cast by autocast
    return Layer(
        *(arguments["x"], weights, weights, named[0], arguments.get("activation", "none")),
        *(named[1], (), (node,), casts),
    )


def has_epilogue(node: fx.Node) -> bool:
    """Whether a node is an MLP, or a call of ``ks_chain`` that adds to its product or activates."""
    if node.target in MLPS:
        return True
    if node.target not in CHAINS:
        return False
    arguments = arguments_of_chain(node)
    summands = [arguments.get(name) for name in ("bias", "residual")]
    return summands != [None, None] or arguments.get("activation", "none") != "none"


def arguments_of_chain(node: fx.Node) -> dict[str, Any]:
    """Arguments of a call of ``ks_chain``, by name, without defaults."""
    return dict(zip(_CHAIN_ARGUMENTS, node.args, strict=False)) | node.kwargs


def with_next(node: fx.Node, layers: Mapping[fx.Node, Layer]) -> Layer | None:
    """A layer extended by the operation of its only reader."""
    for value in node.all_input_nodes:
        layer = layers.get(value)
        if layer is None or len(value.users) != 1:
            continue
        problem = layer.problem
        step = step_of(node, value, problem.epilogue.names, problem.chain.out_features)
        if step is None:
            continue
        inner = (*layer.inner, node)
        if not step.name:
            return replace(layer, reshapes=(*layer.reshapes, node), inner=inner)
        if step.name == "bias":
            return replace(layer, bias=step.summand, inner=inner)
        if step.name == "residual":
            return replace(layer, residual=step.summand, inner=inner)
        if step.name == IN_FLOAT32:
            if layer.is_cast_by_autocast:
                continue
            return replace(layer, in_float32=True, inner=inner)
        return replace(layer, activation=cast("Activation", step.name), inner=inner)
    return None


def with_decomposed(value: fx.Node, layer: Layer) -> Iterator[tuple[fx.Node, Layer]]:
    """A layer extended by an activation that elementwise operations compute."""
    if layer.activation != "none" or layer.residual is not None or layer.in_float32:
        return
    decomposed = decomposed_activation(value)
    if decomposed is not None:
        inner = (*layer.inner, *decomposed.nodes)
        yield decomposed.nodes[-1], replace(layer, activation=decomposed.activation, inner=inner)


def _is_bare(layer: Layer) -> bool:
    is_plain = layer.activation == "none" and not layer.in_float32
    return layer.bias is None and layer.residual is None and is_plain


def vector(emit: Emitter, bias: fx.Node) -> fx.Node:
    """A bias with one dim."""
    return bias if fake_result(bias).dim() == 1 else emit.call(torch.reshape, bias, [-1])


def sizes_behind(emit: Emitter, x: fx.Node, features: int) -> list[Any]:
    """Sizes of a layer's result as arguments: numbers, and nodes where they are symbolic.

    Args:
        emit: inserts nodes.
        x: the layer's input.
        features: of its result.
    """
    sizes = fake_result(x).shape[:-1]
    rows = [
        size if isinstance(size, int) else emit.call(torch.Tensor.size, x, dim)
        for dim, size in enumerate(sizes)
    ]
    return [*rows, features]


def is_one_call(layer: Layer) -> bool:
    return len(layer.inner) == 1 and layer.inner[0].target in CHAINS


def _is_of_floats(node: fx.Node) -> bool:
    value = fake_result(node)
    return isinstance(value, Tensor) and value.is_floating_point()


def _are_nodes(*values: Any) -> bool:
    return all(isinstance(value, fx.Node) for value in values)
