"""Operands of kernels of chains: rows side by side that begin at multiples of 16 bytes."""

from __future__ import annotations

from torch import Tensor

_ALIGNED = 16


def as_rows(x: Tensor) -> Tensor:
    """A tensor as rows that the kernel can read, copied if its layout does not fit."""
    rows = rows_of(x)
    return aligned(x.reshape(-1, x.shape[-1]).contiguous()) if rows is None else rows


def rows_of(x: Tensor) -> Tensor | None:
    """A view as contiguous rows that are aligned to 16 bytes; None if there is none."""
    try:
        rows = x.view(-1, x.shape[-1])
    except RuntimeError:
        return None
    if rows.stride(-1) != 1 or rows.data_ptr() % _ALIGNED != 0:
        return None
    return rows if rows.stride(0) * rows.element_size() % _ALIGNED == 0 else None


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it that is aligned to 16 bytes."""
    return tensor if tensor.data_ptr() % _ALIGNED == 0 else tensor.clone()
