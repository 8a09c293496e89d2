"""Is a layer faster in one launch than by a launch a factor and what Inductor fuses behind them?

The launch does what surrounds the product too. Behind separate launches Inductor does all of that
in one kernel, where the race of the autotuner calls PyTorch's operations one after another: what
these take more is taken off.
"""

from __future__ import annotations

import torch

from ksopt import settings
from ksopt.errors import KsoptError
from ksopt.kernels import planner
from ksopt.kernels.backends.base import backend_of
from ksopt.kernels.families.pytorch_cost import elementwise_us
from ksopt.kernels.problem import Problem
from ksopt.kernels.registry import FACTORS


def is_whole(
    problem: Problem,
    batch: int,
    device: torch.device,
    tune: str | None = None,
    changing: bool = False,
) -> bool:
    """Whether one launch computes a problem, and faster.

    Args:
        problem: a layer.
        batch: rows of x.
        device: where.
        tune: "measure" times it on random operands where nothing is recorded; "model" predicts;
            "off" says no. None takes what ``KSOPT_TUNE`` says.
        changing: whether weights are prepared at each call.
    """
    tune = settings.tuning() if tune is None else tune
    spec = backend_of(device.type).spec(device)
    if spec is None or batch == 0 or tune == "off":
        return False
    choice = planner.whole_choice(problem, batch, device, changing)
    if choice is None:
        return False
    if tune != "measure" or torch.are_deterministic_algorithms_enabled():
        return choice.way != FACTORS
    try:
        record = planner.tuned(problem, batch, device)
    except (KsoptError, torch.OutOfMemoryError):
        return False
    if record is None:
        return False
    other = "cached" if changing else "repacked"
    timed = [one for one in record.timed if one.weight != other]
    kernels = [one.median_us for one in timed if one.way != FACTORS]
    factors = [one.median_us for one in timed if one.way == FACTORS]
    if not kernels or not factors:
        return bool(kernels)
    return min(kernels) < min(factors) - _gain_us(problem, batch, spec.multiprocessors)


def _gain_us(problem: Problem, batch: int, multiprocessors: int) -> float:
    """What one kernel behind separate launches saves of one for each step."""
    after = problem.epilogue
    size = getattr(torch, problem.dtype).itemsize * batch * problem.out_features
    passes = [2] * (after.bias + (after.activation != "none")) + [3] * after.residual
    apart = sum(elementwise_us(n * size, multiprocessors) for n in passes)
    fused = elementwise_us((2 + after.residual) * size, multiprocessors) if passes else 0.0
    return max(apart - fused, 0.0)
