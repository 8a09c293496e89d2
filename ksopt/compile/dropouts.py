"""Dropouts that are switched off: torch returns what they are called with.

Dynamo and AOTAutograd take the result for a copy. So `bypass` lets readers read the input itself,
before the graph is followed: a later write of one is a write of the other, as in eager mode.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.nn import functional

_DROPOUTS = (functional.dropout, torch.dropout, torch.ops.aten.dropout.default)
_ARGUMENTS = {functional.dropout: ("input", "p", "training", "inplace")}
_TORCHS = ("input", "p", "train")


def bypass(graph: fx.Graph) -> bool:
    """Whether there were any; none is left."""
    found = False
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _DROPOUTS:
            value = _input(node)
            if value is not None:
                node.replace_all_uses_with(value)
                graph.erase_node(node)
                found = True
    return found


def _input(node: fx.Node) -> fx.Node | None:
    """The input of a dropout that is switched off; None of another."""
    names = _ARGUMENTS.get(node.target, _TORCHS)  # type: ignore[arg-type]
    arguments: dict[str, Any] = {"p": 0.5, "training": True, "train": True}
    arguments |= dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    is_on = arguments["training"] is not False and arguments["train"] is not False
    if (is_on and arguments["p"] != 0) or not isinstance(arguments.get("input"), fx.Node):
        return None
    value: fx.Node = arguments["input"]
    return value
