"""The choice of a plan for a problem of more than one factor: one launch, or its parts.

The rivals are families that take chains, and one product where that may be as fast (mergeable.py).
Without rivals one launch per factor computes a problem, and no call measures it as a whole: that
would take half a second at the first call of each layer. ``ksopt tune`` does, and compiled graphs
do where it decides what they launch; a pair of kernels (factor_pairs.py) that is the fastest then
computes the problem in all calls.
Otherwise the plans race on the operands of the call (plan_race.py), by the rules of a race between
one factor's kernels (autotuner.py). They are decided and stored like these (decisions.py), under
the key of the chain, its epilogue and its siblings. The parts of a problem of two layers are the
layers, each by its own plan.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ksopt import precision
from ksopt.kernels import decisions, host_plans, merged, plan_race, registry, weight_cache
from ksopt.kernels.autotuner import Decision, Source
from ksopt.kernels.backends.base import backend_of
from ksopt.kernels.candidate import APART
from ksopt.kernels.decisions import Decider, Question
from ksopt.kernels.families.base import CHAIN_FAMILIES
from ksopt.kernels.labels import PAIR
from ksopt.kernels.operands import Operands, key_of, random_operands
from ksopt.kernels.problem import DeviceSpec, Problem, ProblemKey
from ksopt.kernels.tuning_cache import Record
from ksopt.measure.interleaved import BUDGET_S

# Its lock may be taken again: the plans of two layers are chosen before these race with a kernel.
_decider: Decider[tuple[ProblemKey, torch.device], Decision] = Decider(threading.RLock())
_decisions = _decider.table
_by_call: dict[tuple[Any, ...], Decision] = {}
"""The same decisions, by keys that a call computes in a microsecond."""
_has_spec: dict[torch.device, bool] = {}


def decision_of(
    operands: Operands,
    what: tuple[Any, ...],
    make: Callable[[], Problem],
    check: Callable[[], object] | None = None,
) -> tuple[Decision | None, bool]:
    """The decision for operands, and whether later calls may use it.

    Args:
        operands: of a problem.
        what: all that distinguishes problems of such operands.
        make: returns the problem.
        check: raises where the operands do not fit together; None where they are known to. It is
            called once for operands of such shapes, dtypes and devices.

    Returns:
        The decision, None where there is nothing to decide, as for one factor; and that.
    """
    x = operands.x
    tensors = (x, *operands.weights, operands.bias, operands.residual, operands.hidden_bias)
    if x.numel() == 0 or not all(map(_is_array, tensors)):  # what multiplies refuses the latter
        return None, False
    if not CHAIN_FAMILIES or not _runs_kernels(x.device):
        return None, True
    place = (
        *map(_kind, tensors),
        *(x.stride(), x.data_ptr() % 16, *what),
        *(precision.is_exact(), torch.are_deterministic_algorithms_enabled()),
    )
    decision = _by_call.get(place)
    if decision is None:
        if check is not None:
            check()
        problem = make()
        if problem.is_factor:
            return None, True  # the factor's own choice
        decision, is_final = _decision(problem, operands)
        if is_final:
            _by_call[place] = decision
    is_known = _by_call.get(place) is decision
    return decision, is_known and not torch.are_deterministic_algorithms_enabled()


def call_of(decision: Decision, operands: Operands) -> Any:
    """The `ChainCall` for weights as they are now; None for several launches."""
    x = operands.x
    repacked = weight_cache.are_marked_repacked() or (
        x.is_cuda and weight_cache.are_repacked(x.get_device())
    )
    choice = decision.repacked if repacked else decision.cached
    if decision.stored is not None and not repacked:
        problem = decision.stored.candidate.problem
        choice = decision.stored if merged.may_keep(problem, operands.weights) else choice
    return None if choice.name in APART else choice.call


def tune(
    operands: Operands, problem: Problem, budget_s: float, *, alone: bool = False
) -> Record | None:
    """Measure for these operands even if a choice exists; store the result here and on disk.

    Args:
        operands: of the problem.
        problem: of more than a factor.
        budget_s: seconds for the timing; compilation comes on top.
        alone: whether to measure launches per factor, too, where nothing competes with them.

    Returns:
        The measurement; None where no candidate computes the whole problem, so that only its
        factors can be tuned.
    """
    question = _question(problem, operands)
    if not (alone or question.is_open()):
        return None
    return _decider.tune((question.key, question.device), question, budget_s, _forget_calls)


def tuned(
    problem: Problem, batch: int, device: torch.device, *, alone: bool = False
) -> Record | None:
    """The record of a problem; if there is none, it is measured now on random operands.

    Args:
        problem, batch, device: of operands.
        alone: as for `tune`.

    Returns:
        None where nothing computes the whole problem, unless it is ``alone``.
    """
    backend = backend_of(device.type)
    known = known_record(backend.key(problem, batch), device)
    if known is not None:
        return known[0]
    operands = random_operands(problem, batch, device)
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        return tune(operands, problem, BUDGET_S, alone=alone)


def known_record(key: ProblemKey, device: torch.device) -> tuple[Record, Source] | None:
    """The usable measurement of this process or from disk, and its origin; None without one."""
    decision = _decisions.get((key, decisions.with_index(device)))
    return decisions.known_record(decision, key, device, backend_of(device.type))


def forget() -> None:
    """Drop this process's choices (not those on disk): later calls choose or read again."""
    _decider.forget()
    _has_spec.clear()
    _forget_calls()


def _forget_calls(_: Decision | None = None) -> None:
    _by_call.clear()
    host_plans.forget()


def _decision(problem: Problem, operands: Operands) -> tuple[Decision, bool]:
    """The decision, and whether it holds for later calls too."""
    question = _question(problem, operands)
    return _decider.decide((question.key, question.device), question)


def _question(problem: Problem, operands: Operands) -> Question:
    key, device = key_of(problem, operands.x), operands.x.device
    backend, race = backend_of(device.type), partial(plan_race.race, key, operands)

    def is_open() -> bool:
        return has_rivals(key, backend.spec(device)) or has_pair(key, device)

    return Question(key, device, backend, race, is_open)


def has_rivals(key: ProblemKey, spec: DeviceSpec | None) -> bool:
    """Whether anything computes the whole problem on a device, so that there is a choice."""
    return spec is not None and registry.are_rivals(key.problem, key.largest_batch, spec)


def has_pair(key: ProblemKey, device: torch.device) -> bool:
    """Whether a pair of kernels was measured to be the fastest for the factors of a problem."""
    if not registry.takes_pair(key.problem) or not _runs_kernels(device):
        return False
    known = known_record(key, device)
    return known is not None and known[0].chosen(repacked=False).way == PAIR


def _runs_kernels(device: torch.device) -> bool:
    known = _has_spec.get(device)
    if known is None:
        known = _has_spec[device] = backend_of(device.type).spec(device) is not None
    return known


def _is_array(tensor: Tensor | None) -> bool:
    """Whether a tensor's numbers lie in memory at strides: not of sparse or nested ones."""
    return tensor is None or (tensor.layout is torch.strided and not tensor.is_nested)


def _kind(tensor: Tensor | None) -> tuple[Any, ...] | None:
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.device)
