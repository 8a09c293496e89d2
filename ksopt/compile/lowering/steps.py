"""The one rule for what a launch can compute behind a product: bias, activation, residual, cast.

A cast to float32 is one only where the graph returns its result: other readers are kernels of
Inductor's, which cast what they read.

`layer` reads by it the layers that are launched, and `epilogue` what is reported of a site.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ksopt.compile.capture.nodes import fake_result
from ksopt.compile.capture.symbolic import is_contiguous, same, same_shape
from ksopt.compile.lowering.operations import ADDITIONS, CASTS, Call, activation_of, reshapes
from ksopt.kernels.problem import IN_FLOAT32


class Step(NamedTuple):
    """An operation behind a product.

    Attributes:
        name: "bias", an activation, "residual", "to_float32"; empty if it only changes the shape.
        summand: the bias or the residual.
    """

    name: str
    summand: fx.Node | None = None


def step_of(
    node: fx.Node, value: fx.Node, before: Collection[str], features: int, call: Call | None = None
) -> Step | None:
    """The step that a node is of a product's result; None if a launch cannot take it.

    Args:
        node: the only reader of ``value``.
        value: the product, or the last step behind it.
        before: names of the steps between the product and ``value``.
        features: of the product.
        call: the node's, if it is to be read as another one.
    """
    if reshapes(node) and node.args[0] is value:
        return Step("")
    if _is_cast_to_float32(node, value) and not {"residual", IN_FLOAT32} & set(before):
        return Step(IN_FLOAT32) if all(one.op == "output" for one in node.users) else None
    if IN_FLOAT32 in before:
        return None
    if not are_alike(node, value) or not same_shape(fake_result(value).shape, _shape(node)):
        return None  # it is broadcast, or has another dtype
    target, args, kwargs = call or Call(node.target, node.args, node.kwargs)
    activation = activation_of(target, args, kwargs)
    if activation is not None and args[0] is value:
        return Step(activation) if set(before) <= {"bias"} else None
    if target not in ADDITIONS or len(args) != 2 or kwargs:
        return None
    added = args[1] if args[0] is value else args[0]
    if not isinstance(added, fx.Node) or added is value or not are_alike(added, value):
        return None
    name = _name_of_summand(_shape(value), _shape(added), features)
    is_taken = "residual" not in before if name == "residual" else not before
    return Step(name, added) if name and is_taken and is_contiguous(fake_result(added)) else None


def _is_cast_to_float32(node: fx.Node, value: fx.Node) -> bool:
    """Whether a node is nothing but a 16-bit value in float32."""
    if node.target not in CASTS or node.all_input_nodes != [value]:
        return False
    cast, own = fake_result(node), fake_result(value)
    return (
        (cast.dtype, own.dtype.itemsize, cast.device) == (torch.float32, 2, own.device)
        and own.is_floating_point()
        and same_shape(cast.shape, own.shape)
        and is_contiguous(cast)
    )


def _shape(node: fx.Node) -> Sequence[Any]:
    shape: Sequence[Any] = fake_result(node).shape
    return shape


def _name_of_summand(own: Sequence[Any], other: Sequence[Any], features: int) -> str:
    """Bias if one value for each feature is added, residual if one for each element."""
    if same_shape(own, other):
        return "residual"
    trailing = list(other)
    while trailing and same(trailing[0], 1):
        trailing.pop(0)
    count = 1
    for size in trailing:
        count = count * size
    is_bias = same(count, features) and all(map(same, trailing, own[len(own) - len(trailing) :]))
    return "bias" if is_bias else ""


def are_alike(*nodes: fx.Node) -> bool:
    """Whether all hold tensors of one dtype on one device."""
    first, *others = (fake_result(node) for node in nodes)
    return isinstance(first, Tensor) and all(
        isinstance(one, Tensor) and one.dtype == first.dtype and one.device == first.device
        for one in others
    )
