"""The product on CPU: whichever of PyTorch's own ways is the fastest for the problem.

At the first product of a problem (pattern, dtype, layout, batch to the next power of two, threads)
the few candidates are timed on the tensors at hand; the choice is kept for the life of the process.
Each candidate is run once to warm up, then in at most ``ROUNDS`` rounds that stop after the first
one to end past ``BUDGET_S`` seconds: a first call costs that, or two runs of each candidate if they
are longer. Weights change while training, so nothing that depends on their values is kept, and
every candidate is timed with the preparation of its weight.

Candidates sum in different orders, so two processes that choose differently differ in the last
bits. With ``KSOPT_TUNE=off``, under ``torch.use_deterministic_algorithms`` and while another thread
is timing, nothing is timed and a fixed rule decides:

1. bmm, where it copies nothing: d = 1, or one sample, or a = 1 in batch_last;
2. else expand, for d = 2 in batch_first: twice the flops cost less than the copies;
3. else bmm_loop, in batch_last where at most 8 calls do it;
4. else bmm.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from ksopt import settings
from ksopt.baselines import BASELINES, Baseline, Product
from ksopt.pattern import Pattern

BUDGET_S = 0.02
ROUNDS = 5

# An expanded product costs d times the flops, a dense one a*d times: past this factor no saved
# copy pays for it, and trying it would be slow.
_MAX_EXTRA_FLOPS = 16
_MAX_LOOP = 64


@dataclass(frozen=True)
class _Choice:
    pattern: Pattern
    baseline: Baseline

    def multiply(self, x: Tensor, weight: Tensor, batch_last: bool) -> Tensor:
        prepared = self.baseline.prepare(weight, batch_last)
        return self.baseline.multiply(x, prepared, self.pattern, batch_last)


_Key = tuple[tuple[int, ...], torch.dtype, bool, int, int]
_choices: dict[_Key, _Choice] = {}
_timing = threading.Lock()


def _after_fork() -> None:
    # The thread that held it is not in the child.
    global _timing
    _timing = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def run(x: Tensor, weight: Tensor, batch_last: bool) -> Tensor:
    """y = x Kᵀ.

    Args:
        x: [*batch, N], or [N, *batch] when batch_last; any strides, float dtype.
        weight: [a, b, c, d], of x's dtype, any strides.
        batch_last: the layout.

    Returns:
        y: [*batch, M], or [M, *batch]; new and contiguous.
    """
    shape = weight.shape
    batch = x.numel() // (shape[0] * shape[2] * shape[3])
    key = (shape, x.dtype, batch_last, batch.bit_length(), torch.get_num_threads())
    choice = _choices.get(key)
    if choice is not None:
        return choice.multiply(x, weight, batch_last)
    pattern = Pattern(*shape)
    choice = _Choice(pattern, BASELINES[rule(pattern, batch, batch_last)])
    if batch > 0 and not torch.are_deterministic_algorithms_enabled():
        if not settings.tuning():
            _choices[key] = choice
        elif _timing.acquire(blocking=False):
            try:
                choice = _choices[key] = _fastest(pattern, x, weight, batch_last)
            finally:
                _timing.release()
    # By the choice itself, so that the next product of the same tensors has the same bits.
    return choice.multiply(x, weight, batch_last)


def multiply_by_bmm(x: Tensor, weight: Tensor, batch_last: bool) -> Tensor:
    """y = x Kᵀ by one batched GEMM, on any device: `run` without a choice."""
    choice = _Choice(Pattern(*weight.shape), BASELINES["bmm"])
    return choice.multiply(x, weight, batch_last)


def rule(pattern: Pattern, batch: int, batch_last: bool) -> str:
    """Name of the baseline that the fixed rule takes (see the top of this file)."""
    if pattern.d == 1 or batch <= 1 or (batch_last and pattern.a == 1):
        return "bmm"
    if not batch_last:
        return "expand" if pattern.d == 2 else "bmm"
    return "bmm_loop" if min(pattern.a, pattern.d) <= 8 else "bmm"


def chosen() -> dict[str, str]:
    """What has been chosen in this process: problem -> baseline, both in words."""
    return {
        f"{Pattern(*shape)} {str(dtype).removeprefix('torch.')} "
        f"{'batch_last' if batch_last else 'batch_first'} batch<{2**bits} threads={threads}": (
            choice.baseline.name
        )
        for (shape, dtype, batch_last, bits, threads), choice in sorted(
            _choices.items(), key=lambda item: str(item[0])
        )
    }


def forget() -> None:
    """Forget every choice, so that the next product of each problem is chosen anew."""
    _choices.clear()


def _candidates(pattern: Pattern, dtype: torch.dtype, batch_last: bool) -> list[Baseline]:
    names = ["bmm", "einsum"]
    if min(pattern.a, pattern.d) <= _MAX_LOOP:
        names.append("bmm_loop")
    if 1 < pattern.d <= _MAX_EXTRA_FLOPS:
        names.append("expand")
    if 1 < pattern.a and 1 < pattern.a * pattern.d <= _MAX_EXTRA_FLOPS:
        names.append("dense")
    if pattern.a == 1 and pattern.d == 1:
        names.append("dense")
    product = Product(pattern, dtype, "cpu", batch_last)
    return [BASELINES[name] for name in names if BASELINES[name].supports(product).ok]


def _fastest(pattern: Pattern, x: Tensor, weight: Tensor, batch_last: bool) -> _Choice:
    candidates = _candidates(pattern, x.dtype, batch_last)
    best = {baseline.name: float("inf") for baseline in candidates}
    end = time.perf_counter() + BUDGET_S
    # Round 0 warms up, and counts only where a run is so long that warming up does not matter.
    for round_ in range(ROUNDS + 1):
        for baseline in candidates:
            start = time.perf_counter()
            _Choice(pattern, baseline).multiply(x, weight, batch_last)
            taken = time.perf_counter() - start
            if round_ > 0 or taken > BUDGET_S:
                best[baseline.name] = min(best[baseline.name], taken)
        if round_ > 0 and time.perf_counter() > end:
            break
    # Anything else that runs makes a product slower, never faster: the least time is the truest.
    name = min(best, key=best.__getitem__)
    return _Choice(pattern, BASELINES[name])
