"""The latency that a report shows for a chain in its plots, tooltips and tables."""

from __future__ import annotations

from dataclasses import replace

from ksopt.search import recommend
from ksopt.search.results import Finalist, LayerResult, TrialRecord


class ReportedLatencies:
    """The latencies of a layer's chains relative to one time of the dense layer, in microseconds.

    A finalist has its time of the final, as in the tables. The clocks may have differed when other
    chains were timed. So those have their latency over the dense layer's, measured in turns, times
    the dense layer's of the final.

    Args:
        result: Of the layer.
    """

    def __init__(self, result: LayerResult) -> None:
        self.result = result
        self.finals: dict[int, Finalist] = {one.trial: one for one in result.finalists}
        trials = (trial.dense.median_us for trial in result.trials if trial.dense is not None)
        finals = [one.dense.median_us for one in result.finalists]
        self.dense_us = finals[0] if finals else next(trials, 1.0)

    @property
    def trials(self) -> list[TrialRecord]:
        """The trials of the search with their reported times."""
        return [self.reported(trial) for trial in self.result.trials]

    def front(self) -> list[TrialRecord]:
        """The Pareto front of all objectives, by these times."""
        return recommend.front_of(self.trials, self.result.request)

    def reported(self, trial: TrialRecord) -> TrialRecord:
        """A trial with its reported times."""
        final = self.finals.get(trial.number)
        if final is not None:
            return replace(trial, latency=final.latency, dense=final.dense)
        if trial.latency is None or trial.dense is None:
            return trial
        scale = self.dense_us / trial.dense.median_us
        latency, dense = (one.scaled(scale) for one in (trial.latency, trial.dense))
        return replace(trial, latency=latency, dense=dense)

    def ratio(self, trial: TrialRecord) -> float | None:
        """Latency over the dense layer's, of the final if it timed the chain."""
        return self.reported(trial).ratio_seen

    def latency_us(self, trial: TrialRecord) -> float | None:
        """A trial's latency; None if it was not measured."""
        one = self.reported(trial)
        return None if one.latency is None or one.dense is None else one.latency.median_us
