"""The kernel families.

A family of factors, or of their weight gradients, is one module here and one template of
csrc/cuda, beside code that families share. A family of chains, MLPs or gradients of chains has
several of both: tile, cost, launcher, packing. All modules here are imported, and register their
families (base.py, gradient_base.py): nothing else lists them.
"""

from __future__ import annotations

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
