"""MLPs: two layers in one launch, of which only the second reads the first's result.

The hidden features are then never stored in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from ksopt import ops
from ksopt.compile.capture.nodes import fake_result
from ksopt.compile.capture.symbolic import same
from ksopt.compile.lowering import siblings
from ksopt.compile.lowering.emit import Emitter
from ksopt.compile.lowering.layer import Layer, sizes_behind, vector
from ksopt.kernels.problem import Problem, SecondLayer


@dataclass(frozen=True)
class Mlp:
    """Two layers that form an MLP.

    Attributes:
        first: the layer whose result only the second layer reads.
        second: the layer behind it.
        hidden: the node that holds the hidden features.
    """

    first: Layer
    second: Layer
    hidden: fx.Node

    @property
    def problem(self) -> Problem:
        """The problem that both layers form."""
        one, two = self.first.problem, self.second.problem
        behind = SecondLayer(two.chain, two.epilogue)
        return Problem(one.chain, one.dtype, False, one.exact, one.epilogue, second=behind)


def pairs(
    layers: Mapping[fx.Node, Layer], is_whole: Callable[..., bool]
) -> Iterator[tuple[fx.Node, Mlp]]:
    """Pairs of layers, with the second's node, that one launch computes faster than two.

    Args:
        layers: the layer of each node, as large as it may become.
        is_whole: judges the problem of both; called with it and the layers.
    """
    taken: set[fx.Node] = set()
    for node, second in layers.items():
        hidden = second.x
        first = layers.get(hidden)
        if first is None or hidden in taken or node in taken:
            continue
        mlp = Mlp(first, second, hidden)
        if not _is_read_by_second_alone(mlp) or not _has_rows_of(first, hidden):
            continue
        if first.residual is not None or _sizes(mlp) is None:
            continue
        if first.in_float32 or second.in_float32:
            continue
        if is_whole(mlp.problem, first, second):
            taken |= {node, hidden}
            yield node, mlp


def _is_read_by_second_alone(mlp: Mlp) -> bool:
    """Whether only the second layer's product reads the hidden features."""
    second, hidden = mlp.second, mlp.hidden
    others = (second.bias, second.residual, *second.weights, *second.owners)
    readers = list(hidden.users)
    return len(readers) == 1 and readers[0] in second.inner and hidden not in others


def _has_rows_of(layer: Layer, hidden: fx.Node) -> bool:
    """Whether a layer's result is read with its features last; other dims may be reshaped."""
    return same(fake_result(hidden).shape[-1], layer.problem.out_features)


def _sizes(mlp: Mlp) -> list[int] | None:
    """Sizes of the second layer's result, -1 for a symbolic one; None if they are ambiguous.

    Empty if the first layer's result is not reshaped.
    """
    if not mlp.first.reshapes:
        return []
    sizes = [size if isinstance(size, int) else -1 for size in fake_result(mlp.hidden).shape[:-1]]
    if sizes.count(-1) > 1 or (-1 in sizes and 0 in sizes):
        return None
    return [*sizes, mlp.second.problem.out_features]


def replace(node: fx.Node, mlp: Mlp, new: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """Replace two layers by one operator, at the second one's result.

    Args:
        node: the second layer's.
        mlp: both layers.
        new: replacements of nodes that may be read.

    Returns:
        The replacement of the node.
    """
    emit = Emitter(node, node, [], {})
    first, second = mlp.first.renewed(new), mlp.second.renewed(new)
    residual = second.residual
    if residual is not None and (first.reshapes or second.reshapes):
        shape = sizes_behind(emit, first.x, second.problem.out_features)
        residual = emit.call(torch.reshape, residual, shape)
    biases = [None if one is None else vector(emit, one) for one in (first.bias, second.bias)]
    value = emit.call(
        ops.ks_mlp,
        *(first.x, list(first.weights), list(second.weights), *biases, residual),
        *(first.activation, second.activation, [*first.owners, *second.owners]),
    )
    sizes = _sizes(mlp)
    if sizes:
        value = emit.call(torch.reshape, value, sizes)
    value = siblings.reshaped(emit, value, second)
    inner = {*first.inner, *second.inner}
    node.replace_all_uses_with(value, delete_user_cb=lambda user: user not in inner)
    return value
