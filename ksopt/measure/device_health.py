"""A check that a device still works after a failure on it."""

from __future__ import annotations

import torch

from ksopt.errors import KsoptError


class DeviceLostError(KsoptError, RuntimeError):
    """The device is unusable for this process: every further call would fail."""


def check(device: torch.device, chain: object) -> None:
    """Raise if a failure has left the device unusable for this process.

    After an illegal access or a trap every call fails: chains that come later must not be blamed.

    Args:
        device: The device on which the chain failed.
        chain: The chain, or another operator, that failed; it has a text.

    Raises:
        DeviceLostError: The device does not work in this process any more.
    """
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
        torch.ones(1, device=device).item()
    except torch.OutOfMemoryError:
        return
    except RuntimeError as error:
        raise DeviceLostError(
            f"{device} works no more in this process since the chain {chain} failed "
            f"({str(error).splitlines()[0]}): the chain is recorded as failed, and the same "
            "command goes on without it"
        ) from error
