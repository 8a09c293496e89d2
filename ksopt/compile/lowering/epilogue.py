"""Epilogues: operations behind a chain that could be computed with it.

A bias, an activation, a residual. The emitted operator computes the product alone, and Inductor
fuses the rest into one kernel behind it. Sites record what a kernel with an epilogue could fuse.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from ksopt.compile.capture.nodes import fake_result
from ksopt.compile.capture.symbolic import same_shape

ACTIVATIONS: dict[Any, str] = {
    F.relu: "relu",
    torch.relu: "relu",
    "relu": "relu",
    F.silu: "silu",
    F.gelu: "gelu",
    torch._C._nn.gelu: "gelu",
    torch.ops.aten.relu.default: "relu",
    torch.ops.aten.silu.default: "silu",
    torch.ops.aten.gelu.default: "gelu",
}
_ADDITIONS = {operator.add, operator.iadd, torch.add, "add", "add_", torch.ops.aten.add.Tensor}
_MOVEMENTS = {
    *("view", "reshape", "permute", "transpose", "flatten", "unflatten", "contiguous", "squeeze"),
    *(torch.reshape, torch.permute, torch.transpose, torch.flatten, torch.squeeze),
    *(torch.unflatten, torch.ops.aten.view.default, torch.ops.aten.permute.default),
}


def epilogue(exits: Sequence[fx.Node], is_biased: bool) -> tuple[str, ...]:
    """Names of the steps, in order: "bias", "relu", "silu", "gelu", "gelu_tanh", "residual".

    Args:
        exits: the nodes whose values are the chain's result.
        is_biased: whether the product itself has a bias, as in addmm.
    """
    steps = ["bias"] if is_biased else []
    node = exits[0] if len(exits) == 1 else None
    while node is not None and len(node.users) == 1:
        (user,) = node.users
        name = _step(node, user)
        if name is None or name in steps:
            break
        if name:
            steps.append(name)
        node = user
    return tuple(steps)


def _step(node: fx.Node, user: fx.Node) -> str | None:
    """Name of the step a reader applies to a value; "" if it only moves it, None if unknown."""
    if user.target in _MOVEMENTS:
        return ""
    if user.target in ACTIVATIONS and user.args and user.args[0] is node:
        name = ACTIVATIONS[user.target]
        tanh = name == "gelu" and user.kwargs.get("approximate") == "tanh"
        return "gelu_tanh" if tanh else name
    if user.target not in _ADDITIONS or user.kwargs or len(user.args) != 2:
        return None
    other = user.args[1] if user.args[0] is node else user.args[0]
    if not isinstance(other, fx.Node) or other is node:
        return None
    own, added = fake_result(node), fake_result(other)
    if not isinstance(added, torch.Tensor) or not isinstance(own, torch.Tensor):
        return None
    return "residual" if same_shape(added.shape, own.shape) else "bias"
