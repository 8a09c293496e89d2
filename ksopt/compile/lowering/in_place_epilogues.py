"""In-place operations that equal out-of-place ones, as ``y = layer(x); y += residual``.

Operators of layers have no in-place epilogue, and `fuse` changes no graph that writes in place. An
in-place addition, multiplication or activation equals the out-of-place one if nothing else can read
the memory that it writes: if it is the only reader of a new tensor, or of the last of several
values that each have one reader and begin with new tensors. An input of the graph, a view of one,
and a value that is read twice are written as the author wrote them.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator
from torch.nn import functional as F

from ksopt.compile.capture.in_place import may_write
from ksopt.compile.capture.interpreter import makes_new_tensor
from ksopt.compile.capture.nodes import fake_result, on_fakes
from ksopt.compile.capture.symbolic import same, same_shape
from ksopt.compile.lowering.fusion_context import is_product
from ksopt.compile.lowering.operations import (
    ADDITIONS,
    MULTIPLICATIONS,
    Call,
    activation_of_node,
)

STATE_SWITCHES = frozenset(
    {
        *("_set_grad_enabled", "_enter_autocast", "_exit_autocast", "_enter_inference_mode"),
        *("_exit_inference_mode", "_vmap_increment_nesting", "_vmap_decrement_nesting"),
    }
)
"""Names of functions that change the state in which later nodes run."""

_OUT_OF_PLACE: dict[Any, Any] = {
    operator.iadd: operator.add,
    "add_": "add",
    operator.imul: operator.mul,
    "mul_": "mul",
    torch.relu_: torch.relu,
    "relu_": "relu",
}
_WITH_INPLACE = (F.relu, F.silu)
"""Activations whose second argument is ``inplace``."""


def out_of_place(node: fx.Node) -> Call | None:
    """The out-of-place call that equals an in-place node; None if none is known to.

    Its result is a new tensor with the values, dtype, shape and strides of the node's.
    """
    call = _without_inplace(node)
    written = node.args[0] if call is not None else None
    if call is None or not isinstance(written, fx.Node) or not _is_read_only_by(written, node):
        return None
    if any(switches_state(one) for one in node.graph.nodes):
        return None
    return call if _has_layout_of(_result(call), fake_result(node)) else None


def remove_in_place(gm: fx.GraphModule) -> bool:
    """Replace all in-place operations of a graph by out-of-place ones, or none.

    Returns:
        Whether the graph writes nothing in place now.
    """
    calls = out_of_place_calls(gm.graph)
    if calls is None:
        return False
    for node, call in calls.items():
        node.target, node.args, node.kwargs = call
        node.meta["val" if "val" in node.meta else "example_value"] = _result(call)
    if calls:
        gm.recompile()
    return True


def out_of_place_calls(graph: fx.Graph) -> dict[fx.Node, Call] | None:
    """The out-of-place call of each node that writes in place; None if one must."""
    calls: dict[fx.Node, Call] = {}
    for node in graph.nodes:
        if may_write(node):
            call = out_of_place(node)
            if call is None:
                return None
            calls[node] = call
    return calls


def switches_state(node: fx.Node) -> bool:
    """Whether a node switches gradients, inference mode, autocast or a vmap."""
    return getattr(node.target, "__name__", "") in STATE_SWITCHES


def _without_inplace(node: fx.Node) -> Call | None:
    """An in-place node's call without writing; None if it is none of those known."""
    if node.target in _OUT_OF_PLACE and node.args:
        return Call(_OUT_OF_PLACE[node.target], node.args, node.kwargs)
    if node.target not in _WITH_INPLACE or not node.args:
        return None
    inplace = (*node.args[1:], *node.kwargs.values())
    return Call(node.target, node.args[:1], {}) if inplace == (True,) else None


def _is_read_only_by(value: fx.Node, reader: fx.Node) -> bool:
    """Whether a reader is the only one that may read the memory of a value.

    Fake results do not tell: nodes that lowering inserted may share them.
    """
    known = fake_result(value)
    if isinstance(known, int | float | torch.SymInt):
        return True
    if not isinstance(known, Tensor) or list(value.users) != [reader]:
        return False
    if _makes_new_tensor(value):
        return True
    if value.op not in ("call_function", "call_method"):
        return False
    if isinstance(value.target, HigherOrderOperator):
        return False
    if may_write(value):  # its result is what it writes, whoever reads its other operands
        written = value.args[0] if _without_inplace(value) is not None else None
        return isinstance(written, fx.Node) and _is_read_only_by(written, value)
    inputs = value.all_input_nodes
    return bool(inputs) and all(_is_read_only_by(one, value) for one in inputs)


def _makes_new_tensor(node: fx.Node) -> bool:
    if may_write(node) or isinstance(node.target, HigherOrderOperator):
        return False
    if is_product(node):  # an einsum of one operand may be a view
        return len(node.all_input_nodes) > 1
    is_arithmetic = node.target in ADDITIONS | MULTIPLICATIONS
    return is_arithmetic or activation_of_node(node) is not None or makes_new_tensor(node)


def _result(call: Call) -> Any:
    args = fx.node.map_arg(call.args, fake_result)
    kwargs = fx.node.map_arg(call.kwargs, fake_result)
    if isinstance(call.target, str):
        return on_fakes(getattr(torch.Tensor, call.target), args, kwargs)
    return on_fakes(call.target, args, kwargs)


def _has_layout_of(new: Any, old: Any) -> bool:
    if not all(isinstance(one, Tensor) and one.layout is torch.strided for one in (new, old)):
        return False
    is_alike = new.dtype == old.dtype and same_shape(new.shape, old.shape)
    return is_alike and all(
        same(size, 1) or same(one, other)
        for size, one, other in zip(new.shape, new.stride(), old.stride(), strict=True)
    )
