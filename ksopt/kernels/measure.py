"""Time ways to multiply against each other on a CUDA device, within a bound, and say who wins.

Ways take turns, so that a clock that drops hurts all alike. Before each sample the L2 cache is
overwritten: in a model, other layers have been there since, and small operands that stayed in the
cache would make the fastest way look faster than it will be. The overwriting also keeps the device
busy while the host launches a sample, so what is timed is the device's work.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

BUDGET_S = 0.5
"""Time for the timing of one problem, compilation apart; a round that has begun is finished."""

_MOST_ROUNDS = 25
_FEWEST_ROUNDS = 3
# Dropped after the first rounds: what takes more than this many times the fastest. One round alone
# may have met a hiccup.
_HOPELESS = 2.0
_TRIAL_ROUNDS = 2
# Dropped in the warm-up: what keeps the device busy for this many times the fastest, and so long.
_FAR_BEHIND = 5.0
_LONG_US = 2000.0
# Medians closer than the first have not been told apart; nor have those closer than the second
# that lie inside the fastest's own spread.
_TIE, _NOISY_TIE = 1.02, 1.05
_MOST_FLUSHES = 50
_FLUSH_BYTES_US = 2.0e6  # roughly: how long overwriting keeps a device busy


@dataclass
class Contender:
    """A way in a race.

    Attributes:
        name: for messages.
        call: multiplies once.
        leagues: it is dropped when it is hopeless in all of them.
        samples_us: filled by `race`; empty if it could not run.
    """

    name: str
    call: Callable[[], object]
    leagues: frozenset[str]
    samples_us: list[float] = field(default_factory=list)

    @property
    def median_us(self) -> float:
        """Median of the samples."""
        return self.quantile_us(0.5)

    def quantile_us(self, share: float) -> float:
        """A quantile of the samples: the one at or above the share."""
        ordered = sorted(self.samples_us)
        return ordered[min(len(ordered) - 1, math.floor(share * len(ordered)))]


def race(contenders: Sequence[Contender], device: torch.device, budget_s: float) -> None:
    """Fill the contenders' samples.

    Args:
        contenders: ways that compute the same.
        device: the CUDA device, which is current.
        budget_s: about how long the timed rounds may take; at least three are made.
    """
    flush, flush_us = _overwriter(device)
    launched_us = _warmed_up(contenders)
    alive = [contender for contender in contenders if id(contender) in launched_us]
    # Overwrite for so long that the host has launched a sample before the device is free.
    flushes = {
        place: min(max(1, math.ceil(2 * host_us / flush_us)), _MOST_FLUSHES)
        for place, host_us in launched_us.items()
    }
    end = time.perf_counter() + budget_s
    for round_ in range(_MOST_ROUNDS if alive else 0):
        events = []
        turn = round_ % len(alive)
        for contender in alive[turn:] + alive[:turn]:
            for _ in range(flushes[id(contender)]):
                flush()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            contender.call()
            stop.record()
            events.append((contender, start, stop))
        torch.cuda.synchronize()
        for contender, start, stop in events:
            contender.samples_us.append(start.elapsed_time(stop) * 1e3)
        if round_ + 1 == _TRIAL_ROUNDS:
            alive = _hopeful(alive)
        elif round_ + 1 >= _FEWEST_ROUNDS and time.perf_counter() > end:
            break


def winner(contenders: Sequence[Contender], league: str, previous: str | None = None) -> int:
    """Index of the one to take: the fastest, or of those it was not told apart from, the first.

    Args:
        contenders: after a `race`, the simplest first.
        league: of the contenders that count.
        previous: name of what was chosen before, which stays where it is not told apart either.

    Raises:
        ValueError: none of them ran.
    """
    ran = [
        (index, contender)
        for index, contender in enumerate(contenders)
        if league in contender.leagues and contender.samples_us
    ]
    _, best = min(ran, key=lambda entry: entry[1].median_us)
    fastest_us = best.median_us
    limit = max(_TIE * fastest_us, min(best.quantile_us(0.8), _NOISY_TIE * fastest_us))
    tied = [(index, c) for index, c in ran if c is best or c.median_us <= limit]
    stays = (index for index, contender in tied if contender.name == previous)
    return next(stays, tied[0][0])


def _warmed_up(contenders: Sequence[Contender]) -> dict[int, float]:
    """Microseconds that launching each takes the host, by id; without those not worth a race."""
    launched_us: dict[int, float] = {}
    fastest: dict[str, float] = {}
    for contender in contenders:
        try:
            for _ in range(2):
                took_us, host_us = _called(contender)
                for league in contender.leagues:
                    fastest[league] = min(fastest.get(league, math.inf), took_us)
                far = _FAR_BEHIND * max(fastest[league] for league in contender.leagues)
                if took_us - host_us > max(far, _LONG_US):  # of the device alone: see _called
                    contender.samples_us.append(took_us)  # for the record
                    break
            else:
                launched_us[id(contender)] = host_us
        except torch.OutOfMemoryError:  # an expanded weight may not fit; its rivals do
            continue
        except RuntimeError as error:
            warnings.warn(
                f"ksopt: {contender.name} cannot run on this device and is left out. {error}",
                RuntimeWarning,
                stacklevel=2,
            )
    return launched_us


def _called(contender: Contender) -> tuple[float, float]:
    """Microseconds from a call's beginning to its end on the device, and to its last launch.

    A first call loads libraries and asks for memory, which is no work of the device.
    """
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    began = time.perf_counter()
    contender.call()
    host_us = (time.perf_counter() - began) * 1e6
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) * 1e3, host_us


def _hopeful(alive: list[Contender]) -> list[Contender]:
    fastest: dict[str, float] = {}
    for contender in alive:
        for league in contender.leagues:
            fastest[league] = min(fastest.get(league, math.inf), *contender.samples_us)
    return [
        contender
        for contender in alive
        if any(min(contender.samples_us) <= _HOPELESS * fastest[name] for name in contender.leagues)
    ]


def _overwriter(device: torch.device) -> tuple[Callable[[], object], float]:
    """A function that overwrites the L2 cache, and about how long it keeps the device busy."""
    size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
    try:
        scratch = torch.empty(size, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:  # the model needs it more: caches stay warm
        return lambda: None, math.inf
    return scratch.zero_, max(1.0, size / _FLUSH_BYTES_US)
