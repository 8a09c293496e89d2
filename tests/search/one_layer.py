"""Requests and results of a single layer, shared by tests."""

from dataclasses import replace
from typing import Any

from ksopt.search import SearchResult


def with_layer(result: SearchResult, **changes: Any) -> SearchResult:
    """The same result, its only layer's changed."""
    (layer,) = result.layers
    return replace(result, layers=(replace(layer, **changes),))
