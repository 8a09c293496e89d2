"""When a chain is given up after its first repeats: it can be no finalist any more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import optuna
from optuna.trial import FrozenTrial, TrialState

from ksopt.operators import registry
from ksopt.operators.registry import Replacement
from ksopt.search import metrics, trial_records
from ksopt.search.layer_request import LayerRequest
from ksopt.search.recommend import FINALISTS_PER_STEP
from ksopt.search.samplers.priors import HEURISTIC
from ksopt.search.space.space import Step

MARGIN = 2.0
"""A chain is hopeless if it takes this many times as long as all that it would have to beat."""


@dataclass(frozen=True)
class Pruning:
    """Says how slow a chain may be.

    Args:
        study: What was measured so far.
        steps: Of the ladder.
        request: With its objective and constraints.
    """

    study: optuna.Study
    steps: Sequence[Step]
    request: LayerRequest
    _admitted: dict[str, bool] = field(default_factory=dict)  # by the chain's text

    def limit(self, chain: Replacement, origin: str) -> float | None:
        """Latency over the dense layer's above which a chain is hopeless; None if it never is.

        For each step that could recommend it there must be three others that are twice as fast,
        within the constraints, and, when the front of latency and weights is asked for, with no
        more weights. The heuristic's picks are always measured in full.
        """
        request = self.request
        if origin == HEURISTIC:
            return None  # the report compares the heuristic
        if not metrics.knows_only_latency(request):
            # A slow chain may be the best in another metric. Even in energy: it is latency times
            # power, and a board at work may draw anything between its idle draw and its limit,
            # several times as much.
            return None
        if request.objective != "latency" and request.weights is not None:
            return None  # the error is on the front too
        states = (TrialState.COMPLETE,)
        trials = self.study.get_trials(deepcopy=False, states=states)
        limits = []
        for step in self.steps:
            if not step.holds(chain.nnz):
                continue
            rivals = sorted(
                trial_records.outcome_of(trial)["dense_ratio"]
                for trial in trials
                if self._is_rival(trial, step, chain)
            )
            if len(rivals) < FINALISTS_PER_STEP:
                return None
            limits.append(rivals[FINALISTS_PER_STEP - 1])
        return MARGIN * max(limits) if limits else None

    def _is_rival(self, trial: FrozenTrial, step: Step, chain: Replacement) -> bool:
        nnz, most = trial_records.facts_of(trial)["nnz"], self.request.max_error
        return (
            step.holds(nnz)
            and (self.request.objective == "latency" or nnz <= chain.nnz)
            and (most is None or trial_records.outcome_of(trial)["weight_error"] <= most)
            and self._is_admitted(trial.user_attrs["chain"])
        )

    def _is_admitted(self, text: str) -> bool:
        """Whether the request allows a chain: an earlier run of the study may have allowed more."""
        if text not in self._admitted:
            self._admitted[text] = self.request.admits(registry.parse(text))
        return self._admitted[text]
