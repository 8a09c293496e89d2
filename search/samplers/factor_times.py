"""Estimates of chains' times on a GPU, from the times of their factors or of one launch.

A factor is a kernel of its own, and its time in one chain is similar in another. Measured times of
factors, and predictions of the cost model for the others, corrected by the ratio of measurements to
predictions, yield an estimate for chains that were never run. A chain takes less than the sum by
nearly the same time for each factor after the first, whose launch and first loads overlap with the
factor before it; this overlap is estimated from trials.

Some chains are computed in one launch, which the cost model predicts, corrected likewise.
"""

from __future__ import annotations

import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt
from optuna.trial import FrozenTrial, TrialState

from ksopt.measure.roofline import Roofline
from ksopt.operators import registry
from ksopt.operators.registry import Replacement
from ksopt.patterns.chain import Chain, Pattern
from ksopt.search import metrics, trial_records
from ksopt.search.layer_request import LayerRequest
from ksopt.search.samplers.cost_model import CostModel
from ksopt.search.space.space import Step

ORIGIN = "estimate"
"""Origin of such chains in the report."""
# Turns before each of the sampler's; and fewer if there are other objectives than latency and size.
_TURNS, _FEWER_TURNS = 8, 1
# Time for predictions in one turn: processes that share a study wait for each other's turns.
_PREDICTING_S = 0.1
# Time for predictions of chains in one launch, once in a process: 9,000 take 3 s on one core.
_PREDICTING_WHOLES_S = 10.0
# Quantile of the excess over the floor that is assumed for factors without a prediction.
_HOPE = 0.02

IntArray = npt.NDArray[np.int64]


def turns(request: LayerRequest) -> int:
    """Number of turns of the estimate before each of the sampler's.

    The estimate uses only latency and weights, not energy, an error or a score: if such are
    objectives, the sampler has to find chains that are slower and better in these.

    Example:
        >>> turns(LayerRequest("8x8")), turns(LayerRequest("8x8", energy=True))
        (8, 1)
    """
    return _TURNS if metrics.knows_only_latency(request) else _FEWER_TURNS


def estimates(
    candidates: Iterable[Chain],
    measured: Mapping[Pattern, float],
    predicted: Mapping[Pattern, float | None],
    overlap_us: float = 0.0,
) -> dict[Chain, float]:
    """Estimated microseconds of the chains whose factors are all known, measured or predicted.

    Args:
        candidates: Of any number of factors.
        measured: Factors' times, microseconds.
        predicted: By the cost model; used, corrected, for factors that were not measured.
        overlap_us: Saving between two factors: see `overlaps_us`.

    Example:
        >>> chain, other = Chain.parse("(1,4,2,2)*(2,2,4,1)"), Chain.parse("(1,4,4,2)*(2,4,4,1)")
        >>> guess = dict.fromkeys([*chain, *other], 10.0)
        >>> estimates([chain, other], {chain[0]: 30.0}, guess)[other]
        60.0
    """
    correction = _correction(measured, predicted)
    estimated = {}
    for chain in candidates:
        total = 0.0
        for pattern in chain:
            us = measured.get(pattern)
            if us is None:
                guess = predicted.get(pattern)
                if guess is None:
                    break
                us = correction * guess
            total += us
        else:
            estimated[chain] = total - overlap_us * (len(chain) - 1)
    return estimated


def factor_times(
    trials: Iterable[tuple[Chain, Sequence[float | None]]],
) -> dict[Pattern, float]:
    """Median time of each factor over the chains in which it was measured."""
    known: dict[Pattern, list[float]] = {}
    for chain, factors_us in trials:
        for pattern, us in zip(chain, factors_us, strict=False):
            if us is not None:
                known.setdefault(pattern, []).append(us)
    return {pattern: median(times_us) for pattern, times_us in known.items()}


def overlaps_us(
    timed: Iterable[tuple[float, Sequence[float | None]]],
) -> float:
    """Median saving between two factors in measured chains, at least 0.

    Args:
        timed: Pairs of a chain's time and its factors', microseconds.

    Example:
        >>> overlaps_us([(18.0, [10.0, 12.0]), (24.0, [10.0, 10.0, 10.0]), (9.0, [9.0])])
        3.5
    """
    saved = []
    for us, factors_us in timed:
        known = [factor_us for factor_us in factors_us if factor_us is not None]
        if len(known) == len(factors_us) > 1:
            saved.append((sum(known) - us) / (len(known) - 1))
    return max(0.0, median(saved)) if saved else 0.0


