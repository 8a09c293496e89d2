"""The energy of a call, by an NVIDIA GPU's energy counter (NVML).

The counter is the whole board's, idle draw included. A function is called without a pause, from
warm caches, and the energy of that time is shared out over the calls: so it is the energy of a
device that does nothing else. Where calls are so short that the host cannot keep up, it includes
the energy of the waiting device.

The counter advances in steps, a few in a tenth of a second. Read at any moment it is up to a step
behind, at both ends: that could be a tenth of half a second. So what is measured lies between two
steps. Uncertain is then only where in a burst of calls each of them fell, some 5 ms: one percent of
half a second, however long the steps are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ksopt.errors import InvalidInputError, KsoptError

TRIAL_SECONDS = 0.5
"""How long a chain is called for its trial's energy; beside it come two waits for a step."""
FINAL_SECONDS = 1.0
"""How long a finalist, or the dense layer, is."""
# Calls that are queued together take about so long: many, so that the device hardly ever waits for
# the host, and few where a step of the counter is waited for, which falls somewhere among them.
_BURST_S, _STEP_BURST_S = 0.05, 0.005
# A counter that stands still for so long, while the device works, is no counter.
_STILL_S = 1.0
_LOOK_S = 0.001  # between two looks at the counter of a device that does nothing


class EnergyError(KsoptError, RuntimeError):
    """The counter failed when it was needed: the trial has failed."""


class Meter:
    """The energy counter of a device.

    Args:
        device: An NVIDIA GPU.

    Raises:
        InvalidInputError: It has no such counter, or it cannot be read; the message says why.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise InvalidInputError(
                f"energy is read from the counter of an NVIDIA GPU, and the device is {device}: "
                "leave --energy out"
            )
        try:
            import pynvml
        except ImportError:
            raise InvalidInputError(
                "energy needs the package nvidia-ml-py: pip install 'ksopt[energy]'"
            ) from None
        self._nvml: Any = pynvml
        self._device = device
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        except pynvml.NVMLError as error:
            raise InvalidInputError(
                f"energy cannot be measured on {device}: NVML says {error}; leave --energy out"
            ) from None

    def millijoules(self) -> float:
        """The energy that the device has used since its driver was loaded.

        Raises:
            EnergyError: The counter cannot be read any more.
        """
        try:
            return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        except self._nvml.NVMLError as error:
            raise EnergyError(f"the energy counter cannot be read: NVML says {error}") from None

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self._device)


def millijoules(
    calls: Mapping[str, Callable[[], object]],
    meter: Meter,
    seconds: float = FINAL_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Energy of one call of each function.

    Args:
        calls: By name.
        meter: Of the device that they compute on.
        seconds: How long each is called, besides the waits for a step of the counter.
        clock: Seconds, rising.

    Raises:
        EnergyError: The counter cannot be read, or stands still.
    """
    energies = per_call(calls, meter, seconds, clock)
    return {name: one.millijoules for name, one in energies.items()}


@dataclass(frozen=True)
class PerCall:
    """The energy and the time of one call while a function was called without a pause.

    Attributes:
        millijoules: of the whole board, idle draw included.
        seconds: of the clock.
    """

    millijoules: float
    seconds: float


def per_call(
    calls: Mapping[str, Callable[[], object]],
    meter: Meter,
    seconds: float = FINAL_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, PerCall]:
    """Energy and time of one call of each function; the arguments are those of `millijoules`.

    The time is the one that an idle draw has to be multiplied with: it is of warm caches and of no
    single call, so it is no latency.

    Raises:
        EnergyError: The counter cannot be read, or stands still.
    """
    energies = {}
    for name, call in calls.items():
        at_work = _AtWork.begin(call, meter, clock)
        # The first burst also lets the draw settle, after other work or none.
        at_work.burst()
        first, counted = at_work.until_step(), at_work.count
        began = clock()
        while clock() - began < seconds:
            at_work.burst()
        last = at_work.until_step()
        count = at_work.count - counted
        energies[name] = PerCall((last - first) / count, (clock() - began) / count)
    return energies


def idle_watts(
    meter: Meter,
    seconds: float = 2.0,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], object] = time.sleep,
) -> float:
    """The power of the idle device with its context alive, between two steps of the counter.

    Args:
        meter: Of the device.
        seconds: How long to do nothing, besides the waits for a step of the counter.
        clock: Seconds, rising.
        sleep: Waits for a number of seconds.

    Raises:
        EnergyError: The counter cannot be read, or stands still.
    """
    meter.synchronize()

    def step() -> tuple[float, float]:
        before, began = meter.millijoules(), clock()
        while True:
            now = meter.millijoules()
            if now > before:
                return now, clock()
            if clock() - began > _STILL_S:
                raise EnergyError(f"the energy counter stood still at {before:g} mJ for a second")
            sleep(_LOOK_S)

    first, began = step()
    sleep(seconds)
    last, ended = step()
    return (last - first) / 1e3 / (ended - began)


@dataclass
class _AtWork:
    """A function that is called again and again.

    Args:
        call: The function.
        meter: Of its device.
        clock: Seconds, rising.
        call_s: Seconds of a call, waiting for the device.
        count: Calls so far.
    """

    call: Callable[[], object]
    meter: Meter
    clock: Callable[[], float]
    call_s: float
    count: int = 0

    @classmethod
    def begin(cls, call: Callable[[], object], meter: Meter, clock: Callable[[], float]) -> _AtWork:
        """Call it twice; the second call is timed."""
        call()
        meter.synchronize()
        began = clock()
        call()
        meter.synchronize()
        return cls(call, meter, clock, max(clock() - began, 1e-7))

    def burst(self) -> None:
        """Calls for a while, to their end."""
        self._queue(_BURST_S)
        self.meter.synchronize()

    def until_step(self) -> float:
        """The counter's value in millijoules, once it has advanced."""
        before, began = self.meter.millijoules(), self.clock()
        while True:
            self._queue(_STEP_BURST_S)
            # While the device is at work: a look takes its time, too. That what is queued counts as
            # done is so at both ends, and no error.
            now = self.meter.millijoules()
            self.meter.synchronize()
            if now > before:
                return now
            if self.clock() - began > _STILL_S:
                raise EnergyError(
                    f"the energy counter stood still at {before:g} mJ for "
                    f"{self.clock() - began:.1f} s in which the device was at work"
                )

    def _queue(self, seconds: float) -> None:
        """Queue calls for about this long, at least one."""
        count = max(1, int(seconds / self.call_s))
        for _ in range(count):
            self.call()
        self.count += count
