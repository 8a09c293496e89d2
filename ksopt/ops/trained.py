"""Layers that gradients go through, by one operator of the host library, forward and backward.

It computes the same as ``ks_chain``, and saves at most as much; see csrc/host/trained_layer.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ksopt import precision
from ksopt.epilogue import ACTIVATIONS
from ksopt.jit import host
from ksopt.kernels import weight_cache
from ksopt.ops.eager import PLAIN, is_transformed, records_gradient

_PLAIN_OR_NONE = PLAIN | {type(None)}
_run: Callable[..., Tensor | None] | None = None


def run(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    batch_last: bool,
    siblings: int,
) -> Tensor | None:
    """A layer's result with its gradients recorded, where only autograd handles the call.

    Autocast may be on: the result is that of operands cast to the dtype in force.

    Args:
        x, weights, bias, residual, activation, batch_last, siblings: see `ksopt.ops`. Nothing is
            assumed of them.

    Returns:
        None where the host library is not loaded, no gradient is recorded, autocast casts a frozen
        weight (what it is cast to is cached), or the operands do not fit together: the operators of
        the composed layer then report the error.
    """
    if not _is_loaded() or is_transformed():
        return None
    if not {type(one) for one in (x, bias, residual, *weights)} <= _PLAIN_OR_NONE:
        return None
    if activation not in ACTIVATIONS or not records_gradient(x, bias, residual, *weights):
        return None
    frozen = [weight for weight in weights if not weight.requires_grad]
    for weight in weights:
        if weight.requires_grad:
            weight_cache.forget(weight)
    form = (ACTIVATIONS.index(activation), batch_last, siblings)
    kind = x.device.type
    dtype = autocast_dtype(kind) if torch._C._is_any_autocast_enabled() else None
    if dtype is None:
        return _result(x, list(weights), bias, residual, form)
    if any(weight.dtype != dtype and is_cast(kind, weight) for weight in frozen):
        return None
    with torch.autocast(kind, enabled=False):
        x = cast_by_autocast(dtype, kind, x)
        return _result(x, list(weights), bias, residual, form, casts=x.dtype == dtype)


def autocast_dtype(kind: str) -> torch.dtype | None:
    """The dtype that autocast casts to on a kind of devices; None where it is off."""
    if kind == "meta" or not torch.is_autocast_enabled(kind):  # torch knows none of meta tensors
        return None
    return torch.get_autocast_dtype(kind)


def _result(
    x: Tensor,
    weights: list[Tensor],
    bias: Tensor | None,
    residual: Tensor | None,
    form: tuple[int, bool, int],
    casts: bool = False,
) -> Tensor | None:
    exact = x.dtype is not torch.float32 or precision.is_exact()
    repacked = weight_cache.are_marked_repacked()
    assert _run is not None
    return _run(x, weights, bias, residual, *form, exact, repacked, casts)


def cast_by_autocast(dtype: torch.dtype, kind: str, tensor: Tensor) -> Tensor:
    """A tensor in autocast's dtype, if autocast casts it."""
    return tensor.to(dtype) if is_cast(kind, tensor) else tensor


def is_cast(kind: str, tensor: Tensor) -> bool:
    """Whether autocast on a kind of devices casts a tensor: as for torch.nn.functional.linear."""
    is_eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
    return is_eligible and tensor.device.type == kind


def _is_loaded() -> bool:
    global _run
    if _run is None and host.is_loaded():
        _run = torch.ops.ksopt_host.run_trained.default._op
    return _run is not None
