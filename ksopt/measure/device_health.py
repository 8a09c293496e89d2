"""Whether a device still works after something has failed on it."""

from __future__ import annotations

import torch

from ksopt.errors import KsoptError


class DeviceLostError(KsoptError, RuntimeError):
    """Every further call on the device would fail in this process, whatever it computes."""


def check(device: torch.device, chain: object) -> None:
    """Nothing, but where a failure has left the device unusable for this process.

    After an illegal access or a trap every call fails: chains that come later must not be blamed.

    Args:
        device: Where the chain failed.
        chain: What failed: a chain, or another operator, that has a text.

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
