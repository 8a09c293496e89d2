"""ksopt: fast Kronecker-sparse linear layers.

Importing ksopt is light: torch is imported on the first use of `ks_linear`, `KSLinear` or the
modules that need it, and no GPU, disk or compiler is used before a product is computed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ksopt.errors import CompilationError, InvalidInputError, KsoptError, UnavailableError
from ksopt.patterns.chain import Chain, Pattern

if TYPE_CHECKING:
    from ksopt.compile.explain import explain
    from ksopt.compile.export import export_pass
    from ksopt.compile.monarch_patch import patch
    from ksopt.conversion.apply import Conversion, convert
    from ksopt.conversion.distillation import distil
    from ksopt.conversion.folder import load_converted, save_converted
    from ksopt.conversion.plan import Plan
    from ksopt.functional import ks_linear
    from ksopt.integrations.transformers import KSConfig as KSConfig
    from ksopt.kernels.cuda_graph_weights import prepared_weights
    from ksopt.kernels.weight_cache import refresh
    from ksopt.nn import KSLinear, KSStacked, param_groups
    from ksopt.optimization.result import Optimized
    from ksopt.optimization.run import optimize
    from ksopt.projection import Projection, project
    from ksopt.search.one_call import search

__version__ = "0.1.0"

__all__ = [
    "Chain",
    "CompilationError",
    "Conversion",
    "InvalidInputError",
    "KSLinear",
    "KSStacked",
    "KsoptError",
    "Optimized",
    "Pattern",
    "Plan",
    "Projection",
    "UnavailableError",
    "__version__",
    "convert",
    "distil",
    "explain",
    "export_pass",
    "ks_linear",
    "load_converted",
    "optimize",
    "param_groups",
    "patch",
    "prepared_weights",
    "project",
    "refresh",
    "save_converted",
    "search",
]

# The modules of the names that need torch; an empty text stands for the module of that name.
_LAZY = {
    "prepared_weights": "kernels.cuda_graph_weights",
    "refresh": "kernels.weight_cache",
    "explain": "compile.explain",
    "export_pass": "compile.export",
    "patch": "compile.monarch_patch",
    "ks_linear": "functional",
    "KSLinear": "nn",
    "KSStacked": "nn",
    "param_groups": "nn",
    "Conversion": "conversion.apply",
    "convert": "conversion.apply",
    "distil": "conversion.distillation",
    "Plan": "conversion.plan",
    "load_converted": "conversion.folder",
    "save_converted": "conversion.folder",
    "KSConfig": "integrations.transformers",  # optional dependency: not in __all__
    "Optimized": "optimization.result",
    "optimize": "optimization.run",
    "Projection": "projection",
    "project": "projection",
    "functional": "",
    "nn": "",
    "ops": "",
    "search": "",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'ksopt' has no attribute {name!r}")
    module = importlib.import_module(f"ksopt.{_LAZY[name] or name}")
    value = getattr(module, name) if _LAZY[name] else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
