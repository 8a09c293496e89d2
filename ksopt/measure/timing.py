"""Timing of variants: cold caches, variants in turns, median with p20 and p80.

Variants race (interleaved.py), each sampled by its device's own clock (timers.py). Before each
sample the caches are overwritten, because a layer in a model finds its input and weights in memory,
not in a cache that the previous repeat has filled. A sample that the host was too late for is taken
again, after more overwriting.

The spread is part of the result: two functions whose bands overlap cannot be distinguished.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from ksopt.errors import InvalidInputError
from ksopt.measure import device_types
from ksopt.measure.benchmark_entry import BenchmarkEntry, Lane
from ksopt.measure.interleaved import Rules, WarmUp, race
from ksopt.measure.measurement import Comparison, Measurement, compare, quantile
from ksopt.measure.timers import Timer

__all__ = ["Comparison", "Measurement", "compare", "measure"]

_MOST_CALLS_PER_SAMPLE = 1000
# Rounds after which a function can be given up as hopeless: one alone may have met a hiccup. On
# CUDA before the first, if it is more than twice as hopeless and takes longer than any hiccup.
_TRIAL_ROUNDS = 2
_LONG_US = 3000.0
_RIVALS = frozenset({"rivals"})


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
        device: Where they compute.
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
            whose last warm-up takes twice that and more than 3 ms: their `given_up` is true.
            None: sample all alike.
        rivals: Names of the functions that are rivals of each other; empty: all are.
        against: Name of the function that ``hopeless`` compares the others with, in place of the
            fastest rival. It is not given up itself; if all others are, sampling ends.

    Returns:
        A Measurement by name, in the order of the variants.

    Raises:
        InvalidInputError: No variants, limits below 1, or a device whose type has no backend.
        Exception: Whatever a variant raises.

    Source: FlashInfer's and Triton's benchmarks flush L2 in the same way.

    Example:
        >>> x = torch.randn(64, 64)
        >>> results = measure({"mm": lambda: x @ x}, "cpu", max_seconds=0.05)
        >>> results["mm"].repeats >= 3 and results["mm"].p20_us <= results["mm"].p80_us
        True
    """
    place = torch.device(device)
    timer = device_types.timer_of(place, cold)
    if not variants:
        raise InvalidInputError("measure: no variants were passed, there must be at least one")
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
    named = {*(rivals or variants), against}
    entries = [
        BenchmarkEntry(name, call, _RIVALS if name in named else frozenset())
        for name, call in variants.items()
    ]
    rules = Rules(
        warm_up=_warm_up(warmup_calls, hopeless if against is None else None),
        budget_s=max_seconds,
        most_rounds=max_repeats,
        fewest_rounds=min_repeats,
        precision=precision,
        enough_rounds=min_repeats,
        hopeless={} if hopeless is None else {_TRIAL_ROUNDS: hopeless},
        against=against,
        quantile=quantile,
    )
    results = race(entries, timer, rules)
    return {one.entry.name: one.measurement for one in results if one.measurement is not None}


def _warm_up(calls: int, hopeless: float | None) -> WarmUp:
    """Call each entry, time one more call, and set the number of calls of a sample.

    On a device where what takes long once takes long again, rivals that are far behind are given
    up: they have no sample but that call.
    """

    def warm_up(lanes: Sequence[Lane], timer: Timer) -> list[Lane]:
        call_us: dict[int, float] = {}
        for lane in lanes:
            for _ in range(calls):
                timer.called(lane.entry.call)
            took_us, host_us = timer.called(lane.entry.call)
            needed = math.ceil(timer.shortest_sample_us / max(took_us, 1e-3))
            lane.calls = min(max(1, needed), _MOST_CALLS_PER_SAMPLE)
            lane.launches_us.append(host_us * lane.calls)
            if lane.entry.weight_modes:
                call_us[id(lane)] = took_us
        if hopeless is None or not timer.is_steady:
            return list(lanes)
        most_us = max(2 * hopeless * min(call_us.values()), _LONG_US)
        for lane in lanes:
            lane.given_up = call_us.get(id(lane), 0.0) > most_us
            if lane.given_up:
                lane.samples_us.append(call_us[id(lane)])
        return [lane for lane in lanes if not lane.given_up]

    return warm_up
