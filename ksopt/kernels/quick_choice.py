"""A first look: a way that is near the fastest, chosen in a moment, for this process alone.

A search times hundreds of products, and keeps a few. Choosing the fastest way of each with care
would take most of its time. A first look times the same ways in the fewest rounds; what it chooses
is not written to disk, so the finalists, in a process of their own, are chosen for with care.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ksopt import settings
from ksopt.kernels import tuning_cache
from ksopt.kernels.autotuner import measured
from ksopt.kernels.backends import cuda
from ksopt.measure.accuracy import checking

BUDGET_S = 0.03
"""Time for the timing of one problem, compilation apart; at least three rounds are made."""


def first_look(x: Tensor, weight: Tensor, batch_last: bool, budget_s: float = BUDGET_S) -> None:
    """Choose how such operands are multiplied, unless that was chosen before or is recorded.

    Where nothing is to be timed (on a CPU, with another ``KSOPT_TUNE`` than measure, under
    deterministic algorithms) nothing is done: the product chooses as ever.

    Args:
        x: (*batch, N), or (N, *batch) when batch_last.
        weight: (a, b, c, d).
        batch_last: the layout.
        budget_s: seconds for the timing.
    """
    if not x.is_cuda or settings.tuning() != "measure":
        return
    if torch.are_deterministic_algorithms_enabled():
        return
    device = x.get_device()
    found = cuda.problem_key_of(x, weight, batch_last)
    if cuda.known(found, device) is not None:
        return
    identity = cuda.identity_of(device)
    if identity is not None and tuning_cache.load(identity, found) is not None:
        return
    try:
        with torch.cuda.device(device), torch.no_grad():
            check, x, weight = checking(x.detach(), weight.detach(), batch_last)
            spec = cuda.spec_of(device)
            decision = measured(found, x, weight, spec, budget_s, check.judge)
    except torch.OutOfMemoryError:  # timing takes more than the product itself, which may fit
        return
    cuda.remember(found, device, decision)
