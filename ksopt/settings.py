"""The one place that reads the environment."""

import os
from pathlib import Path
from typing import Literal, get_args

from ksopt.errors import InvalidInputError


def cache_dir() -> Path:
    """Folder for compiled code and measurements: ``KSOPT_CACHE_DIR``, else the user's cache.

    The folder is not created here; whoever writes creates it, private to the user.
    """
    given = os.environ.get("KSOPT_CACHE_DIR")
    if given:
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    root = Path(base).expanduser() if base else Path.home() / ".cache"
    return root / "ksopt"


def cxx_compiler() -> str:
    """Name or path of the C++ compiler: ``CXX``, else ``c++``."""
    return os.environ.get("CXX") or "c++"


# Every variable that ksopt reads, and what it decides.
KNOWN = {
    "KSOPT_CACHE_DIR": "folder for compiled code and measurements",
    "XDG_CACHE_HOME": "folder above ksopt's cache, where KSOPT_CACHE_DIR is not set",
    "CXX": "C++ compiler",
    "KSOPT_TUNE": "how to multiply: measure (default) the ways on this device once a problem and "
    "keep the fastest; model: take the one predicted to be; off: always PyTorch's simplest",
}


def in_force() -> dict[str, str]:
    """Variables that are set now: the known ones, and any other that begins with ``KSOPT_``."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name in KNOWN or name.startswith("KSOPT_")
    }


Tuning = Literal["off", "model", "measure"]


def tuning() -> Tuning:
    """How a product's way is chosen: ``KSOPT_TUNE``, "measure" (default), "model" or "off".

    Raises:
        InvalidInputError: The variable says something else.
    """
    given = os.environ.get("KSOPT_TUNE", "measure")
    for mode in get_args(Tuning):
        if given == mode:
            found: Tuning = mode
            return found
    raise InvalidInputError(f"KSOPT_TUNE is {given!r}: it must be 'off', 'model' or 'measure'")
