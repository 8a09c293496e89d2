"""The one latency that a report says of a chain: in its plots, their tips and its tables."""

from __future__ import annotations

from dataclasses import replace

from ksopt.search import recommend
from ksopt.search.results import Finalist, LayerResult, TrialRecord


class ReportedLatencies:
    """The latencies of a layer's chains beside one time of the dense layer, in microseconds.

    A finalist has the time that the tables of the answer and the final have. The clocks may have
    been others when another chain was timed. So it has its latency over the dense layer's, measured
    in turns with it, times the dense layer's of the final.

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
        """Those of the search, each with the times that the report says of its chain."""
        return [self.reported(trial) for trial in self.result.trials]

    def front(self) -> list[TrialRecord]:
        """The Pareto front of all that was asked for, by these times."""
        return recommend.front_of(self.trials, self.result.request)

    def reported(self, trial: TrialRecord) -> TrialRecord:
        """A trial with the times that the report says of its chain."""
        final = self.finals.get(trial.number)
        if final is not None:
            return replace(trial, latency=final.latency, dense=final.dense)
        if trial.latency is None or trial.dense is None:
            return trial
        scale = self.dense_us / trial.dense.median_us
        latency, dense = (one.scaled(scale) for one in (trial.latency, trial.dense))
        return replace(trial, latency=latency, dense=dense)

    def ratio(self, trial: TrialRecord) -> float | None:
        """Latency over the dense layer's, of the final where that has timed the chain."""
        return self.reported(trial).ratio_seen

    def latency_us(self, trial: TrialRecord) -> float | None:
        """A trial's latency; None where nothing was measured."""
        one = self.reported(trial)
        return None if one.latency is None or one.dense is None else one.latency.median_us
