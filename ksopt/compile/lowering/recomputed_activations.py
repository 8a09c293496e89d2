"""Activations that the backward pass computes again, so that trained chains save less memory.

A trained chain saves the values between its factors, which a dense layer does not have. Of an
activation between two layers AOTAutograd saves both the input, for its own gradient, and the
result, for that of the weights behind it. The result is as wide as a layer, and computing it again
takes one pass over values that the backward pass reads anyway; to compute the values between the
factors again takes a product for each layer. A step needs the most memory when its backward pass
begins: then all that is saved exists, and no gradient of a weight. So where the results of
activations and the values between factors outweigh the weights that chains do not have, the
activations that chains read are not saved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy

from ksopt import ops
from ksopt.compile.capture.nodes import fake_result
from ksopt.compile.lowering.decomposed_activation import decomposed_activation
from ksopt.compile.lowering.emit import Emitter
from ksopt.compile.lowering.layer import (
    CHAINS,
    PRODUCTS,
    SIBLINGS,
    arguments_of_chain,
)
from ksopt.compile.lowering.operations import MULTIPLICATIONS, RESHAPES, activation_of_node
from ksopt.compile.lowering.steps import are_alike
from ksopt.kernels.operands import size_hint

_PRODUCTS = PRODUCTS | {torch.ops.ksopt.ks_mm_once, ops.ks_mm_once}
_MOST_BEFORE = 32  # nodes before an activation's result; GPT-2's GELU has 8
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
        """Bytes beyond those of a dense layer when the backward pass begins; negative if fewer.

        A chain also saves the values between its factors, and has fewer weights.
        """
        x, weights = fake_result(self.x), [fake_result(one) for one in self.weights]
        shapes = [[size_hint(size) or 1 for size in weight.shape] for weight in weights]
        outputs = [a * b * d for a, b, _, d in shapes]
        inputs = [a * c * d for a, _, c, d in shapes]
        length = len(shapes) // self.siblings
        rows = math.prod(size_hint(size) or 1 for size in x.shape) // inputs[-1]
        between = sum(rows * size for at, size in enumerate(outputs) if at % length != 0)
        dense = self.siblings * outputs[0] * inputs[-1]
        own = sum(a * b * c * d for a, b, c, d in shapes)
        return between * x.element_size() - (dense - own) * weights[0].element_size()


def recompute_activations(graph: fx.Graph) -> int:
    """Mark the activations that chains read, if they outweigh the weights that chains lack.

    Args:
        graph: a rewritten graph that records gradients.

    Returns:
        How many activations the backward pass computes again.
    """
    chains = list(trained_chains(graph))
    read = dict.fromkeys(chain.x for chain in chains)
    results = [x for x in read if _is_activated_in_chain(x) or _activation_before(x)]
    saved = sum(_bytes_of(x) for x in results)
    if saved + sum(chain.bytes_more_than_dense for chain in chains) <= 0:
        return 0
    for x in results:
        for node in _activation_before(_apart(x)):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    return len(results)


def _bytes_of(node: fx.Node) -> int:
    value = fake_result(node)
    return math.prod(size_hint(size) or 1 for size in value.shape) * int(value.element_size())


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
    if x.target not in MULTIPLICATIONS or len(x.args) != 2 or x.kwargs:
        return []
    decomposed = _decomposed_before(x)
    if decomposed:
        return decomposed
    factors = [_behind_reshapes(one) for one in x.args if isinstance(one, fx.Node)]
    activations = [one for one in factors if activation_of_node(one) in _READING_INPUT]
    return [x, *activations] if activations and len(factors) == 2 else []


def _decomposed_before(x: fx.Node) -> list[fx.Node]:
    """The nodes of an activation of several operations whose result is x; none if there is none."""
    before, left = dict[fx.Node, None](), [x]
    while left and len(before) < _MOST_BEFORE:
        inputs = [one for one in left.pop(0).all_input_nodes if one not in before]
        before.update(dict.fromkeys(inputs))
        left += inputs
    for value in before:
        if not isinstance(fake_result(value), torch.Tensor):
            continue
        one = decomposed_activation(value)
        if one is not None and one.nodes[-1] is x:
            return list(one.nodes) if one.activation in _READING_INPUT else []
    return []


def _is_activated_in_chain(x: fx.Node) -> bool:
    """Whether `_apart` takes an activation out of the chain whose result is x."""
    node = _behind_reshapes(x)
    if node.target not in CHAINS:
        return False
    arguments = arguments_of_chain(node)
    activation, residual = arguments.get("activation", "none"), arguments.get("residual")
    operands = [arguments["x"], *arguments["weights"], arguments.get("bias")]
    is_plain = are_alike(node, *(one for one in operands if one is not None))
    return activation in _READING_INPUT and residual is None and is_plain


def _apart(x: fx.Node) -> fx.Node:
    """x; where it is the result of a chain with its activation, a node of the activation alone."""
    if not _is_activated_in_chain(x):
        return x
    node = _behind_reshapes(x)
    arguments = arguments_of_chain(node)
    emit = Emitter(node, node, [], {})
    product = emit.call(
        *(ops.ks_chain, arguments["x"], arguments["weights"], arguments.get("bias"), None, "none"),
        *(arguments.get("batch_last", False), arguments.get("siblings", 1)),
        arguments.get("owners"),
    )
    if arguments["activation"] == "silu":
        value = emit.call(F.silu, product)
    else:
        approximate = "tanh" if arguments["activation"] == "gelu_tanh" else "none"
        value = emit.call(F.gelu, product, approximate=approximate)
    node.replace_all_uses_with(value)
    node.graph.erase_node(node)
    return value
