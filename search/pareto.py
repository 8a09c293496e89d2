"""The Pareto front of trials: what no other one equals or beats in all that counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ksopt.search.metrics import Metric
from ksopt.search.results import TrialRecord


def pareto_front(trials: Iterable[TrialRecord], metrics: Sequence[Metric]) -> list[TrialRecord]:
    """Complete trials that no other one equals or beats in all metrics, the first metric rising.

    Of several that are alike in all, the first is kept; a trial that lacks a value is left out.

    Args:
        trials: Of one study.
        metrics: What counts.
    """
    points: list[tuple[tuple[float, ...], TrialRecord]] = []
    for trial in trials:
        costs = tuple(cost for one in metrics if (cost := one.cost(trial)) is not None)
        if trial.state == "complete" and len(costs) == len(metrics):
            points.append((costs, trial))
    front: list[tuple[tuple[float, ...], TrialRecord]] = []
    # In this order whatever beats a trial comes before it.
    for costs, trial in sorted(points, key=lambda point: point[0]):
        if not any(
            all(other <= own for other, own in zip(kept, costs, strict=True)) for kept, _ in front
        ):
            front.append((costs, trial))
    return [trial for _, trial in front]
