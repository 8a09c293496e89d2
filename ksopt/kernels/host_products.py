"""The host library's table of products (csrc/host/dispatch_table.hpp), for all backends.

What it knows of a product it computes without Python. Compiled graphs look it up without Python,
too (csrc/host/product_kernels.cpp); here eager products do, by the same functions. A backend that
has decided how such operands are multiplied tells the table.
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

# What the overload itself calls: it saves a call of Python. None until the table has an entry.
_run_product: Callable[..., Tensor | None] | None = None


def run_known(
    x: Tensor,
    weight: Tensor,
    batch_last: bool,
    out: Tensor | None = None,
    owner: Tensor | None = None,
) -> Tensor | None:
    """y, if the library knows how such operands are multiplied and can do it; else None.

    Args:
        x, weight, batch_last: as for `DeviceBackend.run`. Nothing is assumed of them: what does not
            fit together gives None.
        out: where y is written; only if that can be done straight.
        owner: the tensor that weight is said to be a view of; None for nobody's.
    """
    if _run_product is None:
        return None
    try:
        return _run_product(x, weight, batch_last, owner, thread_state.changing, out)
    except RuntimeError:  # the way that checks and decides says what is wrong
        return None


def run_known_changing(
    x: Tensor, weight: Tensor, batch_last: bool, out: Tensor | None = None
) -> Tensor | None:
    """`run_known` where weights are said to change, whether or not they are in this scope."""
    if _run_product is None:
        return None
    try:
        return _run_product(x, weight, batch_last, None, True, out)
    except RuntimeError:  # as above
        return None


def know(x: Tensor, weight: Tensor, batch_last: bool, changing: bool, entry: Entry | None) -> None:
    """Tell the table how products of such operands are computed.

    Args:
        x, weight, batch_last: a product's.
        changing: whether of weights that change, or of others.
        entry: what was decided, for a library that is loaded; None where it cannot do that, which
            takes the place of what was there before.
    """
    global _run_product
    if entry is None and _run_product is None:
        return
    exact = x.dtype != torch.float32 or precision.is_exact()
    known = astuple(_NOTHING if entry is None else entry)
    torch.ops.ksopt_host.know(x, weight, batch_last, exact, changing, *known)
    if entry is not None:
        sync_host()
        _run_product = torch.ops.ksopt_host.run_product.default._op


def forget() -> None:
    """Forget all that is known of products."""
    if _run_product is not None:
        torch.ops.ksopt_host.forget()
