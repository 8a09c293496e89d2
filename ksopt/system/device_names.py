"""A check of device names without importing torch, which takes seconds."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

from ksopt.errors import InvalidInputError
from ksopt.system.suggest import nearest

REGISTERED_TYPES: set[str] = set()
"""The types of devices that have a backend in this process."""
_DRIVER = "libcuda.so.1"
"""NVIDIA's driver, without which torch sees no CUDA device either."""


def refuse_absent(name: str) -> None:
    """Raise for a device that torch would not find; other devices may still be absent.

    A type of devices that is neither "cpu" nor "cuda" has a registered backend, or one that will
    be: a module of the type's name in `ksopt.kernels.backends`.

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
    if name.partition(":")[0] in {*_backends(), *REGISTERED_TYPES} - {"cpu", "cuda"}:
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


def _backends() -> list[str]:
    """The names of the modules of `ksopt.kernels.backends`, which would import torch."""
    folder = Path(__file__).parents[1] / "kernels" / "backends"
    return [file.stem for file in folder.glob("*.py") if file.stem not in ("__init__", "base")]


def _has_driver() -> bool:
    try:
        ctypes.CDLL(_DRIVER)
    except OSError:
        return False
    return True
