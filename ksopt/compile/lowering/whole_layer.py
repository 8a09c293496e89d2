"""Is a layer faster in one launch than by a launch a factor and what Inductor fuses behind them?

The launch does what surrounds the product too. Behind separate launches Inductor does all of that
in one kernel, where the race of the autotuner calls PyTorch's operations one after another: what
these take more is taken off. Siblings are compared with a launch each, too, and two layers with the
faster way of each.
"""

from __future__ import annotations

import math

import torch

from ksopt import settings
from ksopt.errors import KsoptError
from ksopt.kernels import planner, registry, trained_chain
from ksopt.kernels.backends.base import backend_of
from ksopt.kernels.families.pytorch_cost import elementwise_us
from ksopt.kernels.problem import DeviceSpec, Problem
from ksopt.kernels.registry import APART


def is_whole(
    problem: Problem,
    batch: int,
    device: torch.device,
    changing: bool = False,
    tune: str | None = None,
) -> bool:
    """Whether one launch computes a problem, and faster.

    Args:
        problem: a layer, or two.
        batch: rows of x.
        device: where.
        changing: whether the layer is trained: weights are prepared at each call, and what is
            between the factors is kept.
        tune: "measure" times it on random operands where nothing is recorded; "model" predicts;
            "off" says no. None takes what ``KSOPT_TUNE`` says.
    """
    tune = settings.tuning() if tune is None else tune
    spec = backend_of(device.type).spec(device)
    if spec is None or batch == 0 or tune == "off":
        return False
    if planner.whole_choice(problem, batch, device, changing) is None:
        return False
    if changing and not trained_chain.is_kept(
        planner.plan_of(problem, batch, device=device, changing=True)
    ):
        return False

    def times(one: Problem) -> tuple[float, float]:
        if tune == "measure" and not torch.are_deterministic_algorithms_enabled():
            return _measured(one, batch, device, spec, changing)
        return _predicted(one, batch, spec)

    whole, apart = times(problem)
    if problem.siblings > 1:
        apart = min(apart, problem.siblings * min(times(problem.one())))
    if problem.second is not None and tune == "measure":  # what is predicted counts the best ways
        apart = min(apart, sum(min(times(layer)) for layer in problem.layers()))
    return whole < apart


def _predicted(problem: Problem, batch: int, spec: DeviceSpec) -> tuple[float, float]:
    """Microseconds of one launch, and of several with one kernel behind those of a layer."""
    kernels = registry.best_kernels(problem, batch, spec, most=1)
    (parts,) = registry.plain(problem, batch, spec)
    return min((one.predicted_us for one in kernels), default=math.inf), parts.predicted_us


def _measured(
    problem: Problem, batch: int, device: torch.device, spec: DeviceSpec, changing: bool
) -> tuple[float, float]:
    """The same as timed; infinite where nothing could be."""
    try:
        record = planner.tuned(problem, batch, device)
    except (KsoptError, torch.OutOfMemoryError):
        record = None
    other = "cached" if changing else "repacked"
    timed = [] if record is None else [one for one in record.timed if one.weight != other]

    def least(*, apart: bool) -> float:
        times = (one.median_us for one in timed if (one.way in APART) == apart)
        return min(times, default=math.inf)

    gain = 0.0  # of two layers: each alone is compared with, too
    if problem.second is None:
        gain = _fused_gain_us(problem, batch, spec.multiprocessors)
    return least(apart=False), least(apart=True) - gain


def _fused_gain_us(problem: Problem, batch: int, multiprocessors: int) -> float:
    """What one kernel behind separate launches saves of one for each step."""
    after = problem.epilogue
    size = getattr(torch, problem.dtype).itemsize * batch * problem.out_features
    passes = [2] * (after.bias + (after.activation != "none")) + [3] * after.residual
    apart = sum(elementwise_us(n * size, multiprocessors) for n in passes)
    fused = elementwise_us((2 + after.residual) * size, multiprocessors) if passes else 0.0
    return max(apart - fused, 0.0)
