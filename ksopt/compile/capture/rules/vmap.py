"""Rules for calls inside a vmap.

Inside a vmap Dynamo's graph works on tensors that wrap another one with one more dim. Operations on
the wrappers are followed on the wrapped tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ksopt.compile.capture.index_map import permute
from ksopt.compile.capture.rule_table import vmap_rule
from ksopt.compile.capture.rules.einsum import note_einsum
from ksopt.compile.capture.tracker import Tracker

_functorch = torch._C._functorch
_LETTERS = "abcdefghijklmnop"


@vmap_rule(F.linear, torch._C._nn.linear)
def _linear(tracker: Tracker, args: tuple[Any, ...], known: Any) -> Any:
    if not (_is_mapped(known) and any(map(_is_mapped, args))):
        return None
    if len(args) != 2 or torch.is_autocast_enabled(args[0].device.type):
        return None
    x, weight = args
    batch = _LETTERS[: x.dim() - 1]
    operands = [(x, f"{batch}x"), (weight, "yx"), (known, f"{batch}y")]
    letters = [_with_mapped(tensor, own) for tensor, own in operands]
    left, right, result = (_inner(tensor) for tensor, _ in operands)
    if weight.dim() != 2 or not note_einsum(
        tracker, f"{letters[0]},{letters[1]}->{letters[2]}", left, right, result
    ):
        return None
    level = max(_functorch.maybe_get_level(tensor) for tensor in args)
    return _functorch._add_batch_dim(result, _functorch.maybe_get_bdim(known), level)


@vmap_rule("_remove_batch_dim")
def _remove(tracker: Tracker, args: tuple[Any, ...], known: Any) -> Any:
    mapped, level, _, out_dim = args
    if not _is_mapped(mapped) or _functorch.maybe_get_level(mapped) != level:
        return None
    inner = _inner(mapped)
    order = [dim for dim in range(inner.dim()) if dim != _functorch.maybe_get_bdim(mapped)]
    order.insert(out_dim % inner.dim(), _functorch.maybe_get_bdim(mapped))
    tracker.moved(known, inner, permute(tracker.view(inner).map, order))
    return known


def _is_mapped(value: Any) -> bool:
    return isinstance(value, Tensor) and _functorch.is_batchedtensor(value)


def _inner(tensor: Tensor) -> Tensor:
    inner: Tensor = _functorch.get_unwrapped(tensor) if _is_mapped(tensor) else tensor
    return inner


def _with_mapped(tensor: Tensor, letters: str) -> str:
    """The letters of a wrapped tensor: those of the wrapper's dims, and z for the mapped dim."""
    if not _is_mapped(tensor):
        return letters
    at = _functorch.maybe_get_bdim(tensor)
    return f"{letters[:at]}z{letters[at:]}"
