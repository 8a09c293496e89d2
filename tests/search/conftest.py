"""Searches that take a second: tiny layers, short measurements, the same code."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ksopt.measure.timing import Measurement
from ksopt.patterns.chain import Chain
from ksopt.search import SearchRequest, SearchResult, finals, run_search
from ksopt.search.objectives import Objective
from ksopt.search.worker_processes import Spare

Search = Callable[..., SearchResult]


def final_in_this_process(
    request: SearchRequest, device: torch.device, chains: Sequence[Chain], spare: Spare
) -> dict[str, Measurement]:
    """The final without the seconds that a fresh process needs to begin."""
    return Objective(request, device).final(chains, seconds=0.1)


@pytest.fixture
def quick(brief: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finals, "final", final_in_this_process)


@pytest.fixture
def search(quick: None, tmp_path: Path) -> Search:
    """Runs a search of a 32x64 layer, with the options given."""

    def run(progress: Any = None, **options: Any) -> SearchResult:
        given = {
            "dims": "32x64",
            "budgets": ("50%",),
            "batch": 16,
            "device": "cpu",
            "trials": 4,
            "out": tmp_path / "report",
        }
        return run_search(SearchRequest(**{**given, **options}), progress)

    return run
