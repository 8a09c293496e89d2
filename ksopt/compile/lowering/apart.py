"""Calls of ``ks_chain`` that are faster as a launch per factor, with Inductor's kernels behind.

In a graph such a call becomes the operator of the plan that eager calls race for. There PyTorch's
operations follow the last launch one by one; Inductor computes them in one kernel, or in that of a
reader. So where a call was judged slower as a whole, but its plan is one operator, its products are
put into the graph in its place; or an operator for products and bias, where that is the faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import fx
from torch.nn import functional

from ksopt import ops
from ksopt.compile.capture.nodes import fake_result
from ksopt.compile.lowering.emit import Emitter
from ksopt.compile.lowering.layer import Layer
from ksopt.kernels import planner

_ACTIVATIONS: Mapping[str, tuple[Callable[..., object], Mapping[str, str]]] = MappingProxyType(
    {
        "relu": (functional.relu, {}),
        "gelu": (functional.gelu, {}),
        "gelu_tanh": (functional.gelu, {"approximate": "tanh"}),
        "silu": (functional.silu, {}),
    }
)


def is_one_operator(layer: Layer, repacked: bool) -> bool:
    """Whether a call's plan would be one operator of a graph: see `layer_plans.is_whole`.

    Args:
        layer: one call of ``ks_chain`` on operands of one dtype.
        repacked: whether its weights are prepared at each call.
    """
    plan = planner.plan_for(layer.problem, fake_result(layer.x), repacked)
    return plan is not None and plan.is_one_operator


def replace(node: fx.Node, layer: Layer, adds_bias: bool) -> None:
    """Replace a call of ``ks_chain`` by its products, and PyTorch's operations behind them.

    Args:
        node: the call.
        layer: what it computes.
        adds_bias: whether one operator computes the products and adds the bias.
    """
    emit = Emitter(node, node, [], {})
    value = layer.x
    if adds_bias:
        weights, owners = list(layer.weights), list(layer.owners)
        around = (layer.bias, None, "none", False, 1, owners)
        value = emit.call(ops.ks_chain, value, weights, *around)
    else:
        for weight, owner in reversed(list(zip(layer.weights, layer.owners, strict=True))):
            value = emit.call(ops.ks_mm, value, weight, False, owner)
    if layer.bias is not None and not adds_bias:
        value = emit.call(torch.add, value, layer.bias)
    if layer.activation != "none":
        function, how = _ACTIVATIONS[layer.activation]
        value = emit.call(function, value, **how)
    if layer.residual is not None:
        value = emit.call(torch.add, value, layer.residual)
    if layer.in_float32:
        value = emit.method("float", value)
    node.replace_all_uses_with(value)
    node.graph.erase_node(node)
