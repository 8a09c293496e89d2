"""The Pareto front: what no other trial beats in everything that is kept low."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ksopt.search.results import TrialRecord

VALUES: Mapping[str, Callable[[TrialRecord], float | None]] = {
    # Over the dense layer's, so that trials of several runs can be compared.
    "latency_us": lambda trial: trial.ratio,
    "parameters": lambda trial: float(trial.facts.nnz),
    "weight_error": lambda trial: trial.weight_error,
    "energy_mj": lambda trial: trial.energy_mj,
    "score": lambda trial: trial.score,
}
"""What a trial is judged by, named as a study's metrics are (`SearchRequest.metrics`)."""
NAMES: Mapping[str, str] = {
    "latency_us": "latency",
    "parameters": "weights",
    "weight_error": "weight error",
    "energy_mj": "energy",
    "score": "score",
}
"""What a person calls them."""


def pareto_front(trials: Sequence[TrialRecord], metrics: Sequence[str]) -> list[TrialRecord]:
    """Complete trials that no other one equals or beats in all metrics, the first metric rising.

    Of several that are alike in all, the first is kept; a trial that lacks a value is left out.

    Args:
        trials: Of one study.
        metrics: Keys of `VALUES`.
    """
    points: list[tuple[tuple[float, ...], TrialRecord]] = []
    for trial in trials:
        values = tuple(known for name in metrics if (known := VALUES[name](trial)) is not None)
        if trial.state == "complete" and len(values) == len(metrics):
            points.append((values, trial))
    front: list[tuple[tuple[float, ...], TrialRecord]] = []
    # In this order whatever beats a trial comes before it.
    for values, trial in sorted(points, key=lambda point: point[0]):
        if not any(
            all(other <= mine for other, mine in zip(kept, values, strict=True))
            for kept, _ in front
        ):
            front.append((values, trial))
    return [trial for _, trial in front]
