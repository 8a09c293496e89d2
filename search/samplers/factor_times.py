"""How a search on a GPU looks for the fastest: a chain's time as the sum of its factors', or whole.

A factor is a kernel of its own, and its time in one chain says much of its time in another. What a
trial measured of each factor, and what the cost model predicts of the rest, corrected by how
measurements stand to predictions, gives an estimate for chains that were never run. A chain takes
less than that sum by nearly the same time for each factor after the first, whose launch and first
loads overlap with the factor before it; trials tell how much.

Some chains are computed in one launch, and then the cost model predicts that, corrected likewise.
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
"""What the report calls what chose such a chain."""
# Of its own, before each of the sampler's; and where more is to be low than what it knows.
_TURNS, _FEWER_TURNS = 8, 1
# Predictions of one turn: processes that share a study wait for each other's turns.
_PREDICTING_S = 0.1
# Of chains in one launch, once in a process: nine thousand take three seconds on one core.
_PREDICTING_WHOLES_S = 10.0
# A factor that was not predicted yet is hoped to come as near its floor as one in fifty that was.
_HOPE = 0.02

IntArray = npt.NDArray[np.int64]


def turns(request: LayerRequest) -> int:
    """How many turns an estimate has before each of the sampler's.

    It goes by latency and weights, and knows nothing of energy, an error or a score: where such are
    to be low, it is for the sampler to find chains that are slower and better in these.

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
        predicted: By the cost model; used, corrected, where there is no measured one.
        overlap_us: What a chain saves between two factors: see `overlaps_us`.

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
    """What each factor took, in the middle of the chains that it was measured in."""
    known: dict[Pattern, list[float]] = {}
    for chain, factors_us in trials:
        for pattern, us in zip(chain, factors_us, strict=False):
            if us is not None:
                known.setdefault(pattern, []).append(us)
    return {pattern: median(times_us) for pattern, times_us in known.items()}


def overlaps_us(
    timed: Iterable[tuple[float, Sequence[float | None]]],
) -> float:
    """What a chain saves between two factors: the middle of what measured chains saved, at least 0.

    Args:
        timed: A chain's time and its factors', microseconds.

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
    """Proposes chains that are estimated to be fast.

    A prediction takes some milliseconds, and the chains may have ten thousand factors: those are
    predicted that could belong to the fastest chain if they took little more than their floor.

    Args:
        candidates: What may be proposed.
        steps: Of the ladder: the one that was tried least is next.
        model: Asked for what it was not asked before.
        floor_us: The least time that a factor can take, microseconds.
        turns: Of its own before each of the sampler's.
        seconds: How long it may predict in one turn; what is known has to do then.
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
        """For a request with its batch resolved; None without a cost model, or without chains."""
        chains = [one for one in candidates if isinstance(one, Chain)]
        if model is None or not chains:
            return None
        assert request.batch is not None
        floor_us = functools.partial(roofline.factor_floor_us, batch=request.batch)
        return cls(chains, steps, model, floor_us, turns(request))

    def next(self, trials: Sequence[FrozenTrial], tried: Set[Replacement]) -> Chain | None:
        """The untried chain that is estimated to be fastest; None if it is the sampler's turn.

        The sampler has a turn now and then: an estimate knows the time of factors, and nothing of
        what makes a chain more than their sum, so the sampler may find what the estimate overlooks.
        But factors' times rank chains nearly perfectly (docs/searching.md).
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
        """How chains of one launch were measured to stand to their predictions, in the middle."""
        ratios = []
        for trial in ended:
            row = self._rows.get(registry.parse(trial.user_attrs["chain"]))
            outcome = trial_records.outcome_of(trial)
            # Of one launch no factor's time is known.
            if row is None or outcome.get("factors_us") or "latency" not in outcome:
                continue
            if np.isfinite(self._wholes_us[row]):
                ratios.append(outcome["latency"]["median_us"] / self._wholes_us[row])
        return median(ratios) if ratios else 1.0

    def _fastest(
        self, rows: IntArray, times: Mapping[Pattern, float], overlap_us: float
    ) -> tuple[float, Chain | None]:
        """The fastest of some candidates of which all is known, or that no other could beat.

        By launches a factor, and its time; infinite, and None, where nothing is known.
        """
        factors = self._factors[rows]
        correction = _correction(times, self.model.known)
        # NaN: not asked for yet; infinite: the model has no prediction.
        known = np.array(
            [*(self._known_us(pattern, times, correction) for pattern in self._patterns), 0.0]
        )
        floor = self._floors_us
        sound = np.isfinite(known[:-1])
        above = known[:-1][sound] - floor[:-1][sound]
        # Nearly the least that was seen above a floor, so that hardly a factor is passed over.
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
        """What all siblings take, and what follows them."""
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
        """Every factor of the candidates."""
        return list(dict.fromkeys(pattern for chain in self.candidates for pattern in chain))

    @functools.cached_property
    def _factors(self) -> IntArray:
        """Each candidate's places among the patterns; one beyond them where there is no factor."""
        places = {pattern: place for place, pattern in enumerate(self._patterns)}
        factors = np.full((len(self.candidates), max(map(len, self.candidates))), len(places))
        for row, chain in enumerate(self.candidates):
            factors[row, : len(chain)] = [places[pattern] for pattern in chain]
        return factors

    @functools.cached_property
    def _wholes_us(self) -> npt.NDArray[np.float64]:
        """What each candidate is predicted to take in one launch; infinite where none computes it.

        Of as many as there is time for, those of the fewest weights first.
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
    """How measurements stand to predictions, in the middle."""
    pairs = [us / guess for pattern, us in measured.items() if (guess := predicted.get(pattern))]
    return median(pairs) if pairs else 1.0
