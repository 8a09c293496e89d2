"""The host library's table of products (csrc/host/dispatch_table.hpp), for all backends.

Products in the table are computed without Python. Compiled graphs look them up without Python, too
(csrc/host/product_kernels.cpp); eager products do here, by the same functions. A backend registers
its decisions with the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple

import torch
from torch import Tensor

from ksopt import precision
from ksopt.kernels.launcher import Entry
from ksopt.kernels.weight_scopes import sync_host, thread_state

_NOTHING = Entry(plan=-1, form=0)

# The overload's implementation, which saves a call of Python. None until the table has an entry.
_run_product: Callable[..., Tensor | None] | None = None


def run_known(
    x: Tensor,
    weight: Tensor,
    batch_last: bool,
    out: Tensor | None = None,
    owner: Tensor | None = None,
) -> Tensor | None:
    """y, if the library has an entry for these operands and can run it; else None.

    Args:
        x, weight, batch_last: as for `DeviceBackend.run`. Nothing is assumed of them: operands that
            do not fit together return None.
        out: where y is written; only if that can be done straight.
        owner: the tensor that weight is declared a view of, or None.
    """
    if _run_product is None:
        return None
    try:
        return _run_product(x, weight, batch_last, owner, thread_state.repacked, out)
    except RuntimeError:  # the path that checks and decides reports the error
        return None


def run_known_repacked(
    x: Tensor, weight: Tensor, batch_last: bool, out: Tensor | None = None
) -> Tensor | None:
    """`run_known` for weights that change, whatever the scope."""
    if _run_product is None:
        return None
    try:
        return _run_product(x, weight, batch_last, None, True, out)
    except RuntimeError:  # as above
        return None


def register(
    x: Tensor, weight: Tensor, batch_last: bool, repacked: bool, entry: Entry | None
) -> None:
    """Register the entry for products of these operands.

    Args:
        x, weight, batch_last: a product's.
        repacked: whether the entry is for weights that change.
        entry: the decision, for a loaded library; None where the library cannot carry it out,
            which removes an earlier entry.
    """
    global _run_product
    if entry is None and _run_product is None:
        return
    exact = x.dtype != torch.float32 or precision.is_exact()
    known = astuple(_NOTHING if entry is None else entry)
    torch.ops.ksopt_host.know(x, weight, batch_last, exact, repacked, *known)
    if entry is not None:
        sync_host()
        _run_product = torch.ops.ksopt_host.run_product.default._op


def forget() -> None:
    """Drop everything registered for products."""
    if _run_product is not None:
        torch.ops.ksopt_host.forget()
