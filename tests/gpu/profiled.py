"""The kernels that a call launches, by torch's profiler."""

from __future__ import annotations

from collections.abc import Callable

import torch


def kernels_of(call: Callable[[], object]) -> list[str]:
    """The names of the kernels of a call, in order."""
    call()
    of_device = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[of_device]) as profile:
        call()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    events = [event for event in profile.events() if event.device_type == on_device]
    return [event.name for event in events if "Buffer Request" not in event.name]
