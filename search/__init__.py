"""The pattern search: which chain to use for a layer, measured on this device.

Importing this package is light; torch and Optuna are imported when a search runs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ksopt.search.request import Budget, Dims, SearchRequest

if TYPE_CHECKING:
    from ksopt.search.again import replay
    from ksopt.search.progress import Progress, for_terminal
    from ksopt.search.report import print_result, to_json
    from ksopt.search.result import Finalist, Recommendation, SearchResult, TrialRecord
    from ksopt.search.study import run_search

__all__ = [
    "Budget",
    "Dims",
    "Finalist",
    "Progress",
    "Recommendation",
    "SearchRequest",
    "SearchResult",
    "TrialRecord",
    "for_terminal",
    "print_result",
    "replay",
    "run_search",
    "to_json",
]

_LAZY = {
    "replay": "again",
    "run_search": "study",
    "for_terminal": "progress",
    "Progress": "progress",
    "print_result": "report",
    "to_json": "report",
    "Finalist": "result",
    "Recommendation": "result",
    "SearchResult": "result",
    "TrialRecord": "result",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'ksopt.search' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"ksopt.search.{_LAZY[name]}"), name)
    globals()[name] = value
    return value
