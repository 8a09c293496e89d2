"""The device backends, one file per kind of device: see `backends.base`.

A module that is added is imported with the others, and registers its backend: nothing else lists
it.
"""

from __future__ import annotations

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
