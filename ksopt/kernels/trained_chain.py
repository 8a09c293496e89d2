"""The forward pass of trained chains in one launch: y, and the values between their factors.

They are one chain, or siblings that read one x. The backward pass reads the values between for
weights' gradients. The weights may be packed for the
kernel of x's gradient, too (`input_gradients`), in the same launch. Whether one launch is used is
the planner's choice for weights that change. Once it is known, the host library serves such calls
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
from ksopt.kernels import input_gradients, layer_plans, plan_autotuner, registry
from ksopt.kernels.backends.base import backend_of
from ksopt.kernels.candidate import FACTORS, Candidate
from ksopt.kernels.families.base import family_of
from ksopt.kernels.families.common import input_grad_tile
from ksopt.kernels.operands import Operands
from ksopt.kernels.plan import ExecutionPlan
from ksopt.kernels.problem import Problem

Three = tuple[Tensor, Tensor, Tensor]
Keeping = Callable[[Tensor, Sequence[Tensor], Tensor | None], Three]
"""(x, weights, bias) -> y, the values between the factors, the weights packed for x's gradient."""


@runtime_checkable
class Launched(Protocol):
    """A `Keeping` that the host library can run without Python."""

    def launches(self) -> dict[str, int]:
        """The launch for any number of rows, as ``know_trained_chain`` of csrc/host takes it."""


def run(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    siblings: int,
    activation: str = "none",
    packed: int = 0,
) -> Three | None:
    """What `Keeping` returns, by a kernel; None: a launch per factor.

    Args:
        x: [*batch, N].
        weights: of two factors, left to right, sibling after sibling.
        bias: [siblings * M], or None.
        siblings: how many chains.
        activation: of y.
        packed: elements of the weights for x's gradient; 0 for none.
    """
    operands = Operands(x, tuple(weights), bias, None)
    chosen, is_final = layer_plans.chosen_for_repacked(operands, siblings, activation)
    if chosen is None:
        return None
    problem = chosen.problem
    batch = x.numel() // problem.chain.in_features
    candidate = chosen if _keeps(chosen) else fastest_keeper(problem, batch, x.device)
    if candidate is None:
        return None
    of_grad = _tile_of_grad(x, weights, packed)
    call = _loaded(candidate, x.get_device(), of_grad)
    if call is None:
        return None
    y, between, own = call(x, weights, bias)
    if own.numel() != packed:
        return y, between, packed_of_grad(x, weights, packed)
    if is_final and isinstance(call, Launched) and host.is_loaded():
        torch.ops.ksopt_host.know_trained_chain(
            x, list(weights), bias, siblings, activation, packed, **call.launches()
        )
    return y, between, own


def packed_of_grad(x: Tensor, weights: Sequence[Tensor], packed: int) -> Tensor:
    """The weights packed for x's gradient, by a launch of their own.

    Args:
        x: [*batch, N].
        weights: as of `run`.
        packed: elements of the result. It is not initialized where no kernel will read it.
    """
    of_grad = None
    if packed:
        of_grad = input_gradients.packed_for(weights, x.numel() // x.shape[-1])
    if of_grad is None or of_grad.numel() != packed:
        return x.new_empty(packed)
    return of_grad


def _tile_of_grad(
    x: Tensor, weights: Sequence[Tensor], packed: int
) -> input_grad_tile.Config | None:
    """The tile that weights are packed for, if its packed weights have this many elements."""
    if not packed:
        return None
    shape = input_gradients.shape_of(weights)
    tile = input_gradients.tile_of(shape, x.dtype, x.numel() // x.shape[-1], x.device)
    return tile if tile is not None and tile.packed_elements(shape) == packed else None


def is_one_launch(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    siblings: int,
    activation: str = "none",
) -> bool:
    """Whether one launch is expected to compute operands of `run`, which may be fake."""
    operands = Operands(x, tuple(weights), bias, None)
    plan = layer_plans.plan_of_fakes(operands, activation, siblings=siblings, repacked=True)
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
def _loaded(
    candidate: Candidate, device: int, of_grad: input_grad_tile.Config | None
) -> Keeping | None:
    problem, family = candidate.problem, candidate.family
    if family is None or not family.stores_intermediate(problem):
        return None
    try:
        return family.storing_launcher(problem, candidate.tile, device, of_grad)
    except KsoptError as error:
        registry.warn_once(str(error))
        return None
