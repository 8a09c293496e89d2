"""Layers whose weights are trained, by one operator of the host library, forward and backward.

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
    if not torch.is_autocast_enabled(x.device.type):
        return _result(x, list(weights), bias, residual, form)
    x, *cast_weights = (_cast(one) for one in (x, *weights))
    bias, residual = (None if one is None else _cast(one) for one in (bias, residual))
    with torch.autocast(x.device.type, enabled=False):
        return _result(x, cast_weights, bias, residual, form)


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


def _cast(tensor: Tensor) -> Tensor:
    """A tensor in autocast's dtype, if autocast casts it: as for torch.nn.functional.linear."""
    is_eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(torch.get_autocast_dtype(tensor.device.type)) if is_eligible else tensor


def _is_loaded() -> bool:
    global _run
    if _run is None and host.is_loaded():
        _run = torch.ops.ksopt_host.run_trained.default._op
    return _run is not None
