"""The only module that reads environment variables."""

import os
from pathlib import Path
from typing import Literal, get_args

from ksopt.errors import InvalidInputError


def cache_dir() -> Path:
    """The folder for compiled code and measurements: ``KSOPT_CACHE_DIR``, else the user's cache.

    The folder is not created here; writers create it, private to the user.
    """
    folder = os.environ.get("KSOPT_CACHE_DIR")
    if folder:
        return Path(folder).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    root = Path(base).expanduser() if base else Path.home() / ".cache"
    return root / "ksopt"


def cxx_compiler() -> str:
    """The name or path of the C++ compiler: ``CXX``, else ``c++``."""
    return os.environ.get("CXX") or "c++"


# Every variable that ksopt reads, and its meaning.
KNOWN = {
    "KSOPT_CACHE_DIR": "folder for compiled code and measurements",
    "XDG_CACHE_HOME": "folder above ksopt's cache, where KSOPT_CACHE_DIR is not set",
    "CXX": "C++ compiler",
    "KSOPT_TUNE": "how to multiply: measure (default) the ways on this device once a problem and "
    "keep the fastest; model: take the one predicted to be; off: always PyTorch's simplest",
}


def in_force() -> dict[str, str]:
    """The variables that are set: the known ones, and others that begin with ``KSOPT_``."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name in KNOWN or name.startswith("KSOPT_")
    }


Tuning = Literal["off", "model", "measure"]


def tuning() -> Tuning:
    """The tuning mode for products: ``KSOPT_TUNE``, "measure" (default), "model" or "off".

    Raises:
        InvalidInputError: The variable has another value.
    """
    value = os.environ.get("KSOPT_TUNE", "measure")
    for mode in get_args(Tuning):
        if value == mode:
            tuning_mode: Tuning = mode
            return tuning_mode
    raise InvalidInputError(f"KSOPT_TUNE is {value!r}: it must be 'off', 'model' or 'measure'")
