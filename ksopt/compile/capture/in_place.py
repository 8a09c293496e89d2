"""Nodes of a graph that may write a tensor in place, as far as the graph shows."""

from __future__ import annotations

import functools
import inspect
import operator
from typing import Any

from torch import fx
from torch._ops import HigherOrderOperator
from torch.utils._pytree import tree_leaves

from ksopt.compile.capture.nodes import memory_of


def writes_in_place(graph: fx.Graph) -> bool:
    """Whether a node may write in place: results must then alias as in eager mode."""
    return any(may_write(node) for node in graph.nodes)


def writes_its_inputs(node: fx.Node) -> bool:
    """Whether a node may write tensors that it reads and its name does not show which."""
    return _is_authors_kernel(node) or bool(written_inputs(node))


def _is_authors_kernel(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", "")
    return node.op == "call_function" and name.startswith("triton_kernel_wrapper")


def written_inputs(node: fx.Node) -> list[fx.Node]:
    """The inputs that such a node may write.

    A kernel of the author's own may write all of its inputs. A node with a graph inside, as a
    checkpoint, may write those that this graph writes in place.
    """
    if node.op != "call_function":
        return []
    if _is_authors_kernel(node):
        return node.all_input_nodes
    written = []
    for body in _bodies(node):
        operands = [
            one for one in tree_leaves(node.args) if isinstance(one, fx.Node) and not _body_of(one)
        ]
        placeholders = [one for one in body.nodes if one.op == "placeholder"]
        if not writes_in_place(body):
            continue
        if len(operands) != len(placeholders):
            return operands
        memories = {
            memory_of(read) for one in body.nodes if may_write(one) for read in _written(one)
        }
        written += [
            operand
            for operand, inside in zip(operands, placeholders, strict=True)
            if memory_of(inside) is None or memory_of(inside) in memories
        ]
    return written


def _written(node: fx.Node) -> list[fx.Node]:
    """The inputs that an in-place node may write: its first argument, or all if it has ``out``."""
    known = written_inputs(node)
    if known:
        return known
    if "out" in node.kwargs or _schema_writes(node.target):
        return node.all_input_nodes
    return [one for one in node.args[:1] if isinstance(one, fx.Node)] or node.all_input_nodes


def _bodies(node: fx.Node) -> list[fx.Graph]:
    if not isinstance(node.target, HigherOrderOperator):
        return []
    bodies = [_body_of(one) for one in node.all_input_nodes]
    return [body for body in bodies if body is not None]


def _body_of(node: fx.Node) -> fx.Graph | None:
    """The graph that a node refers to, as the body of a checkpoint; None for other nodes."""
    owner = node.graph.owning_module
    if node.op != "get_attr" or owner is None:
        return None
    module = functools.reduce(getattr, str(node.target).split("."), owner)
    return module.graph if isinstance(module, fx.GraphModule) else None


def may_write(node: fx.Node) -> bool:
    """Whether a node may write in place, as far as its name and its arguments show."""
    if writes_its_inputs(node):
        return True
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and not name.endswith("__")
    if node.op != "call_function":
        return False
    name = getattr(node.target, "__name__", "")
    if "out" in node.kwargs or _is_called_in_place(node):
        return True
    return (
        (name.startswith("i") and name[1:] in _IN_PLACE_OPERATORS)
        or (name.endswith("_") and not name.startswith("_") and node.target not in _NAMED_ALIKE)
        or name == "setitem"
        or _schema_writes(node.target)
    )


def _is_called_in_place(node: fx.Node) -> bool:
    at = _place_of_inplace(node.target)
    argument = node.args[at] if at is not None and at < len(node.args) else False
    return argument is True or node.kwargs.get("inplace") is True


@functools.cache
def _place_of_inplace(target: Any) -> int | None:
    """Position of the argument ``inplace`` of a function; None if it has none."""
    try:
        names = list(inspect.signature(target).parameters)
    except (TypeError, ValueError):  # built-in: torch's in-place functions show it in their names
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
