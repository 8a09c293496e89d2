"""The torch.compile backend: ``torch.compile(model, backend="ksopt")``, and its pass on its own."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {"collected": "backend", "export_pass": "export", "rewrite": "export"}
__all__ = ["collected", "export_pass", "rewrite"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ksopt.compile' has no attribute {name!r}")
    # torch is imported on first use
    return getattr(importlib.import_module(f"ksopt.compile.{_HOMES[name]}"), name)
