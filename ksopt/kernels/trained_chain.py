"""The forward pass of a trained chain in one launch: y, and the values between its factors.

The backward pass reads the latter for a weight's gradient. Whether one launch is used is the
planner's choice for weights that change. Once it is known, the host library serves such calls
without Python (csrc/host/trained_chain.hpp).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ksopt.errors import KsoptError
from ksopt.jit import host
from ksopt.kernels import layer_plans, plan_autotuner, registry
from ksopt.kernels.backends.base import backend_of
from ksopt.kernels.candidate import FACTORS, Candidate
from ksopt.kernels.families.base import family_of
from ksopt.kernels.operands import Operands
from ksopt.kernels.plan import ExecutionPlan
from ksopt.kernels.problem import Problem

Keeping = Callable[[Tensor, Sequence[Tensor], Tensor | None], tuple[Tensor, Tensor]]
"""(x, weights, bias) -> y and the values between the factors."""


@runtime_checkable
class Launched(Protocol):
    """A `Keeping` that the host library can run without Python."""

    def launches(self) -> dict[str, int]:
        """The launch for any number of rows, as ``know_trained_chain`` of csrc/host takes it."""


def run(x: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """y [*batch, M] and the values between the factors, by a kernel; None: a launch per factor.

    Args:
        x: [*batch, N].
        weights: of two factors, left to right.
        bias: [M], or None.
    """
    operands = Operands(x, tuple(weights), bias, None)
    chosen, is_final = layer_plans.chosen_for_changing(operands)
    if chosen is None:
        return None
    problem = chosen.problem
    batch = x.numel() // problem.chain.in_features
    candidate = chosen if _keeps(chosen) else fastest_keeper(problem, batch, x.device)
    if candidate is None:
        return None
    call = _loaded(candidate, x.get_device())
    if call is None:
        return None
    result = call(x, weights, bias)
    if is_final and isinstance(call, Launched) and host.is_loaded():
        torch.ops.ksopt_host.know_trained_chain(x, *weights, bias, **call.launches())
    return result


def is_one_launch(x: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> bool:
    """Whether one launch is expected to compute operands, which may be fake."""
    if len(weights) != 2:
        return False
    plan = layer_plans.plan_of_fakes(Operands(x, tuple(weights), bias, None), changing=True)
    return plan is not None and has_kernel(plan, x.device)


def has_kernel(plan: ExecutionPlan, device: torch.device) -> bool:
    """Whether one launch computes a plan's problem and stores the values between the factors.

    Args:
        plan: of weights that change.
        device: where.
    """
    if not plan.is_whole:
        return False
    if family_of(plan.ways[0]).stores_intermediate(plan.problem):
        return True
    return fastest_keeper(plan.problem, plan.batch, device) is not None


def fastest_keeper(problem: Problem, batch: int, device: torch.device) -> Candidate | None:
    """The fastest kernel that stores the values between the factors, if it beats `FACTORS`.

    A measurement with weights that change decides; without one, the predicted times.
    """
    backend = backend_of(device.type)
    key, spec = backend.key(problem, batch), backend.spec(device)
    known = plan_autotuner.known_record(key, device)
    if known is None:
        several = registry.best_predicted(problem, key.largest_batch, spec, is_judged=False)
        keepers = [one for one in several if one.name == FACTORS or _keeps(one)]
        return keepers[0] if keepers and _keeps(keepers[0]) else None
    record = known[0]
    for timed in sorted(record.timed, key=lambda one: one.median_us):
        if timed.weight in ("cached", "stored"):
            continue
        if timed.way == FACTORS:
            return None
        candidate = registry.restored(problem, timed.way, timed.config, record.batch, spec)
        if candidate is not None and _keeps(candidate):
            return candidate
    return None


def _keeps(candidate: Candidate) -> bool:
    return candidate.family is not None and candidate.family.stores_intermediate(candidate.problem)


@functools.lru_cache(maxsize=1024)
def _loaded(candidate: Candidate, device: int) -> Keeping | None:
    problem, family = candidate.problem, candidate.family
    if family is None or not family.stores_intermediate(problem):
        return None
    try:
        return family.storing_launcher(problem, candidate.tile, device)
    except KsoptError as error:
        registry.warn_once(str(error))
        return None
