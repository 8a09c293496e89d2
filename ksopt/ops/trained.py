"""Layers whose weights are trained, by one operator of the host library, forward and backward.

It computes the same as ``ks_chain``, and saves at most as much; see csrc/host/trained_layer.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ksopt import precision
from ksopt.epilogue import ACTIVATIONS
from ksopt.jit import host
from ksopt.kernels import weight_cache
from ksopt.ops.eager import PLAIN, is_transformed

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
        None where the host library is not loaded, a weight is frozen, or the operands do not fit
        together: the operators of the composed layer then report the error.
    """
    if not (_is_loaded() and torch.is_grad_enabled()) or is_transformed():
        return None
    if not {type(one) for one in (x, bias, residual, *weights)} <= _PLAIN_OR_NONE:
        return None
    if activation not in ACTIVATIONS or not all(weight.requires_grad for weight in weights):
        return None
    for weight in weights:
        weight_cache.forget(weight)
    form = (ACTIVATIONS.index(activation), batch_last, siblings)
    kind = x.device.type
    dtype = autocast_dtype(kind) if torch._C._is_any_autocast_enabled() else None
    if dtype is None:
        return _result(x, list(weights), bias, residual, form)
    cast = partial(cast_by_autocast, dtype, kind)
    with torch.autocast(kind, enabled=False):
        cast_bias = None if bias is None else cast(bias)
        cast_residual = None if residual is None else cast(residual)
        return _result(cast(x), [cast(one) for one in weights], cast_bias, cast_residual, form)


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
) -> Tensor | None:
    exact = x.dtype is not torch.float32 or precision.is_exact()
    assert _run is not None
    return _run(x, weights, bias, residual, *form, exact)


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
