"""The structures that ksopt has beside chains: each is one module here, which imports no torch.

A module that is added is imported with the others, and defines `STRUCTURE`: nothing else lists it.
"""

from __future__ import annotations

import importlib
import pkgutil

from ksopt.operators.structure import Structure

STRUCTURES: list[Structure] = [
    importlib.import_module(f"{__name__}.{module.name}").STRUCTURE
    for module in pkgutil.iter_modules(__path__)
]
