"""Timers of samples: by the clock on a CPU, between two events on CUDA, by a backend elsewhere.

On CUDA the L2 cache is overwritten before each sample: in a model, other layers have been there
since, and small operands that stayed in the cache would make the fastest look faster than it will
be. The overwriting also keeps the device busy while the host launches a sample, so that the host's
time is not taken for the device's. Where the host was late all the same, the sample is set aside.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from ksopt.measure.benchmark_entry import Lane

_MOST_FLUSHES = 50
_FLUSHES_TIMED = 3
# Of the host's time for a sample that the device is busy overwriting: its events come on
# top of its launches, and other processes on the same cores.
_COVERED, _EVENTS_US = 2.0, 20.0
_LARGEST_FLUSH_BYTES = 2**28
_UNKNOWN_CACHE_BYTES = 2**25
# How many times the cache one launch overwrites, as memory allows: twice would empty it, but a busy
# host may take longer for the launch than the device for that.
_OVERWRITTEN = (8, 2)


class Timer(Protocol):
    """Takes samples on one device.

    Attributes:
        is_steady: whether what takes long once takes long again.
        shortest_sample_us: a sample must dwarf the clock's resolution.
    """

    is_steady: bool
    shortest_sample_us: float

    def scope(self) -> contextlib.AbstractContextManager[object]:
        """The context in which entries are called."""

    def called(self, call: Callable[[], object]) -> tuple[float, float]:
        """Microseconds of one call with caches as they are, and of its launches on the host.

        A first call loads libraries and allocates memory, which is no work of a CUDA device.
        """

    def sample(self, lanes: Sequence[Lane]) -> None:
        """Add a sample to each lane, in this order."""


class _ClockTimer(ABC):
    """Samples by the host's clock. `scratch` is overwritten before each, unless it is None."""

    is_steady = False

    def __init__(self, scratch: torch.Tensor | None) -> None:
        self._scratch = scratch

    def scope(self) -> contextlib.AbstractContextManager[object]:
        """An empty context."""
        return contextlib.nullcontext()

    @abstractmethod
    def called(self, call: Callable[[], object]) -> tuple[float, float]:
        """Microseconds of one call, and of them the host's."""

    def sample(self, lanes: Sequence[Lane]) -> None:
        """Add a sample to each lane, in this order."""
        for lane in lanes:
            if self._scratch is not None:
                self._scratch.fill_(1)
            took_us, _ = self.called(lane.launch)
            lane.samples_us.append(took_us / lane.calls / lane.entry.products)


class CpuTimer(_ClockTimer):
    """Samples by the CPU's own clock.

    Args:
        cold: overwrite the caches before each sample, because a layer in a model finds its input
            and weights in memory, not in a cache that the previous repeat has filled.
    """

    shortest_sample_us = 5.0  # perf_counter_ns resolves some 0.05 us

    def __init__(self, cold: bool) -> None:
        scratch = None
        if cold:
            size = flush_bytes(last_level_cache_bytes())
            scratch = torch.zeros(size, dtype=torch.uint8)
        super().__init__(scratch)

    def called(self, call: Callable[[], object]) -> tuple[float, float]:
        """Microseconds of one call, all of them the host's."""
        began = time.perf_counter_ns()
        call()
        took_us = (time.perf_counter_ns() - began) / 1e3
        return took_us, took_us


class SynchronizingTimer(_ClockTimer):
    """Samples by the host's clock, from one wait for the device to the next.

    Args:
        device: where the calls compute.
        synchronize: waits for a device.
        cold: overwrite memory of the device before each sample: twice 32 MiB, its caches' size
            being unknown.
    """

    shortest_sample_us = 100.0  # a wait takes some microseconds

    def __init__(
        self, device: torch.device, synchronize: Callable[[torch.device], object], cold: bool
    ) -> None:
        scratch = None
        if cold:
            size = flush_bytes(_UNKNOWN_CACHE_BYTES)
            scratch = torch.zeros(size, dtype=torch.uint8, device=device)
        super().__init__(scratch)
        self._wait = functools.partial(synchronize, device)

    def called(self, call: Callable[[], object]) -> tuple[float, float]:
        """Microseconds from a call's beginning to its end on the device, and to its return."""
        self._wait()
        began = time.perf_counter_ns()
        call()
        returned = time.perf_counter_ns()
        self._wait()
        return (time.perf_counter_ns() - began) / 1e3, (returned - began) / 1e3


