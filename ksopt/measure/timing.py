"""The one way that ksopt times things: cold caches, variants in turns, median with p20 and p80.

Variants are called in turns, round by round, in an order that rotates, so that a clock that drops
or a neighbour that wakes up hurts them all alike. Before each sample the caches are overwritten,
because a layer in a model finds its input and weights in memory, not in a cache that the previous
repeat has filled. On CUDA a sample is the time between two events; the overwriting of L2 that runs
before it also keeps the device busy while the host launches, so that the host's time is not taken
for the device's. A sample that the host was too late for is taken again, after more overwriting.
On a CPU a sample is ``time.perf_counter_ns``.

The spread is part of the result: two functions whose bands overlap have not been told apart.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ksopt.errors import InvalidInputError
from ksopt.measure.interleaved import standard_error

# A sample must dwarf the clock: CUDA events resolve about 0.5 us, perf_counter_ns some 0.05 us.
_SHORTEST_SAMPLE_US = {"cuda": 10.0, "cpu": 5.0}
_MOST_CALLS_PER_SAMPLE = 1000
_LARGEST_FLUSH_BYTES = 2**28
_MOST_FLUSHES = 50
_FLUSHES_TIMED = 3
_TRIES = 3  # of a sample that the host is late for
_FEWEST_ROUNDS = 3
# Rounds after which a function can be given up as hopeless: one alone may have met a hiccup. On
# CUDA before the first, if it is more than twice as hopeless and takes longer than any hiccup.
_TRIAL_ROUNDS = 2
_LONG_US = 3000.0


@dataclass(frozen=True)
class Measurement:
    """How long one call takes, cold.

    Args:
        median_us: Median over the repeats, microseconds.
        p20_us: 20th percentile.
        p80_us: 80th percentile.
        repeats: Samples taken.
        calls_per_sample: Calls in one sample: more than 1 only where a call is too short for the
            clock; then all but the first find warm caches.
        given_up: Whether sampling stopped after the first rounds, because a rival was more than
            ``hopeless`` times as fast.
    """

    median_us: float
    p20_us: float
    p80_us: float
    repeats: int
    calls_per_sample: int = 1
    given_up: bool = False

    @property
    def noise(self) -> float:
        """Width of the band that holds the middle 60 % of the samples, over the median."""
        return (self.p80_us - self.p20_us) / self.median_us if self.median_us > 0 else 0.0

    def each_of(self, calls: int) -> Measurement:
        """The share of one call, where what was timed makes that many.

        Example:
            >>> Measurement(30.0, 20.0, 50.0, 9).each_of(10).median_us
            3.0
        """
        return replace(
            self,
            median_us=self.median_us / calls,
            p20_us=self.p20_us / calls,
            p80_us=self.p80_us / calls,
            calls_per_sample=self.calls_per_sample * calls,
        )

    @classmethod
    def of(cls, samples_us: list[float], calls_per_sample: int = 1) -> Measurement:
        """Summary of samples in microseconds a call.

        Example:
            >>> Measurement.of([3.0, 1.0, 2.0, 5.0, 4.0]).median_us
            3.0
        """
        ordered = sorted(samples_us)
        return cls(
            median_us=quantile(ordered, 0.5),
            p20_us=quantile(ordered, 0.2),
            p80_us=quantile(ordered, 0.8),
            repeats=len(ordered),
            calls_per_sample=calls_per_sample,
        )


class Comparison(enum.Enum):
    """How one measurement stands to another; the value is a phrase for a sentence."""

    FASTER = "faster"
    SLOWER = "slower"
    WITHIN_NOISE = "within noise"


def compare(this: Measurement, other: Measurement) -> Comparison:
    """Whether ``this`` is faster or slower than ``other``, or has not been told apart from it.

    They are told apart when each median lies outside the other's band from p20 to p80. That is
    stricter than a test of the medians, and meant to be: the band is what the next run will show.

    Example:
        >>> quick, slow = Measurement(10, 9, 11, 50), Measurement(12, 11.5, 13, 50)
        >>> compare(quick, slow), compare(slow, quick), compare(quick, quick)
        (<Comparison.FASTER: 'faster'>, <Comparison.SLOWER: 'slower'>, \
<Comparison.WITHIN_NOISE: 'within noise'>)
    """
    if this.median_us < other.p20_us and this.p80_us < other.median_us:
        return Comparison.FASTER
    if other.median_us < this.p20_us and other.p80_us < this.median_us:
        return Comparison.SLOWER
    return Comparison.WITHIN_NOISE


def measure(
    variants: Mapping[str, Callable[[], object]],
    device: torch.device | str,
    *,
    max_seconds: float = 1.0,
    min_repeats: int = 10,
    max_repeats: int = 200,
    warmup_calls: int = 3,
    cold: bool = True,
    precision: float | None = None,
    hopeless: float | None = None,
    rivals: Collection[str] = (),
    against: str | None = None,
) -> dict[str, Measurement]:
    """Time every variant on the device, in turns.

    Args:
        variants: Functions of no arguments, by name. Each should work on inputs of its own that are
            fresh and random; what they return is dropped.
        device: Where they compute: a CPU or CUDA device.
        max_seconds: About how long the timed rounds may take in all, warm-up not counted.
        min_repeats: Rounds taken even if that is longer; functions so slow that this would take
            three times as long as ``max_seconds`` get fewer, at least 3.
        max_repeats: Rounds after which it stops even if time is left.
        warmup_calls: Calls of each before timing: compilation, tuning, allocation, clocks.
        cold: Overwrite the caches before each sample.
        precision: Stop after ``min_repeats`` rounds as soon as every median's standard error,
            estimated from the band from p20 to p80, is below this share of it; None: use the time.
        hopeless: After two rounds, give up rivals whose fastest sample is more than this many times
            the fastest rival's; on CUDA, without ``against``, also before the first round those
            whose last warm-up takes twice that and more than 3 ms. Their measurements say so.
            None: sample all alike.
        rivals: Names of the functions that are rivals of each other; empty: all are.
        against: Name of the function that ``hopeless`` compares the others with, in place of the
            fastest rival. It is not given up itself; if all others are, sampling ends.

    Returns:
        A Measurement by name, in the order given.

    Raises:
        InvalidInputError: No variants, limits below 1, or a device that is neither CPU nor CUDA.
        Exception: Whatever a variant raises.

    Source: FlashInfer's and Triton's benchmarks flush L2 in the same way.

    Example:
        >>> x = torch.randn(64, 64)
        >>> found = measure({"mm": lambda: x @ x}, "cpu", max_seconds=0.05)
        >>> found["mm"].repeats >= 3 and found["mm"].p20_us <= found["mm"].p80_us
        True
    """
    clock = _clock(torch.device(device))
    if not variants:
        raise InvalidInputError("measure: no variants were given, there must be at least one")
    limits = _Limits(
        max_seconds, min_repeats, max_repeats, precision, hopeless, rivals or variants, against
    )
    if min(min_repeats, max_repeats, warmup_calls) < 1 or max_seconds <= 0:
        raise InvalidInputError(
            f"measure: min_repeats={min_repeats}, max_repeats={max_repeats}, "
            f"warmup_calls={warmup_calls} must be at least 1 and max_seconds={max_seconds} above 0"
        )
    least_hopeless = 1 if against is None else 0
    if (precision is not None and precision <= 0) or (
        hopeless is not None and hopeless <= least_hopeless
    ):
        raise InvalidInputError(
            f"measure: precision={precision} must be above 0 and hopeless={hopeless} above "
            f"{least_hopeless}"
        )
    if against is not None and against not in variants:
        raise InvalidInputError(f"measure: against={against!r} is none of {', '.join(variants)}")
    with clock.scope:
        plans = {
            name: clock.plan(function, warmup_calls, cold) for name, function in variants.items()
        }
        samples, given_up = _rounds(clock, variants, plans, limits)
    return {
        name: replace(Measurement.of(samples[name], plans[name].calls), given_up=name in given_up)
        for name in variants
    }


@dataclass(frozen=True)
class _Limits:
    """When sampling ends: see `measure`."""

    max_seconds: float
    min_repeats: int
    max_repeats: int
    precision: float | None
    hopeless: float | None
    rivals: Collection[str]
    against: str | None


def _rounds(
    clock: _CpuClock | _CudaClock,
    variants: Mapping[str, Callable[[], object]],
    plans: Mapping[str, _Plan],
    limits: _Limits,
) -> tuple[dict[str, list[float]], set[str]]:
    """Microseconds a call of every variant, one a round, and the names that were given up."""
    names = list(variants)
    samples: dict[str, list[float]] = {name: [] for name in names}
    given_up = _far_behind(plans, limits) if clock.steady else set()
    for name in given_up:
        samples[name].append(plans[name].call_us)
    names = [name for name in names if name not in given_up]
    start = time.perf_counter()
    for rounds in range(1, limits.max_repeats + 1):
        turn = rounds % len(names)
        pending = [
            (name, clock.sample(variants[name], plans[name]))
            for name in names[turn:] + names[:turn]
        ]
        for name, read in pending:
            samples[name].append(read() / plans[name].calls)
        if rounds == _TRIAL_ROUNDS and limits.hopeless is not None:
            fastest = {name: min(samples[name]) for name in limits.rivals}
            best = fastest.values() if limits.against is None else samples[limits.against]
            most = limits.hopeless * min(best)
            given_up |= {name for name in fastest if fastest[name] > most} - {limits.against}
            names = [name for name in names if name not in given_up]
            if names == [limits.against]:
                break
        spent = time.perf_counter() - start
        least = limits.min_repeats
        if spent / rounds * least > 3 * limits.max_seconds:
            least = max(_FEWEST_ROUNDS, int(3 * limits.max_seconds * rounds / spent))
        if rounds >= least and (
            spent >= limits.max_seconds
            or (
                limits.precision is not None
                and all(
                    standard_error(Measurement.of(samples[name]).noise, len(samples[name]))
                    <= limits.precision
                    for name in names
                )
            )
        ):
            break
    return samples, given_up


def _far_behind(plans: Mapping[str, _Plan], limits: _Limits) -> set[str]:
    """Rivals that their last warm-up has shown to be hopeless."""
    if limits.hopeless is None or limits.against is not None:
        return set()
    rivals = {name: plans[name].call_us for name in limits.rivals}
    most = max(2 * limits.hopeless * min(rivals.values()), _LONG_US)
    return {name for name, call_us in rivals.items() if call_us > most}


@dataclass
class _Plan:
    """How one function is sampled: calls in a sample, and times the caches are overwritten.

    ``call_us`` is what the last call of the warm-up took. The times are as many as the host needed
    so far.
    """

    calls: int
    flushes: int
    call_us: float = 0.0


class _CpuClock:
    steady = False  # whether what takes long once takes long again

    def __init__(self) -> None:
        self._scratch = torch.zeros(_flush_bytes(_last_level_cache_bytes()), dtype=torch.uint8)
        self.scope: contextlib.AbstractContextManager[object] = contextlib.nullcontext()

    def plan(self, function: Callable[[], object], warmup_calls: int, cold: bool) -> _Plan:
        """Warm the function up, and see how long it takes."""
        for _ in range(warmup_calls):
            function()
        began = time.perf_counter_ns()
        function()
        took_us = (time.perf_counter_ns() - began) / 1e3
        return _Plan(_calls_per_sample(took_us, "cpu"), int(cold), took_us)

    def sample(self, function: Callable[[], object], plan: _Plan) -> Callable[[], float]:
        """Take a sample; the result tells its microseconds."""
        for _ in range(plan.flushes):
            self._scratch.fill_(1)
        began = time.perf_counter_ns()
        for _ in range(plan.calls):
            function()
        took_us = (time.perf_counter_ns() - began) / 1e3
        return lambda: took_us


class _CudaClock:
    steady = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.scope = torch.cuda.device(device)
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._scratch = torch.zeros(_flush_bytes(l2_bytes), dtype=torch.uint8, device=device)
        with self.scope:
            for _ in range(2):  # the first one loads the kernel
                torch.cuda.synchronize(device)
                began = time.perf_counter_ns()
                read = self.sample(self._scratch.zero_, _Plan(calls=_FLUSHES_TIMED, flushes=0))
                host_us = (time.perf_counter_ns() - began) / 1e3 / _FLUSHES_TIMED
                flush_us = read() / _FLUSHES_TIMED
            # What one more lets the host be later: it has to be launched as well.
            self._gained_us = max(flush_us - host_us, flush_us / 4, 1.0)

    def plan(self, function: Callable[[], object], warmup_calls: int, cold: bool) -> _Plan:
        """Warm the function up, and see how long it takes the device and the host."""
        for _ in range(warmup_calls):
            function()
        torch.cuda.synchronize(self._device)
        began = time.perf_counter_ns()
        read = self.sample(function, _Plan(calls=1, flushes=0))
        host_us = (time.perf_counter_ns() - began) / 1e3
        took_us = read()
        calls = _calls_per_sample(took_us, "cuda")
        return _Plan(calls, self._flushes(2 * host_us * calls) if cold else 0, took_us)

    def sample(self, function: Callable[[], object], plan: _Plan) -> Callable[[], float]:
        """Queue a sample; the result waits for it and tells its microseconds."""
        for _ in range(_TRIES):
            began, ended, host_us = self._queued(function, plan)
            if plan.flushes == 0 or (enough := self._flushes(host_us)) <= plan.flushes:
                break
            # The device may have waited for the host in between.
            plan.flushes = min(2 * enough, _MOST_FLUSHES)

        def read() -> float:
            ended.synchronize()
            return float(began.elapsed_time(ended)) * 1e3

        return read

    def _queued(
        self, function: Callable[[], object], plan: _Plan
    ) -> tuple[torch.cuda.Event, torch.cuda.Event, float]:
        """The events around a sample, and the host's microseconds between them."""
        for _ in range(plan.flushes):
            self._scratch.zero_()
        began, ended = self._events()
        start = time.perf_counter_ns()
        began.record()
        for _ in range(plan.calls):
            function()
        ended.record()
        return began, ended, (time.perf_counter_ns() - start) / 1e3

    def _flushes(self, host_us: float) -> int:
        """How often to overwrite, so that the device is busy while the host takes so long."""
        return min(max(1, math.ceil(host_us / self._gained_us)), _MOST_FLUSHES)

    @staticmethod
    def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
        return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


