"""How ways are timed: on a device and a host whose clocks a test turns."""

from __future__ import annotations

import contextlib
import math
import random

import pytest
import torch

from ksopt.measure import interleaved, timing
from ksopt.measure.interleaved import Contender, race, winner

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
    found = Simulated()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            if found.random.random() < found.held_up_at_events:
                found.host_us += 500.0
            self.at_us = max(found.host_us, found.device_us)

        def synchronize(self) -> None:
            found.host_us = max(found.host_us, self.at_us)

        def elapsed_time(self, other: Event) -> float:
            return (other.at_us - self.at_us) / 1e3

    class Scratch:
        def zero_(self) -> None:
            found.flush()

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", found.synchronize)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    properties = type("Properties", (), {"L2_cache_size": 2**25})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(interleaved.torch, "empty", lambda *_, **__: Scratch())
    monkeypatch.setattr(timing.torch, "zeros", lambda *_, **__: Scratch())
    monkeypatch.setattr(interleaved.time, "perf_counter", lambda: found.host_us / 1e6)
    monkeypatch.setattr(timing.time, "perf_counter_ns", lambda: found.host_us * 1e3)
    return found


def raced(**ways) -> dict[str, Contender]:
    contenders = {name: Contender(name, call, frozenset({"all"})) for name, call in ways.items()}
    race(list(contenders.values()), torch.device("cuda", 0), budget_s=10.0)
    return contenders


def timed(call) -> list[float]:
    clock = timing._CudaClock(torch.device("cuda", 0))
    plans = {"way": clock.plan(call, 1, cold=True)}
    limits = timing._Limits(10.0, 7, 40, None, None, ["way"], None)
    samples, _ = timing._rounds(clock, {"way": call}, plans, limits)
    return samples["way"]


@pytest.mark.parametrize("host_us", [4.0, 30.0, 200.0, 640.0])
@pytest.mark.parametrize("device_us", [3.0, 60.0])
def test_a_slow_host_is_not_taken_for_a_slow_device(simulated, host_us, device_us):
    way = simulated.way(host_us, device_us)
    found = raced(way=way)["way"]
    assert found.samples_us == pytest.approx([device_us] * len(found.samples_us))
    assert found.host_us == pytest.approx(host_us)
    samples = timed(way)
    assert samples == pytest.approx([device_us] * len(samples))


