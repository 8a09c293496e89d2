"""The operators under torch.autocast and torch.vmap."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ksopt.kernels.backends.base import when_registered
from ksopt.ops.schemas import LIBRARY, ks_mm, ks_mm_weight_grad

# Autocast, as for torch.nn.functional.linear: float32 and 16-bit tensors of the autocast device
# are cast to the dtype in force, float64 is left alone. (torch.library.register_autocast casts to
# one dtype for ever.) The cast of a weight is cached where its gradient is not recorded; torch
# casts such a weight at each call.


def _register_autocast(device_type: str, key: str) -> None:
    this_key = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def kernel(
        x: Tensor, weight: Tensor, batch_last: bool = False, owner: Tensor | None = None
    ) -> Tensor:
        dtype = torch.get_autocast_dtype(device_type)
        with torch._C._ExcludeDispatchKeyGuard(this_key):
            if _is_cast(x, dtype):
                x = x.to(dtype)
            if _is_cast(weight, dtype):
                if x.dtype == dtype:
                    owner = weight if owner is None else owner
                else:
                    weight = weight.to(dtype)  # which ks_mm refuses beside such an x
            return ks_mm(x, weight, batch_last, owner)

    def _is_cast(tensor: Tensor, dtype: torch.dtype) -> bool:
        eligible = tensor.is_floating_point() and tensor.dtype not in (torch.float64, dtype)
        return eligible and tensor.device.type == device_type

    LIBRARY.impl("ks_mm", kernel, key)


_register_autocast("cpu", "AutocastCPU")
_register_autocast("cuda", "AutocastCUDA")
_others: set[str] = set()


def _autocast_on(device_type: str) -> None:
    """Register the kernel for one more type of devices, if torch has autocast for it."""
    key = f"Autocast{torch._C._dispatch_key_for_device(device_type)}"
    is_new = device_type not in ("cpu", "cuda") and key not in _others
    if is_new and hasattr(torch._C.DispatchKey, key):
        _others.add(key)
        _register_autocast(device_type, key)


when_registered(_autocast_on)


# vmap. One weight: the mapped dim is one more batch dim. As many weights as samples: side by side
# they are one block-diagonal matrix, whose pattern has a times as many blocks.


def _vmap(
    info: Any,
    in_dims: tuple[int | None, ...],
    x: Tensor,
    weight: Tensor,
    batch_last: bool = False,
    owner: Tensor | None = None,
) -> tuple[Tensor, int]:
    x_dim, weight_dim = in_dims[:2]
    if owner is not None:
        weight = weight.to(x.dtype)
    if weight_dim is None:
        assert x_dim is not None
        at = 1 if batch_last else 0
        return ks_mm(x.movedim(x_dim, at), weight, batch_last), at
    size = info.batch_size
    blocks = weight.movedim(weight_dim, 0).flatten(0, 1)
    y = ks_mm(_side_by_side(x, x_dim, size, batch_last), blocks, batch_last)
    at = 0 if batch_last else y.dim() - 1
    return y.unflatten(at, (size, y.shape[at] // size)), at


def _vmap_weight_grad(
    info: Any,
    in_dims: tuple[int | None, ...],
    grad: Tensor,
    x: Tensor,
    a: int,
    d: int,
    batch_last: bool,
) -> tuple[Tensor, int]:
    size = info.batch_size
    blocks = ks_mm_weight_grad(
        _side_by_side(grad, in_dims[0], size, batch_last),
        _side_by_side(x, in_dims[1], size, batch_last),
        size * a,
        d,
        batch_last,
    )
    return blocks.unflatten(0, (size, a)), 0


def _side_by_side(tensor: Tensor, dim: int | None, size: int, batch_last: bool) -> Tensor:
    """Merge the mapped dim into the features: [size, *batch, N] -> [*batch, size*N]."""
    mapped = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return mapped.flatten(0, 1) if batch_last else mapped.movedim(0, -2).flatten(-2, -1)


torch.library.register_vmap("ksopt::ks_mm", _vmap, lib=LIBRARY)
torch.library.register_vmap("ksopt::ks_mm_weight_grad", _vmap_weight_grad, lib=LIBRARY)
