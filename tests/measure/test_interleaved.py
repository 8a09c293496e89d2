"""Interleaved timing, on a device and a host whose clocks a test turns."""

from __future__ import annotations

import contextlib
import functools
import math
import random
import time
from collections.abc import Iterable

import pytest
import torch

from ksopt.measure import device_types, timers
from ksopt.measure.benchmark_entry import BenchmarkEntry
from ksopt.measure.interleaved import (
    EntryResult,
    Rules,
    candidate_rules,
    quickest,
    race,
    warm_up_calls,
    winner,
)
from ksopt.measure.measurement import Measurement, quantile_sample
from ksopt.measure.timers import CpuTimer
from ksopt.measure.timing import measure

CUDA = torch.device("cuda", 0)
FLUSH_US, FLUSH_LAUNCH_US = 30.0, 5.0


class Simulated:
    """A host that launches, and a device that works off what was launched, in microseconds."""

    def __init__(self) -> None:
        self.host_us = self.device_us = 0.0
        self.random = random.Random(0)
        self.held_up_at_events = 0.0  # the share of them

    def launch(self, host_us: float, device_us: float) -> None:
        """The host takes so long, then the device may begin."""
        self.host_us += host_us
        self.device_us = max(self.device_us, self.host_us) + device_us

    def way(self, host_us: float, device_us: float, late: float = 0.0, late_us: float = 0.0):
        """A call of two launches; of so many in all, the host is held up between them."""

        def call() -> None:
            held_up = late_us if self.random.random() < late else 0.0
            self.launch(host_us / 2, device_us / 2)
            self.launch(host_us / 2 + held_up, device_us / 2)

        return call

    def flush(self) -> None:
        self.launch(FLUSH_LAUNCH_US, FLUSH_US)

    def synchronize(self, device: object = None) -> None:
        self.host_us = max(self.host_us, self.device_us)


@pytest.fixture
def simulated(monkeypatch) -> Simulated:
    actual = Simulated()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            if actual.random.random() < actual.held_up_at_events:
                actual.host_us += 500.0
            self.at_us = max(actual.host_us, actual.device_us)

        def synchronize(self) -> None:
            actual.host_us = max(actual.host_us, self.at_us)

        def elapsed_time(self, other: Event) -> float:
            return (other.at_us - self.at_us) / 1e3

    class Scratch:
        def zero_(self) -> None:
            actual.flush()

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", actual.synchronize)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    properties = type("Properties", (), {"L2_cache_size": 2**25})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: Scratch())
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: Scratch())
    monkeypatch.setattr(time, "perf_counter", lambda: actual.host_us / 1e6)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: actual.host_us * 1e3)
    return actual


def raced(**ways) -> dict[str, EntryResult]:
    return on_the_device([BenchmarkEntry(name, call) for name, call in ways.items()], 10.0)


def on_the_device(entries: list[BenchmarkEntry], budget_s: float) -> dict[str, EntryResult]:
    results = race(entries, device_types.type_of(CUDA).race_timer(CUDA), candidate_rules(budget_s))
    return {one.entry.name: one for one in results}


@pytest.fixture
def measured(simulated):
    """The played device is timed by `measure`, too."""
    device_types._timer.cache_clear()
    yield functools.partial(measure, device=CUDA)
    device_types._timer.cache_clear()


@pytest.mark.parametrize("host_us", [4.0, 30.0, 200.0, 640.0])
@pytest.mark.parametrize("device_us", [3.0, 60.0])
def test_a_slow_host_is_not_taken_for_a_slow_device(simulated, measured, host_us, device_us):
    way = simulated.way(host_us, device_us)
    actual = raced(way=way)["way"]
    assert actual.samples_us == pytest.approx([device_us] * len(actual.samples_us))
    assert actual.host_us == pytest.approx(host_us)
    took = measured({"way": way}, min_repeats=7, max_repeats=40)["way"]
    assert took.repeats == 40
    assert [took.median_us, took.p20_us, took.p80_us] == pytest.approx([device_us] * 3)


