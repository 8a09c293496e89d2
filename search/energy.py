"""Energy of a call, by the counter of an NVIDIA GPU that its driver keeps (NVML).

The counter is the whole board's, idle draw included, and advances a few times in a tenth of a
second: each function is called for a second or so without a pause, from warm caches, and the
energy of that time is shared out. So it is the energy of a device that does nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ksopt.errors import InvalidInputError

_SECONDS = 1.0
# Calls between two looks at the clock take about so long: the device never waits for the host.
_BURST_S = 0.05


class Meter:
    """The energy counter of a device.

    Args:
        device: An NVIDIA GPU.

    Raises:
        InvalidInputError: It has no such counter, or it cannot be read; the sentence says why.
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
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            self.millijoules()
        except pynvml.NVMLError as error:
            raise InvalidInputError(
                f"energy cannot be measured on {device}: NVML says {error}; leave --energy out"
            ) from None

    def millijoules(self) -> float:
        """What the device has used since its driver was loaded."""
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))


def millijoules(
    calls: Mapping[str, Callable[[], object]],
    meter: Meter,
    synchronize: Callable[[], object],
    seconds: float = _SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Energy of one call of each function.

    Args:
        calls: By name.
        meter: Of the device that they compute on.
        synchronize: Waits for the device.
        seconds: How long each is called.
        clock: Seconds, rising.
    """
    found = {}
    for name, call in calls.items():
        call()
        synchronize()
        began = clock()
        call()
        synchronize()
        burst = max(1, int(_BURST_S / max(clock() - began, 1e-7)))
        before, began, count = meter.millijoules(), clock(), 0
        while count == 0 or clock() - began < seconds:
            for _ in range(burst):
                call()
            synchronize()
            count += burst
        found[name] = (meter.millijoules() - before) / count
    return found
