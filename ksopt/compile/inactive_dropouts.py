"""Removal of dropouts that are switched off: torch returns their input.

Dynamo and AOTAutograd take the result for a copy. So `bypass` lets readers read the input itself,
before the graph is followed: a later write of one is a write of the other, as in eager mode.
Fake results of views of the result are recomputed, because their memory is then the input's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch.nn import functional

from ksopt.compile.capture.nodes import fake_result, holds_memory, memory_of, on_fakes

_DROPOUTS = (functional.dropout, torch.dropout, torch.ops.aten.dropout.default)
_ARGUMENTS = {functional.dropout: ("input", "p", "training", "inplace")}
_TORCHS = ("input", "p", "train")


def bypass(graph: fx.Graph) -> bool:
    """Remove the dropouts of a graph that are switched off; return whether there were any."""
    bypassed = False
    copies: set[int] = set()  # memories that eager mode does not have
    for node in list(graph.nodes):
        value = _input(node) if node.target in _DROPOUTS else None
        if value is None:
            if any(holds_memory(node, memory) for memory in copies):
                _run_again(node)
            continue
        memory = memory_of(node)
        if memory is not None and memory != memory_of(value):
            copies.add(memory)
        node.replace_all_uses_with(value)
        graph.erase_node(node)
        bypassed = True
    return bypassed


def _run_again(node: fx.Node) -> None:
    """Recompute the fake result of a node from its current inputs."""
    target: Any = node.target
    if node.op == "call_method":
        name = target

        def target(own: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(own, name)(*args, **kwargs)

    elif node.op != "call_function" or isinstance(target, HigherOrderOperator):
        return  # results of an inner graph stay in another memory
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), fake_result)
    node.meta["val" if "val" in node.meta else "example_value"] = on_fakes(target, args, kwargs)


def _input(node: fx.Node) -> fx.Node | None:
    """The input of a dropout that is switched off; None for other nodes."""
    names = _ARGUMENTS.get(node.target, _TORCHS)  # type: ignore[arg-type]
    arguments: dict[str, Any] = {"p": 0.5, "training": True, "train": True}
    arguments |= dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    is_on = arguments["training"] is not False and arguments["train"] is not False
    if (is_on and arguments["p"] != 0) or not isinstance(arguments.get("input"), fx.Node):
        return None
    value: fx.Node = arguments["input"]
    return value
