"""A check that a device still works after a failure on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ksopt.errors import KsoptError, first_line


class DeviceLostError(KsoptError, RuntimeError):
    """The device is unusable for this process: every further call would fail.

    Attributes:
        rows: of the benchmark's subject that was being measured, to be stored.
    """

    def __init__(self, message: str, rows: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.rows = rows


def raise_if_lost(
    device: torch.device, failed: object, message: str = "{failed} broke {device}: {reason}"
) -> None:
    """Raise if a failure has left the device unusable for this process.

    After an illegal access or a trap every call fails: what comes later must not be blamed.

    Args:
        device: The device on which something failed; a CPU is never lost.
        failed: What failed; it has a text.
        message: The text of the exception, with fields as above. The reason is the first line of
            the device's error.

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
        reason = first_line(error)
        text = message.format(failed=failed, device=device, reason=reason)
        raise DeviceLostError(text) from error
