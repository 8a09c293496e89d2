"""Activations that the backward pass computes again, so that trained chains save less memory.

A trained chain saves the values between its factors, which a dense layer does not have. Of an
activation between two layers AOTAutograd saves both the input, for its own gradient, and the
result, for that of the weights behind it. The result is as wide as a layer, and computing it again
takes one pass over values that the backward pass reads anyway; to compute the values between the
factors again takes a product for each layer. So where the chains of a graph save more than dense
layers would, the activations that they read are not saved.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy

from ksopt import ops
from ksopt.compile.capture.nodes import fake_result
from ksopt.compile.lowering.emit import Emitter
from ksopt.compile.lowering.layer import (
    CHAINS,
    PRODUCTS,
    RESHAPES,
    SIBLINGS,
    activation_of_node,
    are_alike,
    arguments_of_chain,
)
from ksopt.kernels.operands import size_hint

_PRODUCTS = PRODUCTS | {torch.ops.ksopt.ks_mm_once, ops.ks_mm_once}
_MULTIPLICATIONS = {operator.mul, torch.mul, "mul"}
_READING_INPUT = ("gelu", "gelu_tanh", "silu")
"""The activations whose gradient reads their input; that of a ReLU reads its result."""


@dataclass(frozen=True)
class TrainedChain:
    """A chain whose weights are trained, of one node or of a node for each factor.

    Attributes:
        x: its input.
        weights: of its factors, left to right, sibling after sibling.
        siblings: how many chains they are of.
    """

    x: fx.Node
    weights: tuple[fx.Node, ...]
    siblings: int = 1

    @property
    def bytes_more_than_dense(self) -> int:
        """Bytes of a step's memory beyond those of a dense layer; negative if it needs fewer.

        A chain also saves the values between its factors. It has fewer weights, and gradients of
        weights, than a dense layer.
        """
        x, weights = fake_result(self.x), [fake_result(one) for one in self.weights]
        shapes = [[size_hint(size) or 1 for size in weight.shape] for weight in weights]
        outputs = [a * b * d for a, b, _, d in shapes]
        inputs = [a * c * d for a, _, c, d in shapes]
        length = len(shapes) // self.siblings
        rows = 1
        for size in x.shape:
            rows *= size_hint(size) or 1
        rows //= inputs[-1]
        between = sum(rows * size for at, size in enumerate(outputs) if at % length != 0)
        dense = self.siblings * outputs[0] * inputs[-1]
        own = sum(a * b * c * d for a, b, c, d in shapes)
        return between * x.element_size() - 2 * (dense - own) * weights[0].element_size()


def recompute_activations(graph: fx.Graph) -> int:
    """Mark the activations that chains read, if the chains save more than dense layers.

    Args:
        graph: a rewritten graph that records gradients.

    Returns:
        How many activations the backward pass computes again.
    """
    chains = list(trained_chains(graph))
    if sum(chain.bytes_more_than_dense for chain in chains) <= 0:
        return 0
    marked = 0
    for x in dict.fromkeys(chain.x for chain in chains):
        nodes = _activation_before(_apart(x))
        for node in nodes:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        marked += bool(nodes)
    return marked


def trained_chains(graph: fx.Graph) -> Iterator[TrainedChain]:
    """The chains of a rewritten graph whose weights are trained."""
    inner = set[fx.Node]()  # products that are read by the next factor
    for node in reversed(graph.nodes):
        if node.op != "call_function" or node in inner:
            continue
        if node.target in CHAINS:
            arguments = arguments_of_chain(node)
            chain = TrainedChain(
                arguments["x"], tuple(arguments["weights"]), arguments.get("siblings", 1)
            )
        elif node.target in SIBLINGS:
            x, weights, _, siblings, *_ = node.args
            chain = TrainedChain(x, tuple(weights), siblings)
        elif node.target in _PRODUCTS:
            x, weights = node, list[fx.Node]()
            while x.target in _PRODUCTS:
                inner.add(x)
                weights.append(x.args[1])
                x = _behind_reshapes(x.args[0])
            chain = TrainedChain(x, tuple(weights))
        else:
            continue
        if all(fake_result(weight).requires_grad for weight in chain.weights):
            yield chain


def _behind_reshapes(node: fx.Node) -> fx.Node:
    while node.target in RESHAPES and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _activation_before(x: fx.Node) -> list[fx.Node]:
    """The nodes of an activation, or a gate, whose result is x; none if x is no such result."""
    x = _behind_reshapes(x)
    if activation_of_node(x) in _READING_INPUT:
        return [x]
    if x.target not in _MULTIPLICATIONS or len(x.args) != 2 or x.kwargs:
        return []
    factors = [_behind_reshapes(one) for one in x.args if isinstance(one, fx.Node)]
    activations = [one for one in factors if activation_of_node(one) in _READING_INPUT]
    return [x, *activations] if activations and len(factors) == 2 else []


def _apart(x: fx.Node) -> fx.Node:
    """x; where it is the result of a chain with its activation, a node of the activation alone."""
    node = _behind_reshapes(x)
    if node.target not in CHAINS:
        return x
    arguments = arguments_of_chain(node)
    activation, residual = arguments.get("activation", "none"), arguments.get("residual")
    operands = [arguments["x"], *arguments["weights"], arguments.get("bias")]
    is_plain = are_alike(node, *(one for one in operands if one is not None))
    if activation not in _READING_INPUT or residual is not None or not is_plain:
        return x
    emit = Emitter(node, node, [], {})
    product = emit.call(
        *(ops.ks_chain, arguments["x"], arguments["weights"], arguments.get("bias"), None, "none"),
        *(arguments.get("batch_last", False), arguments.get("siblings", 1)),
        arguments.get("owners"),
    )
    if activation == "silu":
        value = emit.call(F.silu, product)
    else:
        value = emit.call(
            F.gelu, product, approximate="tanh" if activation == "gelu_tanh" else "none"
        )
    node.replace_all_uses_with(value)
    node.graph.erase_node(node)
    return value
