"""The torch.compile backend: ``torch.compile(model, backend="ksopt")``, and its pass on its own."""

from __future__ import annotations

from typing import Any

__all__ = ["export_pass", "rewrite"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ksopt.compile' has no attribute {name!r}")
    from ksopt.compile import standalone  # torch is imported on first use

    return getattr(standalone, name)
