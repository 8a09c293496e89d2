"""Time ways to multiply against each other on a CUDA device, within a bound, and say who wins.

Ways take turns, so that a clock that drops hurts all alike. Before each sample the L2 cache is
overwritten: in a model, other layers have been there since, and small operands that stayed in the
cache would make the fastest way look faster than it will be. The overwriting also keeps the device
busy while the host launches a sample, so what is timed is the device's work.

A product of a few rows takes hardly longer than the start and the end of its kernels, and follows
others at once where a model decodes, so its sample is a series: several products, each by a weight
of its own that the cache has not seen.
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
# A race ends where every median's standard error is below this share of it, but not before so many
# rounds.
_PRECISION, _ENOUGH_ROUNDS = 0.005, 7
# Dropped after so many rounds: what takes more than so many times the fastest. One round alone may
# have met a hiccup.
_HOPELESS = {2: 2.0, 5: 1.2}
# Dropped in the warm-up: what keeps the device busy for this many times the fastest, and so long.
_FAR_BEHIND = 5.0
_LONG_US = 2000.0
# Medians closer than the first, or whose samples differ by fewer microseconds, have not been told
# apart; nor have those closer than the last that lie inside the fastest's own spread.
_TIE, _TIE_US, _NOISY_TIE = 1.01, 0.2, 1.05
# A host's times vary: a launch that takes less than this share of another's is quicker.
_QUICKER = 0.8
_MOST_FLUSHES = 50
# How many times the cache one launch overwrites, as memory allows: twice would empty it, but a busy
# host may take longer for the launch than the device for that.
_OVERWRITTEN = (8, 2)
# Of the host's time for a sample that the device is kept busy with overwriting: its events come on
# top of its launches, and other processes on the same cores.
_COVERED, _EVENTS_US = 2.0, 20.0


@dataclass
class Contender:
    """A way in a race.

    Attributes:
        name: for messages.
        call: multiplies, ``products`` times.
        leagues: it is dropped when it is hopeless in all of them.
        samples_us: a product's time on the device, filled by `race`; empty if it could not run.
        launches_us: what launching each of the samples took the host.
        products: of one call.
    """

    name: str
    call: Callable[[], object]
    leagues: frozenset[str]
    samples_us: list[float] = field(default_factory=list)
    launches_us: list[float] = field(default_factory=list)
    products: int = 1

    @property
    def median_us(self) -> float:
        """Median of the samples."""
        return self.quantile_us(0.5)

    @property
    def host_us(self) -> float:
        """What a product takes the host where nobody wants its core; infinite if unknown."""
        return min(self.launches_us, default=math.inf) / self.products

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
    flush = _overwriter(device)
    alive = _warmed_up(contenders)
    # Made once, for the host would make them anew between a sample's overwriting and its end.
    events = {id(contender): _events() for contender in alive}
    was_late: dict[int, bool] = {}
    late_us: dict[int, list[float]] = {}
    end = time.perf_counter() + budget_s
    for round_ in range(_MOST_ROUNDS if alive else 0):
        turn = round_ % len(alive)
        for contender in alive[turn:] + alive[:turn]:
            # Overwrite for so long that the host has launched the sample before the device is free.
            times = flush.times_to_cover(contender.launches_us[-1])
            covering = time.perf_counter()
            for _ in range(times):
                flush.once()
            start, stop = events[id(contender)]
            start.record()
            began = time.perf_counter()
            contender.call()
            contender.launches_us.append((time.perf_counter() - began) * 1e6)
            stop.record()
            took_us = (time.perf_counter() - covering) * 1e6
            was_late[id(contender)] = took_us > flush.covered_us(times)
        torch.cuda.synchronize()
        for contender in alive:
            start, stop = events[id(contender)]
            late = was_late[id(contender)]
            samples = late_us.setdefault(id(contender), []) if late else contender.samples_us
            samples.append(start.elapsed_time(stop) * 1e3 / contender.products)
        rounds = round_ + 1
        if rounds in _HOPELESS:
            alive = _hopeful(alive, _HOPELESS[rounds])
        if rounds >= _FEWEST_ROUNDS and time.perf_counter() > end:
            break
        if rounds >= _ENOUGH_ROUNDS and all(_standard_error(c) <= _PRECISION for c in alive):
            break
    for contender in contenders:  # for want of better
        contender.samples_us = contender.samples_us or late_us.get(id(contender), [])


def winner(contenders: Sequence[Contender], league: str, previous: str | None = None) -> int:
    """Index of the one to take: the fastest, or of those it was not told apart from, the first.

    Where the device would wait for the host, only those count that take the host least, of those
    that the device does as fast within a fifth of a microsecond.

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
    spread_us = min(best.quantile_us(0.8), _NOISY_TIE * fastest_us)
    limit = max(_TIE * fastest_us, fastest_us + _TIE_US / best.products, spread_us)
    tied = [(index, c) for index, c in ran if c.median_us <= limit]
    if fastest_us < best.host_us < math.inf:
        near = [(index, c) for index, c in ran if c.median_us <= max(limit, fastest_us + _TIE_US)]
        least_us = min(c.host_us for _, c in near)
        quick = [(index, c) for index, c in near if _QUICKER * c.host_us <= least_us]
        tied = [entry for entry in tied if entry in quick] or quick
    stays = (index for index, contender in tied if contender.name == previous)
    return next(stays, tied[0][0])


