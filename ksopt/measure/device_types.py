"""What measuring needs of each type of devices: which there are, their facts, and their timers.

CPU and CUDA devices are here. The backend of another type (`ksopt.kernels.backends.base`) answers
by the methods of `DeviceType`, whose defaults ask torch's module of that name, such as
``torch.xpu``.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ksopt.errors import InvalidInputError
from ksopt.measure import timers
from ksopt.measure.timers import CpuTimer, CudaTimer, Overwriter, SynchronizingTimer, Timer
from ksopt.system.commands import first_line_of

_TRIES = 3  # of a sample that the host is late for


@dataclass(frozen=True)
class DeviceFacts:
    """The facts of a device that a report shows. None where they are unknown.

    Attributes:
        name: of the processor.
        memory_gib: of the device; on a CPU of the machine.
        driver: its version.
        capability: compute capability of a GPU, such as ``9.0``.
        multiprocessors: of a GPU.
        sm_clock_mhz, memory_clock_mhz: the highest clocks that the driver allows.
    """

    name: str | None = None
    memory_gib: float | None = None
    driver: str | None = None
    capability: str | None = None
    multiprocessors: int | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None


class DeviceType:
    """Devices of one type: which there are, what they are, and how to time on them.

    Attributes:
        device_type: torch's name of it, such as "xpu".
    """

    device_type: ClassVar[str]

    def available(self) -> Sequence[str]:
        """torch's names of the devices of this machine, such as "xpu:0"."""
        module = self._module()
        count = module.device_count() if module.is_available() else 0
        return [f"{self.device_type}:{index}" for index in range(count)]

    def facts(self, device: torch.device) -> DeviceFacts:
        """The facts for a report."""
        name = getattr(self._module(), "get_device_name", None)
        return DeviceFacts(None if name is None else str(name(device)))

    def synchronize(self, device: torch.device) -> None:
        """Wait until the device has done all that was queued."""
        self._module().synchronize(device)

    def timer(self, device: torch.device, cold: bool) -> Timer | None:
        """The timer of a device; None for the host's clock, from one `synchronize` to the next.

        Args:
            device: of this type.
            cold: whether it overwrites the device's caches before each sample.
        """
        return None

    def race_timer(self, device: torch.device) -> Timer:
        """The timer for a race of one problem's candidates, within the free memory."""
        return timer_of(device, cold=False)

    def _module(self) -> Any:
        return torch.get_device_module(self.device_type)


class _Cpu(DeviceType):
    """The CPU. In a race caches stay warm: a product that waits for its result is timed."""

    device_type = "cpu"

    def available(self) -> Sequence[str]:
        return ["cpu"]

    def facts(self, device: torch.device) -> DeviceFacts:
        try:
            bytes_of_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (ValueError, OSError, AttributeError):  # not a POSIX system, or unknown to it
            return DeviceFacts()
        return DeviceFacts(memory_gib=round(bytes_of_memory / 2**30, 1))

    def synchronize(self, device: torch.device) -> None:
        pass  # a call returns when it is done

    def timer(self, device: torch.device, cold: bool) -> Timer:
        return CpuTimer(cold)


class _Cuda(DeviceType):
    """CUDA devices."""

    device_type = "cuda"

    def facts(self, device: torch.device) -> DeviceFacts:
        properties = torch.cuda.get_device_properties(device)
        # Asked by UUID: nvidia-smi's numbers are not torch's where CUDA_VISIBLE_DEVICES is set.
        answer = first_line_of(
            "nvidia-smi",
            f"--id=GPU-{getattr(properties, 'uuid', '')}",
            "--query-gpu=driver_version,clocks.max.sm,clocks.max.mem",
            "--format=csv,noheader,nounits",
        )
        driver, sm, memory = (*(answer or "").split(", "), "", "", "")[:3]
        return DeviceFacts(
            name=properties.name,
            memory_gib=round(properties.total_memory / 2**30, 1),
            driver=driver or None,
            capability=f"{properties.major}.{properties.minor}",
            multiprocessors=properties.multi_processor_count,
            sm_clock_mhz=int(sm) if sm.isdigit() else None,
            memory_clock_mhz=int(memory) if memory.isdigit() else None,
        )

    def timer(self, device: torch.device, cold: bool) -> Timer:
        if not cold:
            return CudaTimer(device, Overwriter.none())
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        size = timers.flush_bytes(l2_bytes)
        with torch.cuda.device(device):
            scratch = torch.zeros(size, dtype=torch.uint8, device=device)
            return CudaTimer(device, Overwriter.of(scratch), _TRIES)

    def race_timer(self, device: torch.device) -> Timer:
        with torch.cuda.device(device):
            return CudaTimer(device, timers.spare_overwriter(device))


BUILT_IN = ("cpu", "cuda")
"""The types that are measured as here, whatever backend computes on them."""
DEVICE_TYPES: dict[str, DeviceType] = {"cpu": _Cpu(), "cuda": _Cuda()}
"""torch's name of a type -> what is registered for it."""


def type_of(device: torch.device) -> DeviceType:
    """What is registered for the type of a device.

    Raises:
        InvalidInputError: nothing is.
    """
    if device.type not in DEVICE_TYPES:
        raise InvalidInputError(
            f"measure: device {str(device)!r} must be a CPU or CUDA device, or of a type that has "
            "a backend"
        )
    return DEVICE_TYPES[device.type]


def synchronize(device: torch.device) -> None:
    """Wait for a device, if its type is registered."""
    if device.type in DEVICE_TYPES:
        DEVICE_TYPES[device.type].synchronize(device)


def timer_of(device: torch.device, cold: bool) -> Timer:
    """The timer of a device with its scratch memory, created once for the process.

    Args:
        device: of a registered type.
        cold: whether it overwrites the device's caches before each sample.

    Raises:
        InvalidInputError: nothing is registered for its type.
    """
    return _timer(type_of(device), device, cold)


@functools.lru_cache(maxsize=8)
def _timer(kind: DeviceType, device: torch.device, cold: bool) -> Timer:
    with torch.inference_mode(False):  # its memory is written outside of that mode, too
        return kind.timer(device, cold) or SynchronizingTimer(device, kind.synchronize, cold)
