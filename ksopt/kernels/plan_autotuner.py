"""Which plan computes a problem of more than a factor: one launch for all of it, or its parts.

Families that take chains are asked, and whether one product may be as fast (mergeable.py). Where
neither is, a launch a factor computes a problem, and nothing is measured for it as a whole.
Otherwise the plans race on the operands of the call (plan_race.py), by the rules that one factor's
kernels race by (autotuner.py). The choice is kept beside theirs, under the key of the chain, its
epilogue and its siblings. Of two layers the parts are the layers, each by its own plan.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ksopt import precision, settings
from ksopt.errors import KsoptError, UnavailableError
from ksopt.kernels import host_plans, merged, plan_race, registry, tuning_cache, weight_cache
from ksopt.kernels.autotuner import Choice, Decision, Source, rebuilt
from ksopt.kernels.backends.base import backend_of
from ksopt.kernels.families.base import CHAIN_FAMILIES
from ksopt.kernels.operands import Operands, key_of, random_operands
from ksopt.kernels.problem import DeviceSpec, Problem, ProblemKey
from ksopt.kernels.registry import APART
from ksopt.kernels.tuning_cache import Fingerprint, Record
from ksopt.measure.interleaved import BUDGET_S

_decisions: dict[tuple[ProblemKey, torch.device], Decision] = {}
_by_call: dict[tuple[Any, ...], Decision] = {}
"""The same decisions, by what a call can tell in a microsecond."""
_has_spec: dict[torch.device, bool] = {}
_timing = threading.RLock()  # the plans of two layers are chosen before these race with a kernel


def decision_of(
    operands: Operands,
    what: tuple[Any, ...],
    make: Callable[[], Problem],
    check: Callable[[], object] | None = None,
) -> tuple[Decision | None, bool]:
    """What is decided of operands; whether later calls may take it.

    Args:
        operands: of a problem.
        what: all that tells one problem of such operands from another one.
        make: gives the problem.
        check: raises where the operands do not fit together; None where they are known to. It is
            asked once for operands of such shapes, dtypes and devices.

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
    """What is launched for weights as they are now, a `ChainCall`; None for several launches."""
    x = operands.x
    changing = weight_cache.are_said_to_change() or (
        x.is_cuda and weight_cache.are_changing(x.get_device())
    )
    choice = decision.repacked if changing else decision.cached
    if decision.stored is not None and not changing:
        problem = decision.stored.candidate.problem
        choice = decision.stored if merged.may_keep(problem, operands.weights) else choice
    return None if choice.name in APART else choice.call


def tune(operands: Operands, problem: Problem, budget_s: float) -> Record | None:
    """Measure for these operands even if a choice exists; keep it here and on disk.

    Args:
        operands: of the problem.
        problem: of more than a factor.
        budget_s: seconds for the timing; compilation comes on top.

    Returns:
        What was measured; None where nothing computes the whole problem, so that its factors are
        all there is to tune.
    """
    x = operands.x
    backend = backend_of(x.device.type)
    key = key_of(problem, x)
    if not has_rivals(key, backend.spec(x.device)):
        return None
    identity = backend.fingerprint(x.device)
    with _timing, tuning_cache.alone(identity, key), _on(x.device):
        decision = plan_race.race(key, operands, tuning_cache.load(identity, key), budget_s)
        record = decision.cached.record
        assert record is not None
        tuning_cache.save(identity, record)
    _decisions[key, x.device] = decision
    _by_call.clear()
    host_plans.forget()
    return record


def tuned(problem: Problem, batch: int, device: torch.device) -> Record | None:
    """What is recorded of a problem; else it is measured now, on random operands.

    Returns:
        None where nothing computes the whole problem.
    """
    backend = backend_of(device.type)
    known = known_record(backend.key(problem, batch), device, backend.spec(device))
    if known is not None:
        return known[0]
    operands = random_operands(problem, batch, device)
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        return tune(operands, problem, BUDGET_S)