@dataclass(frozen=True)
class Estimator:
    """Proposal of chains that are estimated to be fast.

    A prediction takes some milliseconds, and the chains may have ten thousand factors: only factors
    are predicted that could belong to the fastest chain if they took little more than their floor.

    Args:
        candidates: The chains that may be proposed.
        steps: Of the ladder: the one with the fewest trials is next.
        model: Predicts factors.
        floor_us: The minimal time of a factor, microseconds.
        turns: Own turns before each of the sampler's.
        seconds: Time for predictions in one turn; then the known ones are used.
    """

    candidates: Sequence[Chain]
    steps: Sequence[Step]
    model: CostModel
    floor_us: Callable[[Pattern], float]
    turns: int = _TURNS
    seconds: float = _PREDICTING_S

    @classmethod
    def of(
        cls,
        request: LayerRequest,
        candidates: Sequence[Replacement],
        steps: Sequence[Step],
        model: CostModel | None,
        roofline: Roofline,
    ) -> Estimator | None:
        """The estimator of a request with its batch; None without a cost model or chains."""
        chains = [one for one in candidates if isinstance(one, Chain)]
        if model is None or not chains:
            return None
        assert request.batch is not None
        floor_us = functools.partial(roofline.factor_floor_us, batch=request.batch)
        return cls(chains, steps, model, floor_us, turns(request))

    def next(self, trials: Sequence[FrozenTrial], tried: Set[Replacement]) -> Chain | None:
        """The untried chain that is estimated to be fastest; None if it is the sampler's turn.

        The sampler has some turns: an estimate ignores effects beyond the sum of the factors, so
        the sampler may find chains that it overlooks. But factors' times rank chains nearly
        perfectly (docs/searching.md).
        """
        ended = [trial for trial in trials if "chain" in trial.user_attrs]
        ours = sum(trial.user_attrs.get("origin") == ORIGIN for trial in ended)
        theirs = sum(trial.user_attrs.get("origin") in ("TPE", "NSGA-II") for trial in ended)
        if ours >= self.turns * (theirs + 1):
            return None
        chains = [registry.parse(trial.user_attrs["chain"]) for trial in ended]
        outcomes = [trial_records.outcome_of(trial) for trial in ended]
        factors_us = [outcome.get("factors_us") or () for outcome in outcomes]
        pairs = zip(chains, factors_us, strict=True)
        times = factor_times((chain, us) for chain, us in pairs if isinstance(chain, Chain))
        overlap_us = overlaps_us(
            (outcome["latency"]["median_us"], of_one)
            for trial, outcome, of_one in zip(ended, outcomes, factors_us, strict=True)
            if trial.state == TrialState.COMPLETE and "latency" in outcome
        )
        correction = self._correction_of_wholes(ended)
        counts = Counter(
            place
            for chain in chains
            for place, step in enumerate(self.steps)
            if step.holds(chain.nnz)
        )
        open_ = np.ones(len(self.candidates), dtype=bool)
        open_[[self._rows[chain] for chain in tried if chain in self._rows]] = False
        for place in sorted(range(len(self.steps)), key=lambda place: counts[place]):
            step = self.steps[place]
            inside = (step.least <= self._nnz) & (self._nnz <= step.budget.parameters)
            rows = np.flatnonzero(open_ & inside)
            if len(rows) == 0:
                continue
            apart_us, apart = self._fastest(rows, times, overlap_us)
            whole_us = correction * self._wholes_us[rows]
            if whole_us.min() < apart_us:
                return self.candidates[int(rows[whole_us.argmin()])]
            if apart is not None:
                return apart
        return None

    def _correction_of_wholes(self, ended: Sequence[FrozenTrial]) -> float:
        """Median ratio of measured to predicted times of chains in one launch."""
        ratios = []
        for trial in ended:
            row = self._rows.get(registry.parse(trial.user_attrs["chain"]))
            outcome = trial_records.outcome_of(trial)
            # For one launch no factor's time is known.
            if row is None or outcome.get("factors_us") or "latency" not in outcome:
                continue
            if np.isfinite(self._wholes_us[row]):
                ratios.append(outcome["latency"]["median_us"] / self._wholes_us[row])
        return median(ratios) if ratios else 1.0

    def _fastest(
        self, rows: IntArray, times: Mapping[Pattern, float], overlap_us: float
    ) -> tuple[float, Chain | None]:
        """Time and chain of the fastest candidate by a launch per factor, among known times.

        Infinite and None if nothing is known.
        """
        factors = self._factors[rows]
        correction = _correction(times, self.model.known)
        # NaN: not predicted yet; infinite: the model has no prediction.
        known = np.array(
            [*(self._known_us(pattern, times, correction) for pattern in self._patterns), 0.0]
        )
        floor = self._floors_us
        sound = np.isfinite(known[:-1])
        above = known[:-1][sound] - floor[:-1][sound]
        # Nearly the least excess over a floor, so that hardly any factor is skipped.
        hopeful = floor + (np.quantile(above, _HOPE) if len(above) else 0.0)
        saved = overlap_us * ((factors < len(self._patterns)).sum(axis=1) - 1)
        until = time.monotonic() + self.seconds
        while True:
            total = np.where(np.isnan(known), hopeful, known)[factors].sum(axis=1) - saved
            best = int(total.argmin())
            if not np.isfinite(total[best]):
                return math.inf, None
            chain = self.candidates[int(rows[best])]
            unknown = [place for place in factors[best] if np.isnan(known[place])]
            if not unknown:
                return self._with_the_rest(float(total[best]), chain), chain
            if time.monotonic() >= until:
                break
            self.model.apart_us(chain)
            for place in unknown:
                known[place] = self._known_us(self._patterns[place], times, correction)
        total = np.where(np.isnan(known), np.inf, known)[factors].sum(axis=1) - saved
        best = int(total.argmin())
        if not np.isfinite(total[best]):
            return math.inf, None
        chain = self.candidates[int(rows[best])]
        return self._with_the_rest(float(total[best]), chain), chain

    def _with_the_rest(self, one_us: float, chain: Chain) -> float:
        """Time of all siblings and the epilogue, from the time of one."""
        return self.model.siblings * one_us + self.model.behind_us(chain.out_features)

    def _known_us(
        self, pattern: Pattern, times: Mapping[Pattern, float], correction: float
    ) -> float:
        us = times.get(pattern)
        if us is not None:
            return us
        if pattern not in self.model.known:
            return math.nan
        guess = self.model.known[pattern]
        return math.inf if guess is None else correction * guess

    @functools.cached_property
    def _rows(self) -> dict[Replacement, int]:
        return {chain: row for row, chain in enumerate(self.candidates)}

    @functools.cached_property
    def _nnz(self) -> IntArray:
        return np.array([chain.nnz for chain in self.candidates])

    @functools.cached_property
    def _patterns(self) -> list[Pattern]:
        """The distinct factors of the candidates."""
        return list(dict.fromkeys(pattern for chain in self.candidates for pattern in chain))

    @functools.cached_property
    def _factors(self) -> IntArray:
        """Indices of each candidate's factors in the patterns, padded with the patterns' number."""
        places = {pattern: place for place, pattern in enumerate(self._patterns)}
        factors = np.full((len(self.candidates), max(map(len, self.candidates))), len(places))
        for row, chain in enumerate(self.candidates):
            factors[row, : len(chain)] = [places[pattern] for pattern in chain]
        return factors

    @functools.cached_property
    def _wholes_us(self) -> npt.NDArray[np.float64]:
        """Predicted time of each candidate in one launch; infinite if none computes it.

        Computed for as many as there is time for, those with the fewest weights first.
        """
        times = np.full(len(self.candidates), math.inf)
        until = time.monotonic() + _PREDICTING_WHOLES_S
        for row in np.argsort(self._nnz):
            if time.monotonic() >= until:
                break
            us = self.model.whole_us(self.candidates[int(row)])
            times[row] = math.inf if us is None else us
        return times

    @functools.cached_property
    def _floors_us(self) -> npt.NDArray[np.float64]:
        return np.array([*map(self.floor_us, self._patterns), 0.0])


def _correction(
    measured: Mapping[Pattern, float], predicted: Mapping[Pattern, float | None]
) -> float:
    """Median ratio of measurements to predictions."""
    pairs = [us / guess for pattern, us in measured.items() if (guess := predicted.get(pattern))]
    return median(pairs) if pairs else 1.0
