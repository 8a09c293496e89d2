"""Pruning: chains that can no longer become finalists are stopped after their first repeats."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import optuna
from optuna.trial import FrozenTrial, TrialState

from ksopt.operators import registry
from ksopt.operators.registry import Replacement
from ksopt.search import metrics, trial_records
from ksopt.search.history import Trials
from ksopt.search.layer_request import LayerRequest
from ksopt.search.recommend import FINALISTS_PER_STEP
from ksopt.search.samplers.priors import HEURISTIC
from ksopt.search.space.space import Step

MARGIN = 2.0
"""A chain is hopeless if it takes this many times as long as all chains it would have to beat."""


@dataclass(frozen=True)
class _Rival:
    """A completely measured chain: its weights, and its latency over the dense layer's."""

    nnz: int
    ratio: float


@dataclass(frozen=True)
class Pruning:
    """The limit on the latency of chains.

    Args:
        study: With the trials so far.
        steps: Of the ladder.
        request: With its objective and constraints.
    """

    study: optuna.Study
    steps: Sequence[Step]
    request: LayerRequest
    _rivals: list[_Rival] = field(default_factory=list)

    @functools.cached_property
    def _trials(self) -> Trials:
        return Trials(self.study)

    def limit(self, chain: Replacement, origin: str) -> float | None:
        """Latency over the dense layer's above which a chain is hopeless; None if it never is.

        For each step that could recommend it there must be three others that are twice as fast,
        within the constraints, and, if the objective is the front of latency and weights, with no
        more weights. The heuristic's picks are always measured completely.
        """
        request = self.request
        if origin == HEURISTIC:
            return None  # the report compares the heuristic
        if not metrics.knows_only_latency(request):
            # A slow chain may be the best in another metric, even in energy: it is latency times
            # power, and a busy board may draw anything between its idle draw and its limit,
            # several times as much.
            return None
        if request.objective != "latency" and request.weights is not None:
            return None  # the error is on the front too
        self._rivals.extend(map(_rival, filter(self._is_rival, self._trials.look())))
        limits, nnz = [], chain.nnz
        for step in self.steps:
            if not step.holds(nnz):
                continue
            rivals = [one for one in self._rivals if step.holds(one.nnz)]
            if request.objective != "latency":
                rivals = [one for one in rivals if one.nnz <= nnz]
            fastest = heapq.nsmallest(FINALISTS_PER_STEP, (one.ratio for one in rivals))
            if len(fastest) < FINALISTS_PER_STEP:
                return None
            limits.append(fastest[-1])
        return MARGIN * max(limits) if limits else None

    def _is_rival(self, trial: FrozenTrial) -> bool:
        """Whether an ended trial was measured completely, and meets the request."""
        if trial.state != TrialState.COMPLETE:
            return False
        most, outcome = self.request.max_error, trial_records.outcome_of(trial)
        if most is not None and outcome["weight_error"] > most:
            return False
        # An earlier run of the study may have allowed more chains.
        return self.request.admits(registry.parse(trial.user_attrs["chain"]))


def _rival(trial: FrozenTrial) -> _Rival:
    known, outcome = trial_records.facts_of(trial), trial_records.outcome_of(trial)
    return _Rival(known["nnz"], outcome["dense_ratio"])
