"""Which devices have what an operator needs."""

from __future__ import annotations


def least(capability: tuple[int, int], device: str) -> str | None:
    """Why a device is not a GPU of a compute capability, or a newer one; None if it is.

    Example:
        >>> least((8, 9), "cpu")
        'it needs a CUDA device of compute capability 8.9, not cpu'
    """
    wanted = f"it needs a CUDA device of compute capability {capability[0]}.{capability[1]}"
    if device == "cpu":
        return f"{wanted}, not {device}"
    import torch

    if not torch.cuda.is_available():  # which "auto" names then
        return f"{wanted}, and there is none here"
    device = "cuda" if device == "auto" else device
    major, minor = torch.cuda.get_device_capability(device)
    return None if (major, minor) >= capability else f"{wanted}; this one has {major}.{minor}"