@pytest.mark.parametrize(("most", "asked"), [(8, [8]), (4, [8, 2]), (1, [8, 2])])
def test_the_cache_is_overwritten_as_long_as_memory_allows(simulated, monkeypatch, most, asked):
    sizes, scratch = [], interleaved.torch.empty()

    def empty(size: int, **_: object) -> object:
        sizes.append(size // 2**25)
        if size > most * 2**25:
            raise torch.OutOfMemoryError("no")
        return scratch

    monkeypatch.setattr(interleaved.torch, "empty", empty)
    flush = interleaved._overwriter(torch.device("cuda", 0))
    assert sizes == asked
    assert flush.us == pytest.approx(FLUSH_US, rel=0.2) if most > 1 else flush.us == math.inf


def test_samples_that_the_host_was_late_for_do_not_count(simulated):
    """Every third call another process has the core for half a millisecond."""
    way = simulated.way(20.0, 10.0, late=1 / 3, late_us=500.0)
    found = raced(way=way)["way"]
    assert len(found.samples_us) >= 3
    assert found.samples_us == pytest.approx([10.0] * len(found.samples_us))
    assert sorted(timed(way))[-3:] == pytest.approx([10.0] * 3)


def test_a_host_that_is_held_up_around_the_sample_is_late_too(simulated):
    """Until the overwriting is over: the device then waits for the sample's launches or its end."""
    simulated.held_up_at_events = 1 / 4
    found = raced(way=simulated.way(20.0, 10.0))["way"]
    assert len(found.samples_us) >= 3
    assert found.samples_us == pytest.approx([10.0] * len(found.samples_us))


def test_what_the_host_is_always_late_for_is_timed_all_the_same(simulated):
    def call() -> None:
        simulated.launch(5_000.0, 10.0)
        simulated.launch(5_000.0, 10.0)

    found = raced(way=call)["way"]
    assert found.samples_us


def test_late_samples_stand_in_where_there_are_no_others(simulated):
    """A host that takes five times as long each time is late for all of a short race."""
    taken = [2.0]

    def call() -> None:
        taken.append(5 * taken[-1])
        simulated.launch(taken[-2], 5.0)
        simulated.launch(taken[-2], 5.0)

    way = Contender("way", call, frozenset({"all"}))
    race([way], torch.device("cuda", 0), budget_s=0.0)
    assert len(way.samples_us) == 3
    assert min(way.samples_us) > 10.0  # part of them the host's time, for want of better


def test_a_race_ends_when_it_knows(simulated):
    steady = raced(one=simulated.way(5.0, 100.0), two=simulated.way(5.0, 90.0))
    assert all(
        len(contender.samples_us) == interleaved._ENOUGH_ROUNDS for contender in steady.values()
    )


def test_who_cannot_win_is_timed_less(simulated):
    found = raced(
        best=simulated.way(5.0, 100.0),
        near=simulated.way(5.0, 110.0),
        behind=simulated.way(5.0, 150.0),
        hopeless=simulated.way(5.0, 300.0),
        far=simulated.way(5.0, 9_000.0),
    )
    counts = {name: len(contender.samples_us) for name, contender in found.items()}
    assert counts["best"] == counts["near"] > counts["behind"] > counts["hopeless"] > counts["far"]
    assert counts["far"] == 1  # its warm-up, for the record


def test_a_series_is_timed_a_product_at_a_time(simulated):
    """Eight products whose starts overlap: the device does in 3 us each what takes 5 alone."""

    def series() -> None:
        for product in range(8):
            simulated.launch(8.0, 5.0 if product == 0 else 3.0)

    found = Contender("series", series, frozenset({"all"}), products=8)
    race([found], torch.device("cuda", 0), budget_s=10.0)
    assert found.samples_us == pytest.approx([26.0 / 8] * len(found.samples_us))
    assert found.host_us == pytest.approx(8.0)


def contender(name: str, device_us: float, host_us: float, products: int = 1) -> Contender:
    launches_us = [host_us * products] * 5
    return Contender(
        name, lambda: None, frozenset({"kept"}), [device_us] * 5, launches_us, products
    )


def test_a_series_tells_apart_what_single_products_do_not():
    def two(products: int) -> list[Contender]:
        return [
            contender("simple", 2.65, 2.0, products),
            contender("faster", 2.5, 2.0, products),
        ]

    assert winner(two(1), "kept") == 0
    assert winner(two(8), "kept") == 1


def test_of_a_series_too_the_host_decides_where_the_device_would_wait():
    two = [
        contender("one launch", 2.65, 8.0, products=8),
        contender("three launches", 2.5, 15.0, products=8),
    ]
    assert winner(two, "kept") == 0


def test_the_host_decides_between_what_the_device_does_as_fast():
    two = [contender("three launches", 5.0, 30.0), contender("one launch", 5.15, 11.0)]
    assert winner(two, "kept") == 1


def test_a_quicker_launch_is_not_worth_what_the_device_can_tell_apart():
    """A way may be 2 % slower on the device than PyTorch's, and that is slower than PyTorch."""
    two = [contender("bmm", 71.0, 100.0), contender("one launch", 72.5, 11.0)]
    assert winner(two, "kept") == 0


def test_what_lies_in_the_fastests_own_spread_has_not_been_told_apart():
    noisy = [70.0, 71.0, 71.0, 74.0, 75.0]
    two = [contender("simple", 73.0, 9.0), contender("other", 71.0, 9.0)]
    assert winner(two, "kept") == 1
    two[1].samples_us[:] = noisy
    assert winner(two, "kept") == 0


def test_a_device_that_is_busy_anyway_does_not_wait_for_the_host():
    two = [contender("three launches", 100.0, 60.0), contender("one launch", 103.0, 11.0)]
    assert winner(two, "kept") == 0


def test_the_devices_time_is_not_given_for_a_quicker_launch():
    """Seen in a Llama: 15 us of the device and 45 of the host, or 29 and 11."""
    two = [contender("bmm", 15.0, 45.0), contender("mma16", 29.0, 11.0)]
    assert winner(two, "kept") == 0


def test_the_simpler_of_two_is_not_taken_where_the_host_would_be_slower():
    two = [contender("simple, three launches", 5.0, 30.0), contender("one launch", 5.0, 11.0)]
    assert winner(two, "kept") == 1


def test_a_launch_that_is_hardly_quicker_decides_nothing():
    two = [contender("simple", 5.0, 11.0), contender("other", 4.95, 10.0)]
    assert winner(two, "kept") == 0
