"""Which nodes of a graph may write a tensor in place, as far as the graph says."""

from __future__ import annotations

import functools
import inspect
import operator
from typing import Any

from torch import fx


def writes_in_place(graph: fx.Graph) -> bool:
    """Whether a node may write in place: then results must alias as they do when they are run."""
    return any(may_write(node) for node in graph.nodes)


def writes_its_inputs(node: fx.Node) -> bool:
    """Whether a node is a kernel of the author's own, which may write any tensor that it reads."""
    name = getattr(node.target, "__name__", "")
    return node.op == "call_function" and name.startswith("triton_kernel_wrapper")


def may_write(node: fx.Node) -> bool:
    """Whether a node may write in place, as far as its name and its arguments say."""
    if writes_its_inputs(node):
        return True
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and not name.endswith("__")
    if node.op != "call_function":
        return False
    name = getattr(node.target, "__name__", "")
    if "out" in node.kwargs or _asks_for_in_place(node):
        return True
    return (
        (name.startswith("i") and name[1:] in _IN_PLACE_OPERATORS)
        or (name.endswith("_") and not name.startswith("_") and node.target not in _NAMED_ALIKE)
        or name == "setitem"
        or _schema_writes(node.target)
    )


def _asks_for_in_place(node: fx.Node) -> bool:
    at = _place_of_inplace(node.target)
    given = node.args[at] if at is not None and at < len(node.args) else False
    return given is True or node.kwargs.get("inplace") is True


@functools.cache
def _place_of_inplace(target: Any) -> int | None:
    """Which positional argument of a function is called ``inplace``; None if none is."""
    try:
        names = list(inspect.signature(target).parameters)
    except (TypeError, ValueError):  # built-in: what of torch writes in place says so in its name
        return None
    return names.index("inplace") if "inplace" in names else None


# Python keywords end in an underscore as functions, as torch's functions do that write in place.
_NAMED_ALIKE = (operator.and_, operator.or_, operator.not_, operator.is_)
_IN_PLACE_OPERATORS = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "matmul",
)  # fmt: skip


def _schema_writes(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)