class CudaTimer:
    """Samples between two events of a CUDA device.

    Args:
        device: the CUDA device.
        overwriter: of its L2 cache.
        tries: of a sample that the host is late for.
    """

    is_steady = True
    shortest_sample_us = 10.0  # events resolve about 0.5 us

    def __init__(self, device: torch.device, overwriter: Overwriter, tries: int = 1) -> None:
        self._device = device
        self._overwriter = overwriter
        self._tries = tries

    def scope(self) -> contextlib.AbstractContextManager[object]:
        """The context in which the device is the current one."""
        return torch.cuda.device(self._device)

    def called(self, call: Callable[[], object]) -> tuple[float, float]:
        """Microseconds from a call's beginning to its end on the device, and to its last launch."""
        return _called(call)

    def sample(self, lanes: Sequence[Lane]) -> None:
        """Add a sample to each lane: all are queued in this order, then read."""
        was_late = [self._queue(lane) for lane in lanes]
        torch.cuda.synchronize()
        for lane, late in zip(lanes, was_late, strict=True):
            start, stop = _events_of(lane)
            samples_us = lane.late_us if late else lane.samples_us
            took_us = start.elapsed_time(stop) * 1e3
            samples_us.append(took_us / lane.calls / lane.entry.products)

    def _queue(self, lane: Lane) -> bool:
        """Queue a sample; whether the host was late for it at each attempt."""
        start, stop = _events_of(lane)
        for _ in range(self._tries):
            # Overwrite for so long that the host has launched the sample before the device is free.
            times = self._overwriter.times_to_cover(lane.launches_us[-1])
            covering = time.perf_counter_ns()
            for _ in range(times):
                self._overwriter.once()
            start.record()
            began = time.perf_counter_ns()
            lane.launch()
            lane.launches_us.append((time.perf_counter_ns() - began) / 1e3)
            stop.record()
            took_us = (time.perf_counter_ns() - covering) / 1e3
            if took_us <= self._overwriter.covered_us(times):
                return False
            if times == _MOST_FLUSHES:  # it cannot be covered: the sample counts as it is
                lane.uncovered += 1
                return False
        return True


@dataclass(frozen=True)
class Overwriter:
    """Overwrites the L2 cache.

    Attributes:
        once: overwrites the cache once.
        us: how long the device is busy with it; infinite if it does nothing.
        host_us: how long it takes the host to launch.
    """

    once: Callable[[], object]
    us: float
    host_us: float

    @classmethod
    def of(cls, scratch: torch.Tensor) -> Overwriter:
        """An overwriter that writes a tensor on the current device; its time is measured here."""
        for _ in range(2):  # the first one loads the kernel
            took_us, host_us = _called(lambda: [scratch.zero_() for _ in range(_FLUSHES_TIMED)])
        return cls(scratch.zero_, max(1.0, took_us / _FLUSHES_TIMED), host_us / _FLUSHES_TIMED)

    @classmethod
    def none(cls) -> Overwriter:
        """An overwriter that does nothing: caches stay warm, and the host is never late."""
        return cls(lambda: None, math.inf, 0.0)

    def times_to_cover(self, launch_us: float) -> int:
        """The number of overwrites that keep the device busy until the host has launched a sample.

        Args:
            launch_us: what the last one took the host.
        """
        needed_us = _COVERED * launch_us + _EVENTS_US
        return min(max(1, math.ceil(needed_us / self._gained_us)), _MOST_FLUSHES)

    def covered_us(self, times: int) -> float:
        """Microseconds that the host may take for this many overwrites and a sample.

        The device cannot have begun before the host, so it is busy for at least so long.
        """
        return times * self.us - _EVENTS_US / 2

    @property
    def _gained_us(self) -> float:
        # What one more lets the host be later: it has to be launched as well.
        return max(self.us - self.host_us, self.us / 4)


def spare_overwriter(device: torch.device) -> Overwriter:
    """The overwriter that fits the memory beside a model; `none` where there is too little.

    Args:
        device: the CUDA device, which is current.
    """
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    for times in _OVERWRITTEN:
        try:
            scratch = torch.empty(times * l2_bytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:  # the model needs it more
            continue
        return Overwriter.of(scratch)
    return Overwriter.none()


def flush_bytes(cache_bytes: int) -> int:
    """Twice the cache, because replacement is not exactly least-recently-used."""
    return min(max(2 * cache_bytes, 2**25), _LARGEST_FLUSH_BYTES)


def last_level_cache_bytes() -> int:
    """Size of the largest cache that CPU 0 sees; 32 MiB where it is unknown."""
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text(encoding="ascii").strip()
        number, unit = text.rstrip("KMG"), text[-1:]
        if number.isdigit():
            sizes.append(int(number) * {"K": 2**10, "M": 2**20, "G": 2**30}.get(unit, 1))
    return max(sizes, default=_UNKNOWN_CACHE_BYTES)


def _called(call: Callable[[], object]) -> tuple[float, float]:
    start, stop = _events()
    start.record()
    began = time.perf_counter_ns()
    call()
    host_us = (time.perf_counter_ns() - began) / 1e3
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) * 1e3, host_us


def _events_of(lane: Lane) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    if lane.events is None:
        lane.events = _events()
    return lane.events


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