def _warmed_up(contenders: Sequence[Contender]) -> list[Contender]:
    """Those worth a race, with one launch each."""
    alive: list[Contender] = []
    fastest: dict[str, float] = {}
    for contender in contenders:
        try:
            for _ in range(2):
                took_us, host_us = _called(contender)
                for league in contender.leagues:
                    fastest[league] = min(fastest.get(league, math.inf), took_us)
                far = _FAR_BEHIND * max(fastest[league] for league in contender.leagues)
                if took_us - host_us > max(far, _LONG_US):  # of the device alone: see _called
                    contender.samples_us.append(took_us / contender.products)  # for the record
                    break
            else:
                contender.launches_us.append(host_us)
                alive.append(contender)
        except torch.OutOfMemoryError:  # an expanded weight may not fit; its rivals do
            continue
        except RuntimeError as error:
            warnings.warn(
                f"ksopt: {contender.name} cannot run on this device and is left out. {error}",
                RuntimeWarning,
                stacklevel=2,
            )
    return alive


def _called(contender: Contender) -> tuple[float, float]:
    """Microseconds from a call's beginning to its end on the device, and to its last launch.

    A first call loads libraries and asks for memory, which is no work of the device.
    """
    start, stop = _events()
    start.record()
    began = time.perf_counter()
    contender.call()
    host_us = (time.perf_counter() - began) * 1e6
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) * 1e3, host_us


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _hopeful(alive: list[Contender], hopeless: float) -> list[Contender]:
    # Of no sample that counts nothing is known yet.
    best = {id(c): min(c.samples_us, default=0.0) for c in alive}
    fastest: dict[str, float] = {}
    for contender in alive:
        for league in contender.leagues if contender.samples_us else ():
            fastest[league] = min(fastest.get(league, math.inf), best[id(contender)])
    return [
        c
        for c in alive
        if any(best[id(c)] <= hopeless * fastest.get(name, math.inf) for name in c.leagues)
    ]


def standard_error(noise: float, samples: int) -> float:
    """Of a median, as a share of it, were the samples normal.

    Their middle 60 % would then span 1.683 standard deviations, and the median's own deviation
    would be 1.2533 / sqrt(n) of theirs.

    Args:
        noise: the width of the band from p20 to p80 over the median.
        samples: how many.
    """
    return 1.2533 / 1.683 * noise / math.sqrt(samples)


def _standard_error(contender: Contender) -> float:
    if not contender.samples_us:
        return math.inf
    if not contender.median_us:
        return 0.0
    noise = (contender.quantile_us(0.8) - contender.quantile_us(0.2)) / contender.median_us
    return standard_error(noise, len(contender.samples_us))


@dataclass(frozen=True)
class _Overwriter:
    """Overwrites the L2 cache.

    Attributes:
        once: does so.
        us: how long that keeps the device busy; infinite if it does nothing.
        host_us: how long it takes the host to launch.
    """

    once: Callable[[], object]
    us: float
    host_us: float

    def times_to_cover(self, launch_us: float) -> int:
        """How often to overwrite, so that the device is busy until the host has launched a sample.

        Args:
            launch_us: what the last one took the host.
        """
        wanted_us = _COVERED * launch_us + _EVENTS_US
        return min(max(1, math.ceil(wanted_us / self._gained_us)), _MOST_FLUSHES)

    def covered_us(self, times: int) -> float:
        """How long the host may take for so many times and a sample, or that is the host's.

        The device cannot have begun before the host, so it is busy for at least so long.
        """
        return math.inf if times == _MOST_FLUSHES else times * self.us - _EVENTS_US / 2

    @property
    def _gained_us(self) -> float:
        return max(self.us - self.host_us, self.us / 4)


def _overwriter(device: torch.device) -> _Overwriter:
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    for times in _OVERWRITTEN:
        try:
            scratch = torch.empty(times * l2_bytes, dtype=torch.uint8, device=device)
            break
        except torch.OutOfMemoryError:  # the model needs it more
            continue
    else:  # caches stay warm
        return _Overwriter(lambda: None, math.inf, 0.0)
    many = Contender(
        "overwriting", lambda: [scratch.zero_() for _ in range(_FEWEST_ROUNDS)], frozenset()
    )
    for _ in range(2):
        took_us, host_us = _called(many)
    return _Overwriter(scratch.zero_, max(1.0, took_us / _FEWEST_ROUNDS), host_us / _FEWEST_ROUNDS)
