"""What measuring needs of a device that is neither a CPU nor a CUDA device.

The backend of such a type (`ksopt.kernels.backends.base`) answers by the methods of `DeviceType`,
whose defaults ask torch's module of that name, such as ``torch.xpu``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

if TYPE_CHECKING:
    from ksopt.measure.timers import Timer  # which imports this module


@dataclass(frozen=True)
class DeviceFacts:
    """The facts of a device that a report shows. None where they are unknown.

    Attributes:
        name: of the processor.
        memory_gib: of the device.
        driver: its version.
    """

    name: str | None = None
    memory_gib: float | None = None
    driver: str | None = None


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

    def _module(self) -> Any:
        return torch.get_device_module(self.device_type)


DEVICE_TYPES: dict[str, DeviceType] = {}
"""torch's name of a type -> what is registered for it."""


def other_type(device: torch.device) -> DeviceType | None:
    """What is registered for the type of a device; None for CPU and CUDA, which are built in."""
    return None if device.type in ("cpu", "cuda") else DEVICE_TYPES.get(device.type)


def other_devices() -> list[str]:
    """torch's names of this machine's devices of registered types, without CPU and CUDA devices."""
    others = [one for name, one in DEVICE_TYPES.items() if name not in ("cpu", "cuda")]
    return [device for one in others for device in one.available()]


def synchronize(device: torch.device) -> None:
    """Wait for a device that is neither a CPU nor a CUDA device, if its type is registered."""
    one = other_type(device)
    if one is not None:
        one.synchronize(device)
