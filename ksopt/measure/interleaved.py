"""Races between entries that compute the same, within a time bound, and their winners.

Entries take turns, round by round, in an order that rotates, so that a clock that drops or a
neighbour that wakes up hurts them all alike. Entries that cannot win are dropped, and a race ends
where its medians are certain.

A product of a few rows takes hardly longer than the start and the end of its kernels, and follows
others at once where a model decodes, so its sample is a series: several products, each by a weight
of its own that the cache has not seen.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ksopt.measure.benchmark_entry import BenchmarkEntry, Lane
from ksopt.measure.measurement import Measurement, Quantile, quantile_sample
from ksopt.measure.timers import Timer

BUDGET_S = 0.5
"""Time for the timing of one problem, compilation apart; a round that has begun is finished."""

# Entries so slow that the fewest rounds would take three times the budget get fewer, at least 3.
_FEWEST_IF_SLOW, _SLOW = 3, 3.0
# Dropped in the warm-up: entries of more than this many times the fastest, and this long.
_FAR_BEHIND = 5.0
_LONG_US = 2000.0
# Medians closer than the first, or whose samples differ by fewer microseconds, are not told
# apart; nor are those closer than the last that lie inside the fastest's own spread.
_TIE, _TIE_US, _NOISY_TIE = 1.01, 0.2, 1.05
# A host's times vary: a launch that takes less than this share of another's is quicker.
_QUICKER = 0.8

WarmUp = Callable[[Sequence[Lane], Timer], list[Lane]]
"""(lanes, timer) -> those worth a race, called before: what they compile and load is done."""


@dataclass(frozen=True)
class EntryResult:
    """The result of an entry in a race.

    Attributes:
        entry: the entry.
        samples_us: of a product; empty if it could not run.
        measurement: their summary; None if it could not run.
        host_us: host time of a product while its core is free; infinite if unknown.
    """

    entry: BenchmarkEntry
    samples_us: tuple[float, ...]
    measurement: Measurement | None
    host_us: float = math.inf


@dataclass(frozen=True)
class Rules:
    """The rules of a race: how it is run, and when it ends.

    Attributes:
        warm_up: what comes before the first round.
        budget_s: about how long the rounds may take.
        most_rounds: after which it ends whatever is left.
        fewest_rounds: that are taken even if they take longer than the budget.
        precision: it ends where every median's standard error is below this share of it; None: not
            before the budget.
        enough_rounds: that are taken even if the medians are as certain.
        hopeless: rounds -> ratio: after these rounds, an entry slower than this ratio times the
            fastest of each of its weight modes is given up. One round may have met a hiccup.
        against: name of the entry that takes the place of each mode's fastest, and is not given
            up itself; where all others are, the race is over.
        budget_with_warm_up: whether the warm-up is part of the budget.
        quantile: by which samples are summed up.
    """

    warm_up: WarmUp
    budget_s: float
    most_rounds: int
    fewest_rounds: int = 1
    precision: float | None = None
    enough_rounds: int = 1
    hopeless: Mapping[int, float] = field(default_factory=dict)
    against: str | None = None
    budget_with_warm_up: bool = False
    quantile: Quantile = quantile_sample

    def hopeful(self, rounds: int, alive: list[Lane]) -> list[Lane]:
        """The lanes to sample further after this many rounds; the others are given up."""
        if rounds not in self.hopeless:
            return alive
        # Of no sample that counts nothing is known yet.
        best = {id(lane): min(lane.samples_us, default=0.0) for lane in alive}
        fastest: dict[str, float] = {}
        for lane in alive:
            leads = self.against in (None, lane.entry.name)
            for mode in lane.entry.weight_modes if leads and lane.samples_us else ():
                fastest[mode] = min(fastest.get(mode, math.inf), best[id(lane)])
        for lane in alive:
            limits = [
                self.hopeless[rounds] * fastest.get(n, math.inf) for n in lane.entry.weight_modes
            ]
            behind = bool(limits) and best[id(lane)] > max(limits)
            lane.given_up = behind and lane.entry.name != self.against
        return [lane for lane in alive if not lane.given_up]

    def is_over(self, rounds: int, spent_s: float, alive: Sequence[Lane]) -> bool:
        """Whether a race is over after this many rounds and seconds."""
        if rounds in self.hopeless and all(lane.entry.name == self.against for lane in alive):
            return True
        fewest = self._at_least(self.fewest_rounds, rounds, spent_s)
        if rounds >= fewest and spent_s >= self.budget_s:
            return True
        enough = self._at_least(self.enough_rounds, rounds, spent_s)
        return rounds >= enough and all(map(self._is_certain, alive))

    def _at_least(self, least: int, rounds: int, spent_s: float) -> int:
        if spent_s / rounds * least <= _SLOW * self.budget_s:
            return least
        return min(least, max(_FEWEST_IF_SLOW, int(_SLOW * self.budget_s * rounds / spent_s)))

    def _is_certain(self, lane: Lane) -> bool:
        if self.precision is None or not lane.samples_us:
            return False
        measured = Measurement.of(lane.samples_us, quantile=self.quantile)
        return measured.standard_error <= self.precision


def race(entries: Sequence[BenchmarkEntry], timer: Timer, rules: Rules) -> list[EntryResult]:
    """Sample entries in turns.

    Args:
        entries: what takes part.
        timer: of the device that they compute on.
        rules: how long to sample, and when to give up an entry.

    Returns:
        A result for each entry, in their order.
    """
    lanes = [Lane(entry) for entry in entries]
    with timer.scope():
        begun = time.perf_counter()
        alive = rules.warm_up(lanes, timer)
        begun = begun if rules.budget_with_warm_up else time.perf_counter()
        for rounds in range(1, rules.most_rounds + 1 if alive else 1):
            turn = (rounds - 1) % len(alive)
            timer.sample(alive[turn:] + alive[:turn])
            alive = rules.hopeful(rounds, alive)
            if rules.is_over(rounds, time.perf_counter() - begun, alive):
                break
    return [_result(lane, rules.quantile) for lane in lanes]


def _result(lane: Lane, quantile: Quantile) -> EntryResult:
    host_us = min(lane.launches_us, default=math.inf) / lane.calls / lane.entry.products
    samples_us = lane.samples_us or lane.late_us  # for want of better
    return EntryResult(lane.entry, tuple(samples_us), lane.measurement(quantile), host_us)


def candidate_rules(budget_s: float) -> Rules:
    """The rules for a problem's candidates on a device with cold caches: some tens of rounds.

    Args:
        budget_s: about how long the timed rounds may take; at least three are run.
    """
    return Rules(
        warm_up=warm_up_candidates,
        budget_s=budget_s,
        most_rounds=25,
        fewest_rounds=3,
        precision=0.005,
        enough_rounds=7,
        hopeless={2: 2.0, 5: 1.2},
    )


def warm_up_candidates(lanes: Sequence[Lane], timer: Timer) -> list[Lane]:
    """Call each entry twice; leave out those that fail, and call those far behind no further."""
    alive: list[Lane] = []
    fastest: dict[str, float] = {}
    for lane in lanes:
        entry = lane.entry
        try:
            for _ in range(2):
                took_us, host_us = timer.called(lane.launch)
                for mode in entry.weight_modes:
                    fastest[mode] = min(fastest.get(mode, math.inf), took_us)
                far = _FAR_BEHIND * max(fastest[mode] for mode in entry.weight_modes)
                if took_us - host_us > max(far, _LONG_US):  # of the device alone: see `called`
                    lane.samples_us.append(took_us / entry.products)  # for the record
                    lane.given_up = True
                    break
            else:
                lane.launches_us.append(host_us)
                alive.append(lane)
        except torch.OutOfMemoryError:  # an expanded weight may not fit; its rivals do
            continue
        except RuntimeError as error:
            warnings.warn(
                f"ksopt: {entry.name} cannot run on this device and is left out. {error}",
                RuntimeWarning,
                stacklevel=2,
            )
    return alive


def warm_up_calls(calls: int, long_us: float = math.inf) -> WarmUp:
    """Call each entry this many times; the last call counts as a sample if calls are long.

    A lane with a long call is given up if it takes twice as long as another such lane.

    Args:
        calls: of each, at least 1.
        long_us: the time from which a call is long.
    """

    def warm_up(lanes: Sequence[Lane], timer: Timer) -> list[Lane]:
        for lane in lanes:
            took_us = [timer.called(lane.launch)[0] for _ in range(calls)][-1]
            if took_us > long_us:
                lane.samples_us.append(took_us / lane.entry.products)
        limit_us = 2 * min((us for lane in lanes for us in lane.samples_us), default=math.inf)
        for lane in lanes:
            lane.given_up = min(lane.samples_us, default=0.0) > limit_us
        return [lane for lane in lanes if not lane.given_up]

    return warm_up


def quickest(results: Sequence[EntryResult]) -> int:
    """The index of the entry with the least sample, which is chosen on a CPU.

    Anything else that runs makes a product slower, never faster: the least time is the truest.
    """
    ran = [(min(one.samples_us), index) for index, one in enumerate(results) if one.samples_us]
    return min(ran)[1]


def winner(results: Sequence[EntryResult], mode: str, previous: str | None = None) -> int:
    """The index of the winner: the first of the fastest and those not distinguished from it.

    Where the device would wait for the host, only those count that take the host least, of those
    that the device does as fast within a fifth of a microsecond.

    Args:
        results: of a `race`, the simplest first.
        mode: of the entries that count.
        previous: name of the previous choice, which stays if it is not distinguished either.

    Raises:
        ValueError: none of them ran.
    """
    ran = [
        (index, one, one.measurement)
        for index, one in enumerate(results)
        if mode in one.entry.weight_modes and one.measurement is not None
    ]
    _, best, fastest = min(ran, key=lambda it: it[2].median_us)
    fastest_us = fastest.median_us
    spread_us = min(fastest.p80_us, _NOISY_TIE * fastest_us)
    limit = max(_TIE * fastest_us, fastest_us + _TIE_US / best.entry.products, spread_us)
    tied = [(index, one) for index, one, took in ran if took.median_us <= limit]
    if fastest_us < best.host_us < math.inf:
        most_us = max(limit, fastest_us + _TIE_US)
        near = [(index, one) for index, one, took in ran if took.median_us <= most_us]
        least_us = min(one.host_us for _, one in near)
        quick = [(index, one) for index, one in near if _QUICKER * one.host_us <= least_us]
        tied = [it for it in tied if it in quick] or quick
    stays = (index for index, one in tied if one.entry.name == previous)
    return next(stays, tied[0][0])
