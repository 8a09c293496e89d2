"""From a problem's key to a decision: candidates raced, or built again from a record."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from ksopt.errors import KsoptError, UnavailableError
from ksopt.kernels import merged, registry, tuning_cache, weight_scopes
from ksopt.kernels.candidate import Candidate
from ksopt.kernels.labels import PAIR
from ksopt.kernels.launcher import TORCH, Enterable, Entry
from ksopt.kernels.operands import Operands
from ksopt.kernels.problem import FEW_ROWS, SIXTEEN_BIT, DeviceSpec, ProblemKey
from ksopt.kernels.tuning_cache import Record, Timed
from ksopt.measure.benchmark_entry import BenchmarkEntry
from ksopt.measure.device_types import type_of
from ksopt.measure.interleaved import EntryResult, Rules, candidate_rules, race, winner
from ksopt.patterns.chain import Chain

log = logging.getLogger("ksopt.kernels")

Source = Literal["measured", "recorded", "model", "rule"]
Accept = Callable[[Tensor, bool], str | None]
"""Says what is wrong with a result, or None; the flag asks it to look closely."""
Pick = Callable[[Sequence[EntryResult], str, str | None], int]

# Products of a few rows in a sample, and what their weights may take together as dense matrices,
# which is the most that preparing makes of them.
_SERIES, _SERIES_BYTES = 8, 2**28


@dataclass(frozen=True)
class Choice:
    """The candidate that multiplies, and why it was taken.

    Attributes:
        candidate: with its configuration.
        call: a `Call` of one factor's product; an `MlpCall` of two layers; else a `ChainCall`.
        source: measured just now, recorded on disk, predicted by the model, or by a fixed rule.
        record: what was measured, now or then; None if nothing was.
    """

    candidate: Candidate
    call: Any
    source: Source
    record: Record | None = None

    @property
    def name(self) -> str:
        """A kernel family's name, or that of one of PyTorch's products."""
        return self.candidate.name

    @property
    def repacks(self) -> bool:
        """Whether the call prepares its weight each time, whatever the scope."""
        return isinstance(self.call, _Repacking)

    @property
    def times_us(self) -> tuple[tuple[str, float], ...]:
        """Measured median of every candidate in microseconds; empty if none was timed."""
        timed = () if self.record is None else self.record.timed
        return tuple((one.way, one.median_us) for one in timed)


@dataclass(frozen=True)
class Decision:
    """The choice for weights whose preparation is cached, and the one for weights that change.

    ``stored`` is the one for a module's parameters, where that is another one than ``cached``.
    """

    cached: Choice
    repacked: Choice
    stored: Choice | None = None


def measured(
    key: ProblemKey,
    operands: Operands,
    device: torch.device,
    spec: DeviceSpec | None,
    budget_s: float,
    accept: Accept,
    previous: Record | None = None,
    further: Sequence[Candidate] = (),
) -> Decision:
    """Build and time the candidates that are worth it.

    Args:
        key: what is decided for.
        operands: with that key.
        device: where they are.
        spec: the device's; None where its driver cannot be queried.
        budget_s: seconds for the timing; compilation comes on top.
        accept: says what is wrong with a result, or None; a kernel with a wrong result is not
            timed and cannot be chosen.
        previous: what was recorded before: its choice stays where it is not beaten.
        further: candidates beside those of the registry, behind which they stand.

    Raises:
        UnavailableError: no way could be built and run.
    """
    problem, rows = key.problem, _rows(key, operands.x)
    candidates = [*registry.candidates(problem, rows, spec), *further]
    built = registry.built(candidates, operands.x.get_device(), key.rows)
    # Copies, whose prepared forms go with them; ordinary ones, also where the weights are not.
    copies = [operands.copied() for _ in range(_series_of(key, operands))]
    arguments = [copy.arguments(problem) for copy in copies]
    last_resort = candidates[0]
    right = [
        (candidate, call)
        for candidate, call in built
        if candidate is last_resort or _is_right(candidate, call, arguments[0], accept)
    ]
    competitors = [
        Competitor(candidate, _preparing(call, mode), mode, arguments)
        for candidate, call in right
        for mode in _weights_timed(candidate, copies[0].weights)
    ]
    rules = candidate_rules(budget_s)
    record, ran = raced(key, rows, competitors, device, rules, previous=previous)
    choices = {
        index: Choice(ran[index].candidate, ran[index].call, "measured", record)
        for index in record.indices
    }
    return _decision(record, choices)


def _decision(record: Record, choices: Mapping[int, Choice]) -> Decision:
    # One object for both where one way serves both, so that nobody need ask which.
    stored = None if record.stored is None else choices[record.stored]
    return Decision(choices[record.cached], choices[record.repacked], stored)


@dataclass(frozen=True)
class Competitor:
    """A candidate in a race.

    Attributes:
        candidate: with its configuration.
        call: what is timed, once for each of ``arguments``.
        mode: whether that prepares the weight.
        arguments: of the products that make a sample, each by a weight of its own.
    """

    candidate: Candidate
    call: Any
    mode: tuning_cache.WeightMode
    arguments: Sequence[tuple[Any, ...]]

    def entry(self) -> BenchmarkEntry:
        """What takes part in the race."""
        series = partial(_multiply, self.call, self.arguments)
        modes = _WEIGHT_MODES[self.mode]
        return BenchmarkEntry(self.candidate.label, series, modes, products=len(self.arguments))

    def timed(self, result: EntryResult) -> Timed:
        """What the race has seen of it, for the record."""
        one = self.candidate
        predicted_us = one.predicted_us if math.isfinite(one.predicted_us) else None
        return Timed.of(result, one.name, self.mode, one.config, predicted_us)


def raced(
    key: ProblemKey,
    rows: int,
    competitors: Sequence[Competitor],
    device: torch.device,
    rules: Rules,
    pick: Pick = winner,
    previous: Record | None = None,
) -> tuple[Record, list[Competitor]]:
    """Let competitors race, and pick one for each weight mode: on every kind of device.

    Args:
        key: what is decided for.
        rows: of x.
        competitors: the simplest first.
        device: where the operands are.
        rules: of the race.
        pick: the index of the one to take, of the race's results for a weight mode and the name of
            what was chosen before.
        previous: what was recorded before.

    Returns:
        The record, and the competitors that ran, in its order.

    Raises:
        UnavailableError: none of them ran.
    """
    with weight_scopes.repacked(False):
        results = race(
            [one.entry() for one in competitors], type_of(device).race_timer(device), rules
        )
    ran = [it for it in zip(competitors, results, strict=True) if it[1].samples_us]
    if not ran:
        raise UnavailableError(
            f"no way to multiply by {key.problem.chain} ran on this device; the warnings above say "
            "why"
        )
    results = [result for _, result in ran]
    has_stored = any(one.mode == "stored" for one, _ in ran)
    record = Record(
        key,
        rows,
        tuple(one.timed(result) for one, result in ran),
        cached=pick(results, "cached", _previous(previous, "cached")),
        repacked=pick(results, "repacked", _previous(previous, "repacked")),
        stored=pick(results, "stored", _previous(previous, "stored")) if has_stored else None,
    )
    chosen = record.chosen(repacked=False)
    log.info("%s: %s is the fastest of %d ways", key.problem.chain, chosen.label, len(ran))
    return record, [one for one, _ in ran]


def _multiply(call: Any, arguments: Sequence[tuple[Any, ...]]) -> None:
    for one in arguments:
        call(*one)


def _series_of(key: ProblemKey, operands: Operands) -> int:
    bytes_each = operands.weights[0].element_size()
    return products_in_series(
        key.problem.chains, key.largest_batch, bytes_each * key.problem.siblings
    )


def products_in_series(chains: Sequence[Chain], batch: int, bytes_each: int) -> int:
    """How many products by weights of their own make one sample: see measure/interleaved.py.

    Args:
        chains: of the problem.
        batch: rows of x.
        bytes_each: bytes of an element, of all siblings together.

    Returns:
        1 above `FEW_ROWS` rows; otherwise at most 8, and no more than what takes 256 MiB if every
        factor is written out with its zeros.
    """
    if batch > FEW_ROWS:
        return 1
    patterns = [pattern for chain in chains for pattern in chain]
    dense_bytes = sum(one.in_features * one.out_features for one in patterns) * bytes_each
    return max(1, min(_SERIES, _SERIES_BYTES // dense_bytes))


def _rows(key: ProblemKey, x: Tensor) -> int:
    return x.numel() // key.problem.chain.in_features


def _is_right(candidate: Candidate, call: Any, arguments: tuple[Any, ...], accept: Accept) -> bool:
    problem = candidate.problem
    # In 16 bit cuBLAS may add partial sums in 16 bit, so PyTorch's ways are checked, too.
    if candidate.is_pytorch and not candidate.takes_parameters and problem.dtype not in SIXTEEN_BIT:
        return True
    try:
        y = call(*arguments)
    except RuntimeError:  # no memory, too many registers: the race says so
        return True
    if candidate.takes_parameters and not merged.is_cached(problem, arguments[1]):
        return False  # no memory for the merged form: the factors would be timed
    wrong = accept(y, candidate.takes_parameters)
    is_fault = candidate.family is not None and not candidate.family.by_pytorch
    if wrong is not None and is_fault:
        registry.warn_once(f"{candidate.label} for {problem.chain} is left out: {wrong}")
    return wrong is None


_WEIGHT_MODES: dict[tuning_cache.WeightMode, frozenset[str]] = {
    "any": frozenset({"cached", "repacked", "stored"}),
    "repacked": frozenset({"cached", "repacked", "stored"}),
    "cached": frozenset({"cached", "stored"}),
    "stored": frozenset({"stored"}),
}


def _weights_timed(
    candidate: Candidate, weights: Sequence[Tensor]
) -> Sequence[tuning_cache.WeightMode]:
    # The first of two equal times wins: "cached", because repacking costs every product. With
    # "repacked" first, (2,768,768,16) took 5 % longer in fp16, batch last.
    if candidate.takes_parameters:
        return ("stored",)
    if candidate.name == PAIR:  # weights that change have each factor's own choice
        return ("cached",)
    puts_in_order = candidate.needs_order and not all(w.is_contiguous() for w in weights)
    return ("cached", "repacked") if candidate.prepares_weight or puts_in_order else ("any",)


def _preparing(call: Any, weight_is: tuning_cache.WeightMode) -> Any:
    """The call as it was, or is to be, timed."""
    return _Repacking(call) if weight_is == "repacked" else call


@dataclass(frozen=True)
class _Repacking:
    """A way that prepares its weight at each call."""

    call: Any

    def __call__(self, *arguments: Any) -> Tensor:
        with weight_scopes.repacked():
            y: Tensor = self.call(*arguments)
            return y

    def entry(self) -> Entry | None:
        """What the host library needs to do so: it makes matrices, and puts elements in order."""
        entry = self.call.entry() if isinstance(self.call, Enterable) else None
        if entry is not None and entry.kind == TORCH:
            return replace(entry, repacks=True)
        return entry if entry is not None and entry.repacks else None


def _previous(record: Record | None, mode: str) -> str | None:
    if record is None:
        return None
    at = {"cached": record.cached, "repacked": record.repacked, "stored": record.stored}[mode]
    return None if at is None else record.timed[at].label


def rebuilt(record: Record, device: int, spec: DeviceSpec | None) -> Decision | None:
    """What was recorded, built again without timing; None if it is no longer possible.

    Args:
        record: of this device.
        device: its index.
        spec: the device; None where its driver cannot be queried.
    """
    problem = record.key.problem
    choices: dict[int, Choice] = {}
    for index in record.indices:
        chosen = record.timed[index]
        candidate = registry.restored(problem, chosen.way, chosen.config, record.batch, spec)
        if candidate is None:
            return None
        try:
            call = _preparing(candidate.build(device, record.key.rows), chosen.weight)
        except KsoptError as error:
            registry.warn_once(str(error))
            return None
        choices[index] = Choice(candidate, call, "recorded", record)
    return _decision(record, choices)
