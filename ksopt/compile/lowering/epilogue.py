"""Epilogues: operations behind a chain that could be computed with it.

A bias, an activation, a residual. The emitted operator computes the product alone, and Inductor
fuses the rest into one kernel behind it. Sites record what a kernel with an epilogue could fuse.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from ksopt.compile.capture.nodes import fake_result
from ksopt.compile.capture.symbolic import same_shape
from ksopt.compile.lowering.in_place_epilogues import out_of_place
from ksopt.compile.lowering.operations import ADDITIONS, activation_of, reshapes


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
    """Name of the step a reader applies to a value; "" if it only reshapes it, None if unknown."""
    if reshapes(user) and user.args[0] is node:
        return ""
    target, args, kwargs = out_of_place(user) or (user.target, user.args, user.kwargs)
    activation = activation_of(target, args, kwargs)
    if activation is not None and args[0] is node:
        return activation
    if target not in ADDITIONS or kwargs or len(args) != 2:
        return None
    other = args[1] if args[0] is node else args[0]
    if not isinstance(other, fx.Node) or other is node:
        return None
    own, added = fake_result(node), fake_result(other)
    if not isinstance(added, torch.Tensor) or not isinstance(own, torch.Tensor):
        return None
    return "residual" if same_shape(added.shape, own.shape) else "bias"