@functools.lru_cache(maxsize=4)
def _clock(device: torch.device) -> _CpuClock | _CudaClock:
    """The clock of a device, with its scratch memory: made once for the process."""
    with torch.inference_mode(False):  # its memory is written outside of that mode, too
        if device.type == "cpu":
            return _CpuClock()
        if device.type == "cuda":
            return _CudaClock(device)
    raise InvalidInputError(f"measure: device {str(device)!r} must be a CPU or CUDA device")


def _calls_per_sample(call_us: float, kind: str) -> int:
    wanted = math.ceil(_SHORTEST_SAMPLE_US[kind] / max(call_us, 1e-3))
    return min(max(1, wanted), _MOST_CALLS_PER_SAMPLE)


def _flush_bytes(cache_bytes: int) -> int:
    """Twice the cache, because replacement is not exactly least-recently-used."""
    return min(max(2 * cache_bytes, 2**25), _LARGEST_FLUSH_BYTES)


def _last_level_cache_bytes() -> int:
    """Size of the largest cache that CPU 0 sees; 32 MiB where the system does not tell."""
    found = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text(encoding="ascii").strip()
        number, unit = text.rstrip("KMG"), text[-1:]
        if number.isdigit():
            found.append(int(number) * {"K": 2**10, "M": 2**20, "G": 2**30}.get(unit, 1))
    return max(found, default=2**25)


def quantile(ordered: list[float], share: float) -> float:
    """The value below which a share of ordered numbers lies, interpolated as numpy's default does.

    Example:
        >>> quantile([1.0, 2.0, 4.0], 0.75)
        3.0
    """
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
