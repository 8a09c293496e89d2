"""Dispatch of a product to the fastest known implementation. Forward only; called by ksopt.ops."""

from __future__ import annotations

import torch
from torch import Tensor

from ksopt import settings
from ksopt.epilogue import After
from ksopt.kernels.backends.base import BACKENDS, backend_of

QUICK_BUDGET_S = 0.03
"""Time for the timing of one problem, compilation apart; at least three rounds are run."""


def run_known(
    x: Tensor,
    weight: Tensor,
    batch_last: bool,
    out: Tensor | None = None,
    owner: Tensor | None = None,
) -> Tensor | None:
    """The product, if the host library knows it (`DeviceBackend.run_known`)."""
    # The host's time: no call more than needed.
    backend = BACKENDS["cuda" if x.is_cuda else x.device.type]
    return backend.run_known(x, weight, batch_last, out, owner)


def run_known_repacked(
    x: Tensor, weight: Tensor, batch_last: bool, out: Tensor | None = None
) -> Tensor | None:
    """The same for weights that change (`DeviceBackend.run_known_repacked`)."""
    backend = BACKENDS["cuda" if x.is_cuda else x.device.type]
    return backend.run_known_repacked(x, weight, batch_last, out)


def run(x: Tensor, weight: Tensor, batch_last: bool, out: Tensor | None = None) -> Tensor:
    """Compute y = x K^T. See `DeviceBackend.run`.

    Raises:
        CompilationError: a kernel does not compile, which is a fault of ksopt.
    """
    return backend_of(x.device.type).run(x, weight, batch_last, out)


def run_within(
    x: Tensor, weight: Tensor, batch_last: bool, after: After, out: Tensor | None = None
) -> Tensor | None:
    """The product and what is after it in one launch (`DeviceBackend.run_within`)."""
    return backend_of(x.device.type).run_within(x, weight, batch_last, after, out)


def multiply(x: Tensor, weight: Tensor, batch_last: bool, out: Tensor | None = None) -> Tensor:
    """`run` with the least overhead; operands and ``out`` are as there."""
    y = run_known(x, weight, batch_last, out)
    return run(x, weight, batch_last, out) if y is None else y


def choose_quickly(
    x: Tensor, weight: Tensor, batch_last: bool, budget_s: float = QUICK_BUDGET_S
) -> None:
    """Choose quickly for these operands, unless a choice exists or is recorded.

    A search times hundreds of products, and uses a few. Choosing the fastest way of each with care
    would take most of its time. Here the same ways are timed in the fewest rounds; the choice is
    not written to disk, so the finalists, in a process of their own, are chosen for with care.
    Where nothing is to be timed (on a CPU, with another ``KSOPT_TUNE`` than measure, under
    deterministic algorithms) nothing is done: the product chooses as usual.

    Args:
        x: (*batch, N), or (N, *batch) when batch_last.
        weight: (a, b, c, d).
        batch_last: the layout.
        budget_s: seconds for the timing.
    """
    if settings.tuning() != "measure" or torch.are_deterministic_algorithms_enabled():
        return
    backend_of(x.device.type).choose_quickly(x, weight, batch_last, budget_s)
