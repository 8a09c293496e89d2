"""Nodes that need not be run: Dynamo has left their result, and the rule is plain to see.

Running an operator on fake tensors of a dynamic batch takes milliseconds. Views, permutations and
dense layers are most of a model's nodes, and what they do to index maps follows from the call.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from ksopt.compile.capture.contraction import contraction
from ksopt.compile.capture.index_map import NotNestedError, expand, permute
from ksopt.compile.capture.rules.einsum import note_einsum
from ksopt.compile.capture.rules.matmul import dense_layer, matrix_product, multiplied
from ksopt.compile.capture.rules.movement import reshaped, sliced
from ksopt.compile.capture.symbolic import same
from ksopt.compile.capture.tracker import Tracker

Shortcut = Callable[[Tracker, tuple[Any, ...], dict[str, Any], Tensor], bool]
"""Notes a view of the result, from the arguments and the known result; False: run it instead."""


def _reshape(
    tracker: Tracker, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> bool:
    if kwargs or any(isinstance(argument, torch.dtype) for argument in args):
        return False
    sizes = args[1] if len(args) == 2 and isinstance(args[1], tuple | list) else args[1:]
    reshaped(tracker, args[0], sizes, result)
    return True


def _restructured(
    tracker: Tracker, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> bool:
    reshaped(tracker, args[0], result.shape, result)
    return True


def _permute(
    tracker: Tracker, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> bool:
    order = args[1] if len(args) == 2 and isinstance(args[1], tuple | list) else args[1:]
    if kwargs or len(order) != result.dim():
        return False
    order = [dim % result.dim() for dim in order]
    tracker.moved(result, args[0], permute(tracker.view(args[0]).map, order))
    return True


def _transpose(
    tracker: Tracker, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> bool:
    if kwargs or len(args) != 3:
        return False
    order = list(range(result.dim()))
    one, other = args[1:]
    order[one], order[other] = order[other], order[one]
    tracker.moved(result, args[0], permute(tracker.view(args[0]).map, order))
    return True


def _contiguous(
    tracker: Tracker, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> bool:
    tracker.moved(result, args[0], tracker.view(args[0]).map)
    return True


def _expand(
    tracker: Tracker, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> bool:
    tracker.moved(result, args[0], expand(tracker.view(args[0]).map, result.shape))
    return True


def _side_by_side(
    tracker: Tracker, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> bool:
    if not isinstance(args[0], tuple | list):
        return False
    views = [tracker.view(tensor) for tensor in args[0]]
    if all(contraction(view) is not None for view in views):
        return False  # the pieces of one product, maybe
    kind = functools.reduce(operator.or_, (view.root.kind for view in views))
    tracker.fresh(result, kind)
    return True


def _dropout(
    tracker: Tracker, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> bool:
    _, p, training, in_place = (*args, *(None,) * 4)[:4]
    training = kwargs.get("training", True if training is None else training)
    if not isinstance(training, bool) or in_place or kwargs.get("inplace") or p is None:
        return False
    if training:
        tracker.fresh(result, tracker.view(args[0]).root.kind)
    else:
        tracker.moved(result, args[0], tracker.view(args[0]).map)
    return True


def _multiply(
    tracker: Tracker, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> bool:
    if kwargs or len(args) != 2:
        return False
    multiplied(tracker, args[0], args[1], result)
    return True


def _getitem(
    tracker: Tracker, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> bool:
    source, index = args
    parts = list(index) if isinstance(index, tuple) else [index]
    if all(part is None or part is ... or _is_whole(part) for part in parts):
        reshaped(tracker, source, result.shape, result)  # new dims of size 1
        return True
    if parts.count(...) > 1 or not all(part is ... or isinstance(part, slice) for part in parts):
        return False
    at = parts.index(...) if ... in parts else len(parts)
    parts[at : at + 1] = [slice(None)] * (source.dim() - len(parts) + (... in parts))
    cuts = [(dim, part) for dim, part in enumerate(parts) if part != slice(None)]
    if len(cuts) != 1:
        return False
    dim, part = cuts[0]
    tracker.fresh(result, tracker.view(source).root.kind)
    sliced(tracker, source, dim, part.start, 1 if part.step is None else part.step, result)
    return True


def _is_whole(part: Any) -> bool:
    return isinstance(part, slice) and part == slice(None)


def _linear(
    tracker: Tracker, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> bool:
    x, weight, bias = (*args, *(kwargs.get(name) for name in ("bias",)), None)[:3]
    return len(args) >= 2 and dense_layer(tracker, x, weight, bias, result)


def _einsum(
    tracker: Tracker, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
) -> bool:
    operands = args[1] if len(args) == 2 and isinstance(args[1], tuple | list) else args[1:]
    if len(operands) != 2 or not isinstance(args[0], str) or not _of_one_dtype(*operands, result):
        return False
    left, right = operands
    return note_einsum(tracker, args[0], left, right, result)


def _bmm(tracker: Tracker, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> bool:
    if kwargs or len(args) != 2 or not _of_one_dtype(*args, result):
        return False
    left, right = args
    if left.dim() != right.dim() or left.dim() not in (2, 3):
        return False
    if left.dim() == 3 and not same(left.shape[0], right.shape[0]):
        return False
    view = matrix_product(tracker, left, right, result)
    if view is None:
        kind = tracker.view(left).root.kind | tracker.view(right).root.kind
        tracker.fresh(result, kind)
    else:
        tracker.note(result, view)
    return True


def _of_one_dtype(*tensors: Any) -> bool:
    return all(isinstance(one, Tensor) and one.dtype == tensors[0].dtype for one in tensors)


SHORTCUTS: dict[Any, Shortcut] = {
    **dict.fromkeys(("view", "reshape"), _reshape),
    **dict.fromkeys(("flatten", "unflatten", "unsqueeze", "squeeze"), _restructured),
    **dict.fromkeys(
        (torch.flatten, torch.unflatten, torch.unsqueeze, torch.squeeze), _restructured
    ),
    **dict.fromkeys(("permute", torch.permute), _permute),
    **dict.fromkeys(("transpose", torch.transpose), _transpose),
    "contiguous": _contiguous,
    F.dropout: _dropout,
    **dict.fromkeys(("mul", torch.mul, operator.mul), _multiply),
    operator.getitem: _getitem,
    "expand": _expand,
    **dict.fromkeys((torch.cat, torch.stack), _side_by_side),
    F.linear: _linear,
    torch._C._nn.linear: _linear,
    **dict.fromkeys((torch.einsum, torch.functional.einsum), _einsum),
    **dict.fromkeys((torch.bmm, torch.mm, torch.matmul, operator.matmul), _bmm),
}


_CAST = (_linear, _einsum, _bmm)  # and not products of elements
"""What autocast casts the operands of."""


def writes_in_place(graph: fx.Graph) -> bool:
    """Whether a node may write in place: then results must alias as they do when they are run."""
    return any(may_write(node) for node in graph.nodes)


def take(tracker: Tracker, node: fx.Node, args: tuple[Any, ...], kwargs: Any, known: Any) -> bool:
    """Note what a node's known result is, if there is a shortcut for it."""
    shortcut = SHORTCUTS.get(node.target) if node.op in ("call_function", "call_method") else None
    takes_others_first = shortcut in (_einsum, _side_by_side)
    if shortcut is None or not args or not (isinstance(args[0], Tensor) or takes_others_first):
        return False
    if not isinstance(known, Tensor) or torch.is_inference_mode_enabled():
        return False
    if shortcut in _CAST and torch.is_autocast_enabled(known.device.type):
        return False
    try:
        return shortcut(tracker, args, dict(kwargs), known)
    except NotNestedError:
        return False


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
