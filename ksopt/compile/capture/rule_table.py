"""Table of capture rules: the effect of an operator or a call on the tensors that it reads.

A rule is a function in `ksopt.compile.capture.rules`, with the decorator that registers it:

- `rule`: for an ATen operator that has run on fake tensors.
- `call_rule`: for a node of the graph that is not run, because Dynamo has left its result. Running
  an operator on fake tensors of a dynamic batch takes milliseconds; views, permutations and dense
  layers are most of a model's nodes, and what they do follows from the call.
- `vmap_rule`: the same for a node inside a vmap.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from ksopt.compile.capture.index_map import NotNestedError

if TYPE_CHECKING:
    from ksopt.compile.capture.tracker import Tracker

Rule = Callable[["Tracker", Any, tuple[Any, ...], dict[str, Any], Any], None]
"""(tracker, operator, args, kwargs, result): notes views of the result."""

Call = Callable[["Tracker", tuple[Any, ...], dict[str, Any], Tensor], bool]
"""(tracker, args, kwargs, known result): notes a view of the result; False: run it instead."""

VmapCall = Callable[["Tracker", tuple[Any, ...], Tensor], Any]
"""(tracker, args, known result) -> the result, noted; None: run it instead."""


@dataclass(frozen=True)
class CallRule:
    """A rule for calls.

    Attributes:
        call: records the result.
        casts: whether autocast casts the operands.
        first_is_tensor: whether the first argument must be a tensor.
    """

    call: Call
    casts: bool
    first_is_tensor: bool


RULES: dict[Any, Rule] = {}
"""Overload packet -> rule."""

CALL_RULES: dict[Any, CallRule] = {}
"""Function, or name of a method -> rule."""

VMAP_RULES: dict[Any, VmapCall] = {}
"""Function, or its name -> rule."""


def rule(*packets: Any) -> Callable[[Rule], Rule]:
    """Decorator: register a rule for overload packets such as ``torch.ops.aten.view``."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(packets, function))
        return function

    return register


def call_rule(
    *targets: Any, casts: bool = False, first_is_tensor: bool = True
) -> Callable[[Call], Call]:
    """Decorator: register a rule for calls of functions, and of methods by their names."""

    def register(function: Call) -> Call:
        CALL_RULES.update(dict.fromkeys(targets, CallRule(function, casts, first_is_tensor)))
        return function

    return register


def vmap_rule(*targets: Any) -> Callable[[VmapCall], VmapCall]:
    """Decorator: register a rule for calls inside a vmap."""

    def register(function: VmapCall) -> VmapCall:
        VMAP_RULES.update(dict.fromkeys(targets, function))
        return function

    return register


def follow_call(
    tracker: Tracker, node: fx.Node, args: tuple[Any, ...], kwargs: Any, known: Any
) -> bool:
    """Record a view of a node's known result if there is a rule for the call."""
    entry = CALL_RULES.get(node.target) if node.op in ("call_function", "call_method") else None
    if entry is None or not args or (entry.first_is_tensor and not isinstance(args[0], Tensor)):
        return False
    if not isinstance(known, Tensor) or torch.is_inference_mode_enabled():
        return False
    if entry.casts and torch.is_autocast_enabled(known.device.type):
        return False
    try:
        return entry.call(tracker, args, dict(kwargs), known)
    except NotNestedError:
        return False


def follow_call_in_vmap(tracker: Tracker, node: fx.Node, args: tuple[Any, ...], kwargs: Any) -> Any:
    """The recorded result of a node inside one vmap; None if there is no rule for the call."""
    known = node.meta.get("example_value")
    name = getattr(node.target, "__name__", "")
    function = VMAP_RULES.get(node.target) or VMAP_RULES.get(name)
    if function is None or kwargs or not isinstance(known, Tensor):
        return None
    try:
        return function(tracker, args, known)
    except NotNestedError:
        return None
