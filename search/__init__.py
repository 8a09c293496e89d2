"""The pattern search: the best chains for layers, measured on this device.

The package is also a function: ``ksopt.search("768x3072")`` is `ksopt.search.one_call.search`.
Importing it is light; torch and Optuna are imported when a search runs.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ksopt.patterns.size import Budget, Dims
from ksopt.search.layer_request import LayerRequest
from ksopt.search.request import SearchRequest

if TYPE_CHECKING:
    from ksopt.search.hf_config import layers_of_config
    from ksopt.search.model_layers import layers_of_model
    from ksopt.search.plan import effect_of, plan_of
    from ksopt.search.progress import Progress, for_terminal
    from ksopt.search.report.results_json import to_json
    from ksopt.search.report.terminal import print_result
    from ksopt.search.results import (
        Finalist,
        LayerResult,
        Recommendation,
        SearchResult,
        TrialRecord,
    )
    from ksopt.search.saved_study import replay
    from ksopt.search.study import ToMeasure, run_search

__all__ = [
    "Budget",
    "Dims",
    "Finalist",
    "LayerRequest",
    "LayerResult",
    "Progress",
    "Recommendation",
    "SearchRequest",
    "SearchResult",
    "ToMeasure",
    "TrialRecord",
    "effect_of",
    "for_terminal",
    "layers_of_config",
    "layers_of_model",
    "plan_of",
    "print_result",
    "replay",
    "run_search",
    "to_json",
]

_LAZY = {
    "effect_of": "plan",
    "Finalist": "results",
    "for_terminal": "progress",
    "LayerResult": "results",
    "layers_of_config": "hf_config",
    "layers_of_model": "model_layers",
    "plan_of": "plan",
    "print_result": "report.terminal",
    "Progress": "progress",
    "Recommendation": "results",
    "replay": "saved_study",
    "run_search": "study",
    "SearchResult": "results",
    "to_json": "report.results_json",
    "ToMeasure": "study",
    "TrialRecord": "results",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'ksopt.search' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"ksopt.search.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


class _Package(ModuleType):
    """Class of this package's module, which makes it callable."""

    def __call__(self, *args: Any, **options: Any) -> SearchResult:
        """Run `ksopt.search.one_call.search`."""
        from ksopt.search.one_call import search

        return search(*args, **options)

    @property
    def __signature__(self) -> inspect.Signature:
        from ksopt.search.one_call import search

        return inspect.signature(search)


# Python's own way to give a module such behaviour: "Customizing module attribute access".
sys.modules[__name__].__class__ = _Package
