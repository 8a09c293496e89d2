"""The compilation target of a device."""

from __future__ import annotations

import functools

import torch

from ksopt.jit import nvrtc


@functools.cache
def of_device(device: int) -> str:
    """Target of CUDA device ``device``, such as ``sm_80`` or ``sm_90a``.

    A device newer than this NVRTC gets portable code (``compute_...``) of the newest target that
    NVRTC knows, which the driver finishes compiling.
    """
    major, minor = torch.cuda.get_device_capability(device)
    return for_capability(major, minor, nvrtc.supported_capabilities())


def for_capability(major: int, minor: int, supported: tuple[int, ...]) -> str:
    """Target for compute capability ``major.minor``, among those that NVRTC supports.

    Example:
        >>> for_capability(9, 0, (80, 90))
        'sm_90a'
        >>> for_capability(8, 6, (80, 86, 90))
        'sm_86'
        >>> for_capability(13, 0, (80, 90, 120))
        'compute_120'
    """
    number = 10 * major + minor
    if number in supported:
        # From 9.0 on, "a" opens the instructions of exactly this device.
        return f"sm_{number}a" if number >= 90 else f"sm_{number}"
    older = [known for known in supported if known < number]
    return f"compute_{max(older, default=min(supported))}"