@pytest.mark.parametrize(("most", "requested"), [(8, [8]), (4, [8, 2]), (1, [8, 2])])
def test_the_cache_is_overwritten_as_long_as_memory_allows(simulated, monkeypatch, most, requested):
    sizes, scratch = [], torch.empty()

    def empty(size: int, **_: object) -> object:
        sizes.append(size // 2**25)
        if size > most * 2**25:
            raise torch.OutOfMemoryError("no")
        return scratch

    monkeypatch.setattr(torch, "empty", empty)
    flush = timers.spare_overwriter(CUDA)
    assert sizes == requested
    assert flush.us == pytest.approx(FLUSH_US, rel=0.2) if most > 1 else flush.us == math.inf


def test_samples_that_the_host_was_late_for_do_not_count(simulated, measured):
    """Every third call another process has the core for half a millisecond."""
    way = simulated.way(20.0, 10.0, late=1 / 3, late_us=500.0)
    actual = raced(way=way)["way"]
    assert len(actual.samples_us) >= 3
    assert actual.samples_us == pytest.approx([10.0] * len(actual.samples_us))
    took = measured({"way": way}, min_repeats=7, max_repeats=40)["way"]
    assert took.repeats >= 35  # a sample is taken again at once
    assert [took.median_us, took.p20_us, took.p80_us] == pytest.approx([10.0] * 3)


def test_a_host_that_is_held_up_around_the_sample_is_late_too(simulated):
    """Until the overwriting is over: the device then waits for the sample's launches or its end."""
    simulated.held_up_at_events = 1 / 4
    actual = raced(way=simulated.way(20.0, 10.0))["way"]
    assert len(actual.samples_us) >= 3
    assert actual.samples_us == pytest.approx([10.0] * len(actual.samples_us))


def test_what_the_host_is_always_late_for_is_timed_all_the_same(simulated):
    def call() -> None:
        simulated.launch(5_000.0, 10.0)
        simulated.launch(5_000.0, 10.0)

    actual = raced(way=call)["way"]
    assert actual.samples_us
    assert actual.measurement.is_host_late
    assert not raced(way=simulated.way(20.0, 10.0))["way"].measurement.is_host_late


def test_late_samples_stand_in_where_there_are_no_others(simulated):
    """A host that takes five times as long each time is late for all of a short race."""
    taken = [2.0]

    def call() -> None:
        taken.append(5 * taken[-1])
        simulated.launch(taken[-2], 5.0)
        simulated.launch(taken[-2], 5.0)

    way = on_the_device([BenchmarkEntry("way", call)], budget_s=0.0)["way"]
    assert len(way.samples_us) == 3
    assert min(way.samples_us) > 10.0  # part of them the host's time, for want of better


def test_a_race_ends_when_it_knows(simulated):
    steady = raced(one=simulated.way(5.0, 100.0), two=simulated.way(5.0, 90.0))
    assert {len(one.samples_us) for one in steady.values()} == {candidate_rules(1.0).enough_rounds}


def test_who_cannot_win_is_timed_less(simulated):
    actual = raced(
        best=simulated.way(5.0, 100.0),
        near=simulated.way(5.0, 110.0),
        behind=simulated.way(5.0, 150.0),
        hopeless=simulated.way(5.0, 300.0),
        far=simulated.way(5.0, 9_000.0),
    )
    counts = {name: len(one.samples_us) for name, one in actual.items()}
    assert counts["best"] == counts["near"] > counts["behind"] > counts["hopeless"] > counts["far"]
    assert counts["far"] == 1  # its warm-up, for the record


def test_a_series_is_timed_a_product_at_a_time(simulated):
    """Eight products whose starts overlap: the device does in 3 us each what takes 5 alone."""

    def series() -> None:
        for product in range(8):
            simulated.launch(8.0, 5.0 if product == 0 else 3.0)

    actual = on_the_device([BenchmarkEntry("series", series, products=8)], 10.0)["series"]
    assert actual.samples_us == pytest.approx([26.0 / 8] * len(actual.samples_us))
    assert actual.host_us == pytest.approx(8.0)


def result(
    name: str,
    device_us: float | Iterable[float],
    host_us: float = math.inf,
    products: int = 1,
) -> EntryResult:
    samples_us = (device_us,) * 5 if isinstance(device_us, float) else tuple(device_us)
    entry = BenchmarkEntry(name, lambda: None, frozenset({"cached"}), products)
    took = Measurement.of(samples_us, quantile=quantile_sample)
    return EntryResult(entry, samples_us, took, host_us)


def test_a_series_tells_apart_what_single_products_do_not():
    def two(products: int) -> list[EntryResult]:
        return [
            result("simple", 2.65, 2.0, products),
            result("faster", 2.5, 2.0, products),
        ]

    assert winner(two(1), "cached") == 0
    assert winner(two(8), "cached") == 1


def test_of_a_series_too_the_host_decides_where_the_device_would_wait():
    two = [
        result("one launch", 2.65, 8.0, products=8),
        result("three launches", 2.5, 15.0, products=8),
    ]
    assert winner(two, "cached") == 0


def test_the_host_decides_between_what_the_device_does_as_fast():
    two = [result("three launches", 5.0, 30.0), result("one launch", 5.15, 11.0)]
    assert winner(two, "cached") == 1


def test_a_quicker_launch_is_not_worth_what_the_device_can_tell_apart():
    """A way may be 2 % slower on the device than PyTorch's, and that is slower than PyTorch."""
    two = [result("bmm", 71.0, 100.0), result("one launch", 72.5, 11.0)]
    assert winner(two, "cached") == 0


def test_what_lies_in_the_fastests_own_spread_is_not_distinguished():
    noisy = [70.0, 71.0, 71.0, 74.0, 75.0]
    simple = result("simple", 73.0, 9.0)
    assert winner([simple, result("other", 71.0, 9.0)], "cached") == 1
    assert winner([simple, result("other", noisy, 9.0)], "cached") == 0


def test_a_device_that_is_busy_anyway_does_not_wait_for_the_host():
    two = [result("three launches", 100.0, 60.0), result("one launch", 103.0, 11.0)]
    assert winner(two, "cached") == 0


def test_the_devices_time_is_not_traded_for_a_quicker_launch():
    """Seen in a Llama: 15 us of the device and 45 of the host, or 29 and 11."""
    two = [result("bmm", 15.0, 45.0), result("mma16", 29.0, 11.0)]
    assert winner(two, "cached") == 0


def test_the_simpler_of_two_is_not_taken_where_the_host_would_be_slower():
    two = [result("simple, three launches", 5.0, 30.0), result("one launch", 5.0, 11.0)]
    assert winner(two, "cached") == 1


def test_a_launch_that_is_hardly_quicker_decides_nothing():
    two = [result("simple", 5.0, 11.0), result("other", 4.95, 10.0)]
    assert winner(two, "cached") == 0


def test_an_even_number_of_samples_ties_by_samples_that_were_taken():
    """Half way between the samples, the median would be 100.75, and the other had lost."""
    two = [result("simple", [101.0] * 4), result("other", [100.0, 100.0, 101.5, 101.5])]
    assert winner(two, "cached") == 0
    assert two[1].measurement.median_us == 101.5


def test_the_least_sample_wins_on_a_cpu():
    two = [result("steady", [5.0, 5.0, 5.0]), result("disturbed", [4.9, 20.0, 30.0])]
    assert quickest(two) == 1
    assert quickest([*two, result("as quick", [4.9])]) == 1  # the first of them


def test_what_is_far_behind_is_sampled_once(simulated, measured):
    ways = {
        "best": simulated.way(5.0, 4_000.0),
        "worst": simulated.way(5.0, 30_000.0),
        "short": simulated.way(5.0, 20.0),
    }
    limits = {"max_seconds": 0.2, "min_repeats": 6, "hopeless": 2.0}
    actual = measured(ways, rivals=["best", "worst"], **limits)
    assert [name for name, one in actual.items() if one.given_up] == ["worst"]
    assert actual["worst"].repeats == 1
    assert actual["worst"].median_us == pytest.approx(30_000.0, abs=5.0)
    assert actual["best"].repeats >= 3
    # Too short to be sure at once.
    ways = {"tiny": simulated.way(5.0, 20.0), "small": simulated.way(5.0, 1_000.0)}
    assert measured(ways, **limits)["small"].repeats == 2


class Turned:
    """A CPU's clock that goes on only as a test says."""

    def __init__(self, monkeypatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now_s)
        monkeypatch.setattr(time, "perf_counter_ns", lambda: self.now_s * 1e9)

    def taking(self, *seconds: float):
        """A call that takes so long; the last figure stands for all that follow."""
        left = list(seconds)

        def call() -> None:
            self.now_s += left.pop(0) if len(left) > 1 else left[0]

        return call


def on_the_cpu(rules: Rules, **calls) -> dict[str, tuple[float, ...]]:
    entries = [BenchmarkEntry(name, call) for name, call in calls.items()]
    results = race(entries, CpuTimer(cold=False), rules)
    return {one.entry.name: tuple(round(us / 1e6, 9) for us in one.samples_us) for one in results}


def test_a_long_warm_up_counts_and_drops_what_takes_twice_as_long(monkeypatch):
    clock = Turned(monkeypatch)
    rules = Rules(warm_up_calls(1, long_us=20_000.0), 0.02, 5, budget_with_warm_up=True)
    seen = on_the_cpu(
        rules,
        short=clock.taking(0.001),
        long=clock.taking(0.1, 0.05),
        twice=clock.taking(0.21),
    )
    assert seen == {"short": (0.001,), "long": (0.1, 0.05), "twice": (0.21,)}


@pytest.mark.parametrize(("with_warm_up", "rounds"), [(True, 1), (False, 5)])
def test_the_warm_up_is_part_of_the_budget_or_is_not(monkeypatch, with_warm_up, rounds):
    clock = Turned(monkeypatch)
    rules = Rules(warm_up_calls(1), 1.0, 5, budget_with_warm_up=with_warm_up)
    seen = on_the_cpu(rules, way=clock.taking(2.0, 0.1))
    assert seen == {"way": (0.1,) * rounds}
