"""The kernel families.

A family of factors is one module here and one template of csrc/cuda, beside code that families
share. A family of chains or MLPs has several of both: tile, cost, launcher, packing. All modules
here are imported, and register their families: nothing else lists them.

The families of gradients (``weight_grad*``, ``chain_grads*``, ``input_grad*``) have several modules
too, and are not registered: ``kernels/weight_gradients.py``, ``chain_gradients.py``,
``input_gradients.py`` and ``trained_chain.py`` import them by name.
"""

from __future__ import annotations

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
