"""A trained chain's forward pass in one launch: y, and what is between its two factors.

The backward pass reads the latter for a weight's gradient. Which kernel, and whether one, is the
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
from ksopt.kernels import layer_plans, registry
from ksopt.kernels.families.base import family_of
from ksopt.kernels.operands import Operands
from ksopt.kernels.plan import ExecutionPlan

Keeping = Callable[[Tensor, Sequence[Tensor], Tensor | None], tuple[Tensor, Tensor]]
"""(x, weights, bias) -> y and what is between the factors."""


@runtime_checkable
class Launched(Protocol):
    """A `Keeping` that the host library can do by itself."""

    def launches(self) -> dict[str, int]:
        """What holds for any rows, as ``know_trained_chain`` of csrc/host names it."""


def run(x: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """y [*batch, M] and what is between the factors, by a kernel; None for a launch a factor.

    Args:
        x: [*batch, N].
        weights: of two factors, left to right.
        bias: [M], or None.
    """
    operands = Operands(x, tuple(weights), bias, None)
    candidate, is_final = layer_plans.chosen_for_changing(operands)
    if candidate is None or candidate.family is None:
        return None
    call = _loaded(candidate, x.get_device())
    if call is None:
        return None
    made = call(x, weights, bias)
    if is_final and isinstance(call, Launched) and host.is_loaded():
        torch.ops.ksopt_host.know_trained_chain(x, *weights, bias, **call.launches())
    return made


def is_kept_whole(x: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> bool:
    """Whether one launch is expected to take operands, which may be fake."""
    if len(weights) != 2:
        return False
    plan = layer_plans.plan_of_fakes(Operands(x, tuple(weights), bias, None), changing=True)
    return plan is not None and is_kept(plan)


def is_kept(plan: ExecutionPlan) -> bool:
    """Whether a plan is one launch, of a kernel that can keep what is between the factors."""
    keeps: bool = plan.is_whole and family_of(plan.ways[0]).keeps_between(plan.problem)
    return keeps


@functools.lru_cache(maxsize=1024)
def _loaded(candidate: registry.Candidate, device: int) -> Keeping | None:
    problem, family = candidate.problem, candidate.family
    if family is None or not family.keeps_between(problem):
        return None
    try:
        return family.keeping_launcher(problem, candidate.tile, device)
    except KsoptError as error:
        registry.warn_once(str(error))
        return None
