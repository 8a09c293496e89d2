"""The choices that ksopt's operators make while AOTAutograd traces a graph.

torch's caches on disk know a graph before it is traced. Which launches an operator becomes then
depends on what has been measured by that time, so these choices belong to a cache's key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import fx

from ksopt.compile.capture.nodes import fake_result
from ksopt.compile.lowering.fuse import records_gradients
from ksopt.compile.lowering.layer import MLPS, SIBLINGS, Layer, product
from ksopt.kernels import planner, weight_gradients
from ksopt.kernels.backends.base import BACKENDS
from ksopt.ops import chain_gradients, input_gradient, trained_mlp


def digest(graph: fx.Graph) -> str:
    """A digest of the choices for a rewritten graph; empty where there are none."""
    trains = records_gradients(graph)
    words = {word for node in graph.nodes for word in _choices(node, trains)}
    return hashlib.sha256("\n".join(sorted(words)).encode()).hexdigest()[:16] if words else ""


def _choices(node: fx.Node, trains: bool) -> Iterator[str]:
    if node.target in MLPS and trains:
        yield from _choices_of_mlp(node)
        return
    layer = _sibling(node) if node.target in SIBLINGS else product(node, {})
    if layer is None:
        return
    rows, x = layer.rows, fake_result(layer.x)
    if x.device.type not in BACKENDS or rows == 0:
        return
    weights: Any = node.args[1] if node.target in SIBLINGS else layer.weights
    counts = dict.fromkeys((1, len(weights) // len(layer.weights)))
    for siblings in counts:
        problem = replace(layer.problem, siblings=siblings)
        whole = planner.whole_choice(problem, rows, x.device, repacked=trains)
        if whole is not None:
            yield f"{problem} {rows} by {whole.way}"
    if not trains:
        return
    for p in layer.problem.chain:
        if weight_gradients.is_by_kernel(p, layer.dtype, rows, x.device):
            yield f"{p} {layer.dtype} {rows}: gradient by a kernel"
    if len(layer.weights) == 2:
        x, left, right, *others = (one.to(layer.dtype) for one in (x, *map(fake_result, weights)))
        weights = [left, right, *others]
        with_bias = layer.bias is not None
        together = [chain_gradients.is_faster(x, left, right, with_bias, one) for one in counts]
        one_launch = [input_gradient.is_one_launch(x, weights[: 2 * one]) for one in counts]
        if any(together) or any(one_launch):
            yield f"{layer.problem} {rows}: gradients {together} {one_launch}"


def _choices_of_mlp(node: fx.Node) -> Iterator[str]:
    """Whether trained layers around an activation are a launch each, in both passes."""
    names = ("x", "weights", "last_weights", "hidden_bias", "bias", "residual", "hidden_activation")
    arguments: dict[str, Any] = dict(zip(names, node.args, strict=False)) | node.kwargs
    x, weights, last_weights = (arguments[name] for name in names[:3])
    hidden_bias, bias = (arguments.get(name) for name in names[3:5])
    activation = arguments.get("hidden_activation", "none")
    if activation == "none" or not len(weights) == len(last_weights) == 2:
        return
    dtype = fake_result(node).dtype
    own, others = ([fake_result(one).to(dtype) for one in some] for some in (weights, last_weights))
    x, biases = fake_result(x).to(dtype), [one and fake_result(one) for one in (hidden_bias, bias)]
    if x.device.type not in BACKENDS or x.numel() == 0:
        return
    a, b, _, d = own[0].shape
    hidden = x.new_empty(*x.shape[:-1], a * b * d)
    forward = trained_mlp.is_faster(x, own, hidden, others, biases, activation)
    backward = input_gradient.is_one_launch(hidden, [*others, own[0]], activation)
    shapes = [tuple(one.shape) for one in (*own, *others)]
    yield f"{shapes} {activation} {dtype} {tuple(x.shape)}: {forward} {backward}"


def _sibling(node: fx.Node) -> Layer:
    """The layer of the first one of trained siblings of chains of two factors."""
    arguments: tuple[Any, ...] = node.args
    x, weights, biases, *_ = arguments
    (result, *_), pair = node.users, tuple(weights[:2])
    return Layer(x, pair, pair, biases[0] if biases else None, inner=(result,))
