"""Errors of a device or of an implementation, which a benchmark records or ends with."""

from __future__ import annotations

import torch

from ksopt.bench.rows import Row
from ksopt.errors import KsoptError


class DeviceLost(KsoptError, RuntimeError):
    """The device no longer works in this process, which a faulty kernel can cause.

    Attributes:
        rows: of the subject being measured, to be stored.
    """

    def __init__(self, message: str, rows: list[Row]) -> None:
        super().__init__(message)
        self.rows = rows


def raise_if_lost(device: torch.device, after: object) -> None:
    """Raise if the device no longer works after an error.

    Args:
        device: a CPU is never lost.
        after: what failed on it.

    Raises:
        DeviceLost: it no longer works.
    """
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise DeviceLost(f"{after} broke {device}: {first_line(error)}", []) from error


def first_line(error: Exception) -> str:
    """The first line of an error's text, or the name of its type if it has none.

    Example:
        >>> first_line(RuntimeError("no kernel")), first_line(ValueError())
        ('no kernel', 'ValueError')
    """
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
