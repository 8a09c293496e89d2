"""A check of the compute capability that an operator needs."""

from __future__ import annotations


def least(capability: tuple[int, int], device: str) -> str | None:
    """The reason a device is no GPU of at least a compute capability; None if it is one.

    Example:
        >>> least((8, 9), "cpu")
        'it needs a CUDA device of compute capability 8.9, not cpu'
    """
    requirement = f"it needs a CUDA device of compute capability {capability[0]}.{capability[1]}"
    if device.partition(":")[0] not in ("auto", "cuda"):
        return f"{requirement}, not {device}"
    import torch

    if not torch.cuda.is_available():  # the device may be "auto"
        return f"{requirement}, and there is none here"
    device = "cuda" if device == "auto" else device
    major, minor = torch.cuda.get_device_capability(device)
    return None if (major, minor) >= capability else f"{requirement}; this one has {major}.{minor}"
