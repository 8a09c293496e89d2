"""Gates, as in SwiGLU: two layers of the same patterns on one input, whose results are multiplied.

One launch writes act(a) * b, so neither result is stored in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from dataclasses import replace as with_changes

import torch
from torch import fx

from ksopt import ops
from ksopt.compile.capture.nodes import fake_result
from ksopt.compile.capture.symbolic import same
from ksopt.compile.lowering.emit import Emitter
from ksopt.compile.lowering.layer import Layer, vector
from ksopt.compile.lowering.operations import MULTIPLICATIONS
from ksopt.compile.lowering.steps import are_alike
from ksopt.epilogue import gate_of
from ksopt.kernels.problem import Epilogue, Problem


@dataclass(frozen=True)
class Gated:
    """Two layers, one of which gates the other.

    Attributes:
        first: the layer with the activation.
        second: the layer it is multiplied by.
    """

    first: Layer
    second: Layer

    @property
    def problem(self) -> Problem:
        """The problem that both layers form."""
        one = self.first.problem
        after = Epilogue(one.epilogue.bias, gate_of(self.first.activation))
        return with_changes(one, epilogue=after, siblings=2)

    @property
    def inner(self) -> tuple[fx.Node, ...]:
        """The nodes of both layers."""
        return (*self.first.inner, *self.second.inner)


def pairs(
    graph: fx.Graph,
    layers: Mapping[fx.Node, Layer],
    is_whole: Callable[..., bool],
) -> Iterator[tuple[fx.Node, Gated]]:
    """Pairs of layers, with their product's node, that one launch computes faster than two.

    Args:
        graph: of the layers.
        layers: the layer of each node.
        is_whole: judges the problem of both; called with it and the layers.
    """
    for node in graph.nodes:
        if node.target not in MULTIPLICATIONS or len(node.args) != 2 or node.kwargs:
            continue
        values = [one for one in node.args if isinstance(one, fx.Node) and one in layers]
        if len(set(values)) != 2 or any(len(one.users) != 1 for one in values):
            continue
        for one, other in (values, reversed(values)):
            gated = Gated(layers[one], layers[other])
            if not _is_gate(gated) or not _have_one_shape(node, one, other):
                continue
            if is_whole(gated.problem, gated.first, gated.second):
                yield node, gated
            break


def _is_gate(gated: Gated) -> bool:
    first, second = gated.first, gated.second
    if first.activation == "none" or second.activation != "none" or first.x is not second.x:
        return False
    if any(one.residual is not None or one.reshapes or one.in_float32 for one in (first, second)):
        return False
    bare = with_changes(first, activation="none")
    return bare.problem == second.problem


def _have_one_shape(*nodes: fx.Node) -> bool:
    first, *others = (fake_result(node).shape for node in nodes)
    return are_alike(*nodes) and all(
        len(first) == len(shape) and all(map(same, first, shape)) for shape in others
    )


def replace(node: fx.Node, gated: Gated, new: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """Replace two layers and their product by one operator.

    Args:
        node: the product.
        gated: the layers.
        new: replacements of nodes that may be read.

    Returns:
        The replacement of the node.
    """
    emit = Emitter(node, node, [], {})
    both = [one.renewed(new) for one in (gated.first, gated.second)]
    biases = [vector(emit, one.bias) for one in both if one.bias is not None]
    value = emit.call(
        *(ops.ks_chain, both[0].x, [weight for one in both for weight in one.weights]),
        *(emit.call(torch.cat, biases) if biases else None, None),
        *(gate_of(gated.first.activation), False, 2),
        [owner for one in both for owner in one.owners],
    )
    node.replace_all_uses_with(value)
    return value
