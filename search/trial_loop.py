"""The loop of one process: draw a chain, measure it, store the outcome, until all trials are done.

If several layer sizes are searched, each has a study and a trial_run, and they take turns: the one
that is furthest from its trials is next. So all have made equal progress when time is up.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import optuna
import torch
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import Trial, TrialState

from ksopt.errors import KsoptError
from ksopt.kernels.compile_ahead import Compilers
from ksopt.measure import device_health
from ksopt.measure.energy import Meter
from ksopt.measure.roofline import Roofline
from ksopt.operators.registry import Replacement
from ksopt.patterns.chain import Chain
from ksopt.search import device_locks, metrics
from ksopt.search.device_locks import Presence
from ksopt.search.layer_request import LayerRequest
from ksopt.search.objectives import Objective, Outcome
from ksopt.search.problems import problem_of
from ksopt.search.pruning import Pruning
from ksopt.search.results import ChainFacts
from ksopt.search.samplers import priors as prior_facts
from ksopt.search.samplers.chain_sampler import ChainSampler, suitable_sampler
from ksopt.search.samplers.cost_model import CostModel
from ksopt.search.samplers.factor_times import Estimator
from ksopt.search.space.space import Step
from ksopt.search.storage import Storage
from ksopt.search.trained_weights import TrainedWeights
from ksopt.search.trial_claims import Claim, Claims, alive
from ksopt.system.plurals import counted

CHAINS_AHEAD = 4
"""Chains drawn ahead: about ten factors are compiled concurrently."""
_WAIT_S = 0.2
_DEVICE_LOST = (
    "{device} works no more in this process since the chain {failed} failed ({reason}): the chain "
    "is recorded as failed, and the same command goes on without it"
)


@dataclass(frozen=True)
class Workplace:
    """Resources of a measuring process, for all layer sizes.

    Args:
        device: The device; no other process measures there meanwhile.
        roofline: Ceilings of the device.
        storage: Of the studies.
        presence: This process's.
        compilers: Compile the chains that are drawn ahead, if possible.
        meter: Of the device, if energy is measured.
    """

    device: torch.device
    roofline: Roofline
    storage: Storage
    presence: Presence
    compilers: Compilers = field(default_factory=Compilers)
    meter: Meter | None = None


@dataclass
class TrialRun:
    """Measurement of the trials that its claims draw.

    Args:
        claims: Draws trials.
        objective: Measures chains.
        device: The device; no other process measures there meanwhile.
        roofline: Ceilings of the device.
        request: With its batch resolved.
        pruning: Limit for hopeless chains.
        model: Predicts latencies, if available.
        compilers: Compile the chains that are drawn ahead, if possible.
    """

    claims: Claims
    objective: Objective
    device: torch.device
    roofline: Roofline
    request: LayerRequest
    pruning: Pruning
    model: CostModel | None
    compilers: Compilers = field(default_factory=Compilers)
    _drawn: deque[Claim] = field(default_factory=deque)

    @classmethod
    def of(
        cls,
        request: LayerRequest,
        study: optuna.Study,
        workplace: Workplace,
        *,
        run: int,
        candidates: Sequence[Replacement],
        steps: Sequence[Step],
        priors: Sequence[tuple[str, Replacement]],
        weights: TrainedWeights | None,
        seed: int,
        operand_seed: int | None = None,
        model: CostModel | None = None,
    ) -> TrialRun:
        """The trial_run of this process for a study.

        ``seed`` is of the draws, ``operand_seed`` of inputs and weights: None takes the request's.
        The others are as in `Claims`, `Objective` and `Pruning`.
        """
        device, roofline = workplace.device, workplace.roofline
        claims = Claims(
            workplace.storage,
            study,
            ChainSampler(candidates, suitable_sampler(len(candidates), request), seed),
            priors,
            limit=request.trials,
            run=run,
            presence=workplace.presence,
            estimator=Estimator.of(request, candidates, steps, model, roofline),
        )
        objective = Objective(request, device, weights, operand_seed, workplace.meter)
        pruning = Pruning(study, steps, request)
        return cls(
            claims, objective, device, roofline, request, pruning, model, workplace.compilers
        )

    def _compile_soon(self, chain: Replacement) -> None:
        request = self.request
        assert request.batch is not None  # it is resolved
        if isinstance(chain, Chain):
            self.compilers.soon([problem_of(chain, request)], request.batch)

    def step(self) -> int | None:
        """Measure one chain; return the number of its trial, or None if there is none to draw."""
        count = CHAINS_AHEAD if self.compilers.at_work else 1
        while len(self._drawn) < count and (claim := self.claims.next()) is not None:
            self._compile_soon(claim.chain)
            self._drawn.append(claim)
        if not self._drawn:
            return None
        claim = self._drawn[0]
        try:
            self._measure(claim)
        finally:
            self._drawn.popleft()
        return claim.trial.number

    @property
    def held(self) -> list[Claim]:
        """The claim that is being measured, and those drawn ahead."""
        return list(self._drawn)

    def end(self) -> None:
        """Return trials that were drawn and not begun: a resumed study draws them first."""
        for claim in self._drawn:
            self.claims.give_back(claim)
        self._drawn.clear()

    def _measure(self, claim: Claim) -> None:
        study, trial, chain = self.claims.study, claim.trial, claim.chain
        try:
            known = self._note_facts(trial, chain)  # marks it as begun
        except UpdateFinishedTrialError:
            return  # as in `_tell`, while it was drawn ahead
        try:
            with device_locks.device(self.device):
                limit = self.pruning.limit(chain, trial.user_attrs["origin"])
                outcome = self.objective.measure(chain, limit)
        except (KsoptError, RuntimeError) as error:
            # Out of memory, a kernel that does not compile, a wrong result: the chain has no time.
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            self._tell(trial, {"reason": reason}, TrialState.FAIL)
            device_health.raise_if_lost(self.device, chain, _DEVICE_LOST)
        except KeyboardInterrupt:
            trial.set_user_attr("interrupted", True)
            study.tell(trial, state=TrialState.FAIL)
            raise
        else:
            latency, dense = outcome.latency.median_us, outcome.dense.median_us
            attrs: dict[str, object] = {
                "latency": asdict(outcome.latency),
                "dense": asdict(outcome.dense),
                "dense_ratio": latency / dense,
                "times_as_fast_as_dense": dense / latency,
                "efficiency": known.floor_us / latency,
                "error": outcome.error,
                "error_pytorch": outcome.error_pytorch,
                "factors_us": list(outcome.factors_us),
                "seconds": outcome.seconds,
                **{metric.name: outcome.values.get(metric.name) for metric in metrics.stored()},
            }
            if outcome.latency.given_up:
                repeats = counted(outcome.latency.repeats, "repeat")
                attrs["pruned"] = (
                    f"given up after {repeats}: above {limit:.2f} of the "
                    "dense layer's latency it is none of the fastest"
                )
                self._tell(trial, attrs, TrialState.PRUNED)
                return
            for name, value in self._violations(outcome).items():
                trial.set_constraint(name, value)
            values = [outcome.values[one.name] for one in metrics.objectives(self.request)]
            self._tell(trial, attrs, TrialState.COMPLETE, values)

    def _violations(self, outcome: Outcome) -> dict[str, float]:
        """Violation of each constraint of the request by a chain; at most 0 if it is met."""
        violations = {}
        error = outcome.values.get(metrics.WEIGHT_ERROR.name)
        if self.request.max_error is not None and error is not None:
            violations["max_error"] = error - self.request.max_error
        if self.request.min_speedup is not None:
            speedup = outcome.dense.median_us / outcome.latency.median_us
            violations["min_speedup"] = self.request.min_speedup - speedup
        return violations

    def _tell(
        self,
        trial: Trial,
        outcome: dict[str, object],
        state: TrialState,
        values: list[float] | None = None,
    ) -> None:
        try:
            trial.set_user_attr("outcome", outcome)
        except UpdateFinishedTrialError:
            return  # this process was suspended for so long that another one took the chain over
        self.claims.study.tell(trial, values, state=state, skip_if_finished=True)

    def _note_facts(self, trial: Trial, chain: Replacement) -> ChainFacts:
        assert self.request.batch is not None
        predicted = None if self.model is None else self.model.predicted_us(chain)
        train, siblings = self.request.train, self.request.siblings
        known = prior_facts.facts(
            chain, self.roofline, self.request.batch, predicted, train, siblings
        )
        names = ("nnz", "share", "rho", "d_rho", "floor_us", "predicted_us")
        attrs: dict[str, object] = {name: getattr(known, name) for name in names}
        around = {"train": train, "siblings": siblings}
        trial.set_user_attr("facts", {**attrs, **around, "device": str(self.device)})
        return known


def take_turns(
    trial_runs: Sequence[TrialRun], on_trial: Callable[[int, int], None], deadline: float | None
) -> bool:
    """Measure until the trials of every trial_run's study are done.

    It ends when all trials have ended, including those of other processes: if one of those is
    killed, its chain is measured here.

    Args:
        trial_runs: In their initial order.
        on_trial: Called with the trial_run's index and the number of each trial that ended here.
        deadline: Of ``time.monotonic()``, after which no trial begins; None for none.

    Returns:
        Whether the trials were done in time.
    """
    try:
        with alive(lambda: [claim for trial_run in trial_runs for claim in trial_run.held]):
            return _in_turns(trial_runs, on_trial, deadline)
    finally:
        for trial_run in trial_runs:
            trial_run.end()


def _in_turns(
    trial_runs: Sequence[TrialRun], on_trial: Callable[[int, int], None], deadline: float | None
) -> bool:
    places = range(len(trial_runs))
    while deadline is None or time.monotonic() < deadline:
        for place in sorted(places, key=lambda place: trial_runs[place].claims.share_begun()):
            number = trial_runs[place].step()
            if number is not None:
                on_trial(place, number)
                break
        else:
            if not any(trial_run.claims.others() for trial_run in trial_runs):
                return True
            time.sleep(_WAIT_S)
    return False
