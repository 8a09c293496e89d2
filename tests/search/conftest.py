"""Searches that take a second: tiny layers, short measurements, the same code."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ksopt.search import SearchRequest, SearchResult, run_search, suspect_dense

Search = Callable[..., SearchResult]


@pytest.fixture
def search(quick: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Search:
    """Runs a search of a 32x64 layer, with the passed options."""
    # A slow moment of a short final must not make the dense layer look held back.
    monkeypatch.setattr(suspect_dense, "_SUSPECT", 1e9)

    def run(progress: Any = None, **options: Any) -> SearchResult:
        arguments = {
            "dims": "32x64",
            "budgets": ("50%",),
            "batch": 16,
            "device": "cpu",
            "trials": 4,
            "out": tmp_path / "report",
        }
        return run_search(SearchRequest(**{**arguments, **options}), progress)

    return run
