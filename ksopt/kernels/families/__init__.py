"""The kernel families: one module here and one template of csrc/cuda each.

What families share is in common/, here and there. All modules here are imported and register their
families (base.py, gradient_base.py): nothing else lists them.
"""

from __future__ import annotations

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
