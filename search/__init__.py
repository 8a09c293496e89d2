"""The pattern search: which chain to use for a layer, measured on this device.

Importing this package is light; torch and Optuna are imported when a search runs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ksopt.search.request import Budget, Dims, SearchRequest

if TYPE_CHECKING:
    from ksopt.search.hf_config import layers_of_config
    from ksopt.search.layers_request import LayersRequest
    from ksopt.search.layers_result import LayersResult
    from ksopt.search.layers_study import ToMeasure, run_layers
    from ksopt.search.model_layers import layers_of_model
    from ksopt.search.progress import Progress, for_terminal
    from ksopt.search.report.export import print_result, to_json
    from ksopt.search.results import Finalist, Recommendation, SearchResult, TrialRecord
    from ksopt.search.saved_study import replay
    from ksopt.search.study import run_search

__all__ = [
    "Budget",
    "Dims",
    "Finalist",
    "LayersRequest",
    "LayersResult",
    "Progress",
    "Recommendation",
    "SearchRequest",
    "SearchResult",
    "ToMeasure",
    "TrialRecord",
    "for_terminal",
    "layers_of_config",
    "layers_of_model",
    "print_result",
    "replay",
    "run_layers",
    "run_search",
    "to_json",
]

_LAZY = {
    "LayersRequest": "layers_request",
    "LayersResult": "layers_result",
    "ToMeasure": "layers_study",
    "layers_of_config": "hf_config",
    "layers_of_model": "model_layers",
    "run_layers": "layers_study",
    "replay": "saved_study",
    "run_search": "study",
    "for_terminal": "progress",
    "Progress": "progress",
    "print_result": "report.export",
    "to_json": "report.export",
    "Finalist": "results",
    "Recommendation": "results",
    "SearchResult": "results",
    "TrialRecord": "results",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'ksopt.search' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"ksopt.search.{_LAZY[name]}"), name)
    globals()[name] = value
    return value
