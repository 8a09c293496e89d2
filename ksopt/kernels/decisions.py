"""Decisions on problems of one factor, a chain, two layers or gradients: taken and stored alike.

A rule decides where there is nothing to choose from, and with ``KSOPT_TUNE=off``. With
``KSOPT_TUNE=model`` the best predicted candidate is taken; so it is under
``torch.use_deterministic_algorithms``, because it is the same in every process, and for the rest of
the process where there is no memory to time in. Else what is recorded on disk (tuning_cache.py)
decides. What is not recorded is measured once (autotuner.py), by one thread and one process at a
time, and recorded then.

While a CUDA graph is captured, and while another thread is timing, nothing can be measured. What is
recorded serves then, else the best predicted; later calls decide again.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch

from ksopt import settings
from ksopt.errors import KsoptError, UnavailableError
from ksopt.kernels import registry, tuning_cache, weight_cache
from ksopt.kernels.autotuner import Choice, Decision, Source, rebuilt
from ksopt.kernels.problem import DeviceSpec, Problem, ProblemKey
from ksopt.kernels.tuning_cache import Fingerprint, Record
from ksopt.measure.interleaved import BUDGET_S

if TYPE_CHECKING:
    from ksopt.kernels.backends.base import DeviceBackend  # which knows this module: see cuda.py

Key = TypeVar("Key")
DecisionT = TypeVar("DecisionT")
DecisionT_co = TypeVar("DecisionT_co", covariant=True)


class Decidable(Protocol[DecisionT_co]):
    """Anything that a `Decider` decides: `Question`, and `gradient_autotuner.GradientQuestion`."""

    @property
    def device(self) -> torch.device:
        """Where it is computed, with its index."""

    @property
    def is_open(self) -> Callable[[], bool]:
        """Whether there is anything to choose from."""

    def rule(self) -> DecisionT_co:
        """The decision where nothing is chosen."""

    def recorded(self) -> DecisionT_co | None:
        """The decision on disk, built without timing; None if it is missing or cannot be built."""

    def predicted(self) -> DecisionT_co:
        """The best predicted candidate that can be built."""

    def first(self) -> DecisionT_co:
        """The recorded decision; else a measured one, unless another process measures meanwhile."""


@dataclass(frozen=True)
class Question:
    """A problem to be decided on a device.

    Attributes:
        key: what it is decided for.
        device: where it is computed, with its index.
        backend: of the device.
        race: times the candidates within a budget in seconds; a choice recorded before stays where
            it is not beaten.
        is_open: whether there is anything to choose from.
    """

    key: ProblemKey
    device: torch.device
    backend: DeviceBackend
    race: Callable[[float, Record | None], Decision]
    is_open: Callable[[], bool] = lambda: True

    def rule(self) -> Decision:
        """The decision where nothing is chosen."""
        return by_rule(self.key.problem)

    def recorded(self) -> Decision | None:
        """The decision on disk, built without timing; None if it is missing or cannot be built."""
        record = load(self.key, self.device, self.backend)
        if record is None:
            return None
        return rebuilt(record, _index(self.device), self.backend.spec(self.device))

    def predicted(self) -> Decision:
        """The best predicted candidate that can be built, for the key's largest batch."""
        return _predicted(self.key, _index(self.device), self.backend.spec(self.device))

    def first(self) -> Decision:
        """The recorded decision; else a measured one, unless another process measures meanwhile."""
        identity = identity_of(self.device, self.backend)
        return recorded_or_raced(
            *(identity, self.key, self.recorded, lambda: self.race(BUDGET_S, None)),
            record_of=_record_of,
        )


def recorded_or_raced(
    identity: Fingerprint | None,
    key: tuning_cache.Key,
    recorded: Callable[[], DecisionT | None],
    race: Callable[[], DecisionT],
    record_of: Callable[[DecisionT], tuning_cache.Stored],
) -> DecisionT:
    """The recorded decision, or that of a race, which is recorded: by one process at a time.

    Args:
        identity: as `identity_of` returns it.
        key: of the record.
        recorded: as of `Decidable`.
        race: takes a decision by timing.
        record_of: what was measured.
    """
    if identity is None:
        return race()
    decision = recorded()
    if decision is not None:
        return decision
    with tuning_cache.alone(identity, key):
        decision = recorded()
        if decision is None:
            decision = race()
            tuning_cache.save(identity, record_of(decision))
    return decision


