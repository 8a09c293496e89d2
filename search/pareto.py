"""Pareto front of trials."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ksopt.search.metrics import Metric
from ksopt.search.results import TrialRecord


def pareto_front(trials: Iterable[TrialRecord], metrics: Sequence[Metric]) -> list[TrialRecord]:
    """Complete trials that no other one equals or beats in all metrics, by rising first metric.

    Of several that are equal in all, the first is taken; a trial that lacks a value is omitted.

    Args:
        trials: Of one study.
        metrics: The objectives.
    """
    points: list[tuple[tuple[float, ...], TrialRecord]] = []
    for trial in trials:
        costs = tuple(cost for one in metrics if (cost := one.cost(trial)) is not None)
        if trial.state == "complete" and len(costs) == len(metrics):
            points.append((costs, trial))
    front: list[tuple[tuple[float, ...], TrialRecord]] = []
    # In this order a trial comes after all that beat it.
    for costs, trial in sorted(points, key=lambda point: point[0]):
        if not any(
            all(other <= own for other, own in zip(better, costs, strict=True))
            for better, _ in front
        ):
            front.append((costs, trial))
    return [trial for _, trial in front]