def known_record(
    key: ProblemKey, device: torch.device, spec: DeviceSpec | None
) -> tuple[Record, Source] | None:
    """What was measured here or recorded on disk, and which; None if that is no longer possible."""
    decision = _decisions.get((key, _with_index(device)))
    if decision is not None and decision.cached.record is not None:
        return decision.cached.record, decision.cached.source
    identity = _identity(device)
    record = None if identity is None else tuning_cache.load(identity, key)
    if record is None:
        return None
    for index in record.indices:
        one = record.timed[index]
        if registry.restored(key.problem, one.way, one.config, record.batch, spec) is None:
            return None
    return record, "recorded"


def forget() -> None:
    """Forget this process's choices (not those on disk), so that they are made or read anew."""
    _decisions.clear()
    _by_call.clear()
    _has_spec.clear()
    _predicted.cache_clear()
    host_plans.forget()


def _decision(problem: Problem, operands: Operands) -> tuple[Decision, bool]:
    """What is decided, and whether that holds for later calls too."""
    x = operands.x
    key = key_of(problem, x)
    spec, mode = backend_of(x.device.type).spec(x.device), settings.tuning()
    index, deterministic = x.get_device(), torch.are_deterministic_algorithms_enabled()
    known = None if deterministic else _decisions.get((key, x.device))
    if known is not None:
        return known, True
    if mode == "off" or not has_rivals(key, spec):
        return _by_rule(key, index), True
    if mode == "model" or deterministic:
        return _predicted(key, index, spec), True
    if _is_capturing(x) or not _timing.acquire(blocking=False):
        return _recorded(key, x, spec) or _predicted(key, index, spec), False
    try:
        with _on(x.device):
            decision = _first(key, operands, spec)
    except torch.OutOfMemoryError:  # comparing and timing take more than the product itself
        decision = _predicted(key, index, spec)
    finally:
        _timing.release()
    return _decisions.setdefault((key, x.device), decision), True


def _first(key: ProblemKey, operands: Operands, spec: DeviceSpec | None) -> Decision:
    """What is recorded; else measure, if no other process does so while this one waits."""
    x = operands.x
    identity = _identity(x.device)
    if identity is None:
        return plan_race.race(key, operands)
    decision = _recorded(key, x, spec)
    if decision is not None:
        return decision
    with tuning_cache.alone(identity, key):
        decision = _recorded(key, x, spec)
        if decision is None:
            decision = plan_race.race(key, operands)
            assert decision.cached.record is not None
            tuning_cache.save(identity, decision.cached.record)
    return decision


def _recorded(key: ProblemKey, x: Tensor, spec: DeviceSpec | None) -> Decision | None:
    """What is on disk, built again without timing; None if it is missing or no longer possible."""
    identity = _identity(x.device)
    record = None if identity is None else tuning_cache.load(identity, key)
    return None if record is None else rebuilt(record, x.get_device(), spec)


@functools.lru_cache(maxsize=4096)
def _predicted(key: ProblemKey, index: int, spec: DeviceSpec | None) -> Decision:
    """The best predicted candidate that can be built, for the key's largest batch."""
    stored: Choice | None = None
    several = registry.best_predicted(key.problem, key.largest_batch, spec, is_judged=False)
    for candidate in several:
        try:
            choice = Choice(candidate, candidate.build(index, key.rows), "model")
        except KsoptError as error:
            registry.warn_once(str(error))
            continue
        if not candidate.takes_parameters:
            return Decision(choice, choice, stored)
        stored = choice
    by_rule = _by_rule(key, index)
    return Decision(by_rule.cached, by_rule.repacked, stored)


def _by_rule(key: ProblemKey, index: int) -> Decision:
    candidate = registry.rule(key.problem)
    choice = Choice(candidate, candidate.build(index), "rule")
    return Decision(choice, choice)


def _with_index(device: torch.device) -> torch.device:
    """The device as its tensors name it."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def has_rivals(key: ProblemKey, spec: DeviceSpec | None) -> bool:
    """Whether anything computes the whole problem on a device, so that there is a choice."""
    return spec is not None and registry.are_rivals(key.problem, key.largest_batch, spec)


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


def _identity(device: torch.device) -> Fingerprint | None:
    try:
        return backend_of(device.type).fingerprint(device)
    except UnavailableError:  # without its driver nothing is kept
        return None


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """The device is the current one inside the block."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _is_capturing(x: Tensor) -> bool:
    return x.is_cuda and weight_cache.is_capturing(x.get_device())
