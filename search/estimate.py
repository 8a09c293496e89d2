"""A chain's time as the sum of its factors': how a search on a GPU looks for the fastest.

A factor is a kernel of its own, and its time in one chain says much of its time in another. What a
trial measured of each factor, and what the cost model predicts of the rest, corrected by how
measurements stand to predictions, gives an estimate for chains that were never run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from statistics import median

from optuna.trial import FrozenTrial

from ksopt.pattern import Chain, Pattern
from ksopt.search.cost import CostModel
from ksopt.search.space import Step

ORIGIN = "estimate"
"""What the report calls what chose such a chain."""
# Of its own, before each of the sampler's; and where more is to be low than what it knows.
_TURNS, _FEWER_TURNS = 5, 1
_KNOWN = ("latency_us", "parameters")


def turns(metrics: Sequence[str]) -> int:
    """How many turns an estimate has before each of the sampler's.

    It goes by latency and weights, and knows nothing of energy, an error or a score: where such are
    to be low, it is for the sampler to find chains that are slower and better in these.

    Args:
        metrics: What a study keeps low, by name.

    Example:
        >>> turns(("latency_us", "parameters")), turns(("latency_us", "parameters", "energy_mj"))
        (5, 1)
    """
    return _TURNS if set(metrics) <= set(_KNOWN) else _FEWER_TURNS


def estimates(
    candidates: Iterable[Chain],
    measured: Mapping[Pattern, float],
    predicted: Mapping[Pattern, float | None],
) -> dict[Chain, float]:
    """Estimated microseconds of the chains whose factors are all known, measured or predicted.

    Example:
        >>> chain, other = Chain.parse("(1,4,2,2)*(2,2,4,1)"), Chain.parse("(1,4,4,2)*(2,4,4,1)")
        >>> guess = dict.fromkeys([*chain, *other], 10.0)
        >>> estimates([chain, other], {chain[0]: 30.0}, guess)[other]
        60.0
    """
    pairs = [us / guess for pattern, us in measured.items() if (guess := predicted.get(pattern))]
    correction = median(pairs) if pairs else 1.0
    found = {}
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
            found[chain] = total
    return found


def factor_times(
    trials: Iterable[tuple[Chain, Sequence[float | None]]],
) -> dict[Pattern, float]:
    """What each factor took, in the middle of the chains that it was measured in."""
    known: dict[Pattern, list[float]] = {}
    for chain, factors_us in trials:
        for pattern, us in zip(chain, factors_us, strict=False):
            if us is not None:
                known.setdefault(pattern, []).append(us)
    return {pattern: median(found) for pattern, found in known.items()}


@dataclass(frozen=True)
class Estimator:
    """Proposes chains that are estimated to be fast.

    Args:
        candidates: What may be proposed.
        steps: Of the ladder: the one that was tried least is next.
        model: Its predictions so far are used; none is made.
        turns: Of its own before each of the sampler's.
    """

    candidates: Sequence[Chain]
    steps: Sequence[Step]
    model: CostModel
    turns: int = _TURNS

    def next(self, trials: Sequence[FrozenTrial], tried: Set[Chain]) -> Chain | None:
        """The untried chain that is estimated to be fastest; None if it is the sampler's turn.

        The sampler has a turn now and then: an estimate knows the time of factors, and nothing of
        what makes a chain more than their sum, so the sampler may find what the estimate overlooks.
        But factors' times rank chains nearly perfectly (docs/search.md).
        """
        ended = [trial for trial in trials if "chain" in trial.user_attrs]
        ours = sum(trial.user_attrs.get("origin") == ORIGIN for trial in ended)
        theirs = sum(trial.user_attrs.get("origin") in ("TPE", "NSGA-II") for trial in ended)
        if ours >= self.turns * (theirs + 1):
            return None
        chains = [Chain.parse(trial.user_attrs["chain"]) for trial in ended]
        times = factor_times(
            (chain, trial.user_attrs.get("factors_us") or ())
            for chain, trial in zip(chains, ended, strict=True)
        )
        known = estimates(self.candidates, times, self.model.known)
        counts = Counter(
            place
            for chain in chains
            for place, step in enumerate(self.steps)
            if step.holds(chain.nnz)
        )
        for place in sorted(range(len(self.steps)), key=lambda place: counts[place]):
            step = self.steps[place]
            left = [c for c in known if step.holds(c.nnz) and c not in tried]
            if left:
                return min(left, key=lambda chain: known[chain])
        return None
