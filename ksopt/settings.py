"""The one place that reads the environment."""

import os
from pathlib import Path


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
