"""Models optimized in seconds: short searches, no compiler, and finals and times that are set."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import ksopt
from ksopt import Optimized
from ksopt.compile import backend
from ksopt.measure.timing import Measurement
from ksopt.optimization import speed
from ksopt.search import finals, trial_records

from optimization_models import Optimize  # isort: skip


def measured(us: float) -> Measurement:
    return Measurement(us, 0.99 * us, 1.01 * us, 20)


@pytest.fixture
def layer_us(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What finals say that a dense layer and its fastest chain take."""
    times = {"dense": 1000.0, "chain": 300.0}

    def final(request: Any, device: Any, chains: list[Any], spare: Any) -> dict[str, Measurement]:
        times_of_chains = {str(one): measured(times["chain"] + at) for at, one in enumerate(chains)}
        return {**times_of_chains, "dense": measured(times["dense"])}

    monkeypatch.setattr(finals, "final", final)
    monkeypatch.setattr(trial_records, "dense_us", lambda _: times["dense"])
    return times


@pytest.fixture
def model_us(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What the whole model takes, dense and with chains; both are run."""
    times = {"dense": 2000.0, "chains": 1000.0}

    def measure(variants: Mapping[str, Callable[[], object]], *_: Any, **__: Any) -> Any:
        for call in variants.values():
            call()
        return {name: measured(times[name]) for name in variants}

    monkeypatch.setattr(speed, "measure", measure)
    return times


@pytest.fixture
def optimize(
    quick: None,
    layer_us: dict[str, float],
    model_us: dict[str, float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Optimize:
    """`ksopt.optimize`, with few trials and a report in the test's own folder."""
    monkeypatch.setattr(speed, "DENSE", "eager")
    monkeypatch.setattr(
        backend, "compile_by_inductor", lambda gm, example_inputs, config: gm.forward
    )

    def run(model: nn.Module, inputs: object, *words: Any, **options: Any) -> Optimized:
        defaults = {"trials": 4, "out": tmp_path / "report", "quiet": True}
        return ksopt.optimize(model, inputs, *words, **{**defaults, **options})

    return run
