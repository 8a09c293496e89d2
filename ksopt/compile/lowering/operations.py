"""PyTorch's operations that lowering recognises, each in all of its spellings.

Only out-of-place ones. `in_place_epilogues` says which in-place calls equal one of them.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.nn import functional as F

from ksopt.epilogue import Activation

_aten = torch.ops.aten

ADDITIONS = frozenset({operator.add, torch.add, "add", _aten.add.Tensor})
MULTIPLICATIONS = frozenset(
    {operator.mul, torch.mul, torch.multiply, "mul", "multiply", _aten.mul.Tensor}
)
SUBTRACTIONS = frozenset({operator.sub, torch.sub, "sub", _aten.sub.Tensor})
DIVISIONS = frozenset({operator.truediv, torch.div, "div", _aten.div.Tensor})
ARITHMETIC = ADDITIONS | MULTIPLICATIONS | SUBTRACTIONS | DIVISIONS
POINTWISE = ARITHMETIC | {
    *(operator.neg, operator.pow, torch.neg, torch.pow, torch.square, torch.rsub),
    *(torch.tanh, torch.sigmoid, torch.exp, torch.erf, torch.special.erf),
    *(torch.clamp, torch.clamp_min, torch.abs, torch.reciprocal, F.tanh, F.sigmoid),
    *("neg", "pow", "square", "tanh", "sigmoid", "exp", "erf"),
    *("clamp", "clamp_min", "abs", "reciprocal"),
}
"""Of which an activation may be composed."""

CASTS = frozenset({"float", "to", "type", _aten._to_copy.default})
"""They may change the dtype of a tensor."""
IN_READERS_KERNEL = POINTWISE | {
    *(F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm, _aten.native_layer_norm.default),
    *("to", "float", "half", "bfloat16", "type_as"),
}
"""Readers in whose kernel Inductor computes what is elementwise before them, norms included."""

_RESHAPES = ("flatten", "reshape", "squeeze", "unflatten", "unsqueeze")
RESHAPES = frozenset(
    {
        *("view", *_RESHAPES, *(getattr(torch, name) for name in _RESHAPES)),
        *(_aten.view.default, _aten.reshape.default),
    }
)
"""They change the shape of a tensor, but not the order of its elements."""
MOVEMENT_NAMES = frozenset(
    {
        *("view", *_RESHAPES, "permute", "transpose", "t", "movedim", "rearrange", "expand"),
        *("contiguous", "clone", "getitem", "split", "chunk", "unbind"),
        *("_add_batch_dim", "_remove_batch_dim"),
    }
)
"""Names of functions and methods that select, reorder or repeat elements: Inductor computes none
of them in a kernel of their own."""

_ACTIVATIONS: dict[Any, str] = {
    **dict.fromkeys((F.relu, torch.relu, "relu", _aten.relu.default), "relu"),
    **dict.fromkeys((F.silu, _aten.silu.default), "silu"),
    **dict.fromkeys((F.gelu, torch._C._nn.gelu, _aten.gelu.default), "gelu"),
}
_WITHOUT_ARGUMENTS: dict[str, Activation] = {"relu": "relu", "silu": "silu"}
_GELU: dict[tuple[Any, ...], Activation] = {
    (): "gelu",
    ("none",): "gelu",
    ("tanh",): "gelu_tanh",
}


class Call(NamedTuple):
    """A node's call."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def reshapes(node: fx.Node) -> bool:
    """Whether a node changes the shape of its first argument, but not the order of its elements."""
    if node.target is torch.permute:  # to the same order: rewrite.py adds such nodes
        dims = node.args[1] if len(node.args) == 2 else None
        return isinstance(dims, list | tuple) and list(dims) == list(range(len(dims)))
    return node.target in RESHAPES and bool(node.args)


def activation_of(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Activation | None:
    """The activation that a call computes of its first argument; None if it computes none."""
    name = _ACTIVATIONS.get(target)
    if name is None or not args:
        return None
    others = [*args[1:], *kwargs.values()]
    if name == "gelu":
        return _GELU.get(tuple(others))
    # Others are inplace=False.
    return _WITHOUT_ARGUMENTS[name] if all(one is False for one in others) else None


def activation_of_node(node: fx.Node) -> Activation | None:
    """The activation that a node computes; None if it computes none."""
    return activation_of(node.target, node.args, node.kwargs)