class Decider(Generic[Key, DecisionT]):
    """Takes decisions, and stores those that are final for this process.

    Args:
        timing: the lock that is held while candidates are timed.
        keeps_stopgaps: whether a decision taken while nothing may be timed is stored for later
            calls, which saves reading the disk.

    Attributes:
        table: the decisions, by keys of the caller's, who may look them up.
        timing: the lock.
    """

    def __init__(
        self, timing: threading.Lock | threading.RLock, keeps_stopgaps: bool = False
    ) -> None:
        self.table: dict[Key, DecisionT] = {}
        self.timing = timing
        self._keeps_stopgaps = keeps_stopgaps
        self._stopgaps: dict[Key, DecisionT] = {}

    def decide(self, key: Key, question: Decidable[DecisionT]) -> tuple[DecisionT, bool]:
        """The decision, and whether later calls may use it.

        Measured and recorded decisions are stored under ``key``, as are those that a lack
        of memory forced; other decisions by a rule or the cost models are not.
        """
        deterministic = torch.are_deterministic_algorithms_enabled()
        known = None if deterministic else self.table.get(key)
        if known is not None:
            return known, True
        mode = settings.tuning()
        if mode == "off" or not question.is_open():
            return question.rule(), True
        if mode == "model" or deterministic:
            return question.predicted(), True
        if _is_capturing(question.device) or not self.timing.acquire(blocking=False):
            return self._stopgap(key, question), False
        try:
            decision = self.table.get(key)  # another thread may have been faster
            if decision is None:
                with _on(question.device):
                    decision = question.first()
            return self.table.setdefault(key, decision), True
        except torch.OutOfMemoryError:  # comparing and timing take more than the product itself
            return self.table.setdefault(key, question.predicted()), True
        finally:
            self.timing.release()

    def _stopgap(self, key: Key, question: Decidable[DecisionT]) -> DecisionT:
        """The decision where nothing may be timed at this moment."""
        decision = self._stopgaps.get(key) or question.recorded() or question.predicted()
        if self._keeps_stopgaps:
            self._stopgaps[key] = decision
        return decision

    def tune(
        self: Decider[Key, Decision],
        key: Key,
        question: Question,
        budget_s: float,
        register: Callable[[Decision], object],
    ) -> Record:
        """Measure even if a decision exists; store the new one here and on disk.

        Args:
            key: of the decision.
            question: what is decided.
            budget_s: seconds for the timing; compilation comes on top.
            register: called with the decision, before another thread may time.

        Raises:
            UnavailableError: the device cannot be queried, so nothing could be stored.
        """
        identity = question.backend.fingerprint(question.device)
        alone = tuning_cache.alone(identity, question.key)
        with self.timing, alone, _on(question.device):
            previous = tuning_cache.load(identity, question.key)
            decision = question.race(budget_s, previous)
            record = _record_of(decision)
            tuning_cache.save(identity, record)
            self.table[key] = decision
            register(decision)
        return record

    def forget(self) -> None:
        """Drop this process's decisions (not those on disk): later calls decide or read again."""
        self.table.clear()
        self._stopgaps.clear()
        _predicted.cache_clear()
        by_rule.cache_clear()


def known_record(
    decision: Decision | None, key: ProblemKey, device: torch.device, backend: DeviceBackend
) -> tuple[Record, Source] | None:
    """The usable measurement, and whether it was taken now or before; None if there is none.

    Args:
        decision: this process's, if there is one: only where there is none is the disk read.
        key: what it is decided for.
        device: where it is computed.
        backend: of the device.
    """
    if decision is not None:
        cached = decision.cached
        return None if cached.record is None else (cached.record, cached.source)
    record = load(key, device, backend)
    if record is None:
        return None
    spec = backend.spec(device)
    for index in record.indices:
        one = record.timed[index]
        if registry.restored(key.problem, one.way, one.config, record.batch, spec) is None:
            return None
    return record, "recorded"


def load(key: ProblemKey, device: torch.device, backend: DeviceBackend) -> Record | None:
    """The record on disk for a key; None if there is none."""
    identity = identity_of(device, backend)
    return None if identity is None else tuning_cache.load(identity, key)


def identity_of(device: torch.device, backend: DeviceBackend) -> Fingerprint | None:
    """The facts that decisions on a device depend on; None, and no storage, without its driver."""
    try:
        return backend.fingerprint(device)
    except UnavailableError:  # reading the device's spec warns
        return None


@functools.lru_cache(maxsize=4096)
def by_rule(problem: Problem) -> Decision:
    """The candidate where nothing is chosen."""
    candidate = registry.rule(problem)
    choice = Choice(candidate, candidate.build(-1), "rule")  # these need no device
    return Decision(choice, choice)


@functools.lru_cache(maxsize=4096)
def _predicted(key: ProblemKey, index: int, spec: DeviceSpec | None) -> Decision:
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
    rule = by_rule(key.problem)
    return Decision(rule.cached, rule.repacked, stored)


def _record_of(decision: Decision) -> Record:
    record = decision.cached.record
    assert record is not None
    return record


def with_index(device: torch.device) -> torch.device:
    """The device as its tensors name it."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _index(device: torch.device) -> int:
    """The index of the device, as `torch.Tensor.get_device` returns it."""
    return -1 if device.index is None else device.index


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """The device is the current one inside the block."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and weight_cache.is_capturing(device.index)
