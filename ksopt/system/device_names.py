"""A check of device names without importing torch, which takes seconds."""

from __future__ import annotations

import ctypes
import re

from ksopt.errors import InvalidInputError
from ksopt.system.suggest import nearest

_DRIVER = "libcuda.so.1"
"""NVIDIA's driver, without which torch sees no CUDA device either."""


def refuse_absent(name: str) -> None:
    """Raise for a device that torch would not find; other devices may still be absent.

    Args:
        name: "auto", or torch's own name.

    Raises:
        InvalidInputError: The name is no device's, or a GPU's on a machine without a driver.

    Example:
        >>> refuse_absent("cpu")
        >>> refuse_absent("cdua")
        Traceback (most recent call last):
        ksopt.errors.InvalidInputError: device 'cdua' is not available: write cpu, cuda, \
cuda:1, ... or auto; did you mean 'cuda'?
    """
    if name in ("auto", "cpu"):
        return
    if not re.fullmatch(r"cuda(:\d+)?", name):
        raise InvalidInputError(
            f"device {name!r} is not available: write cpu, cuda, cuda:1, ... or auto"
            f"{nearest(name, ('auto', 'cpu', 'cuda'))}"
        )
    if not _has_driver():
        raise InvalidInputError(
            f"device {name!r} is not available: this machine has cpu, and no NVIDIA driver "
            f"({_DRIVER}); 'auto' takes the first GPU, else the CPU"
        )


def _has_driver() -> bool:
    try:
        ctypes.CDLL(_DRIVER)
    except OSError:
        return False
    return True
