"""Diagnostics of a search: the drift of times, failures, and the quality of predictors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ksopt.measure.timing import Comparison, Measurement, compare
from ksopt.search.metrics import ENERGY
from ksopt.search.report import phrases
from ksopt.search.results import ChainFacts, Finalist, LayerResult, TrialRecord

_FEWEST_CHAINS = 3


@dataclass(frozen=True)
class Drift:
    """The dense layer's time at the begin and the end of a run, which should not differ.

    Args:
        begin: In turns with the run's first chain on the device of the final.
        end: In the final.
    """

    begin: Measurement
    end: Measurement

    @property
    def change(self) -> float:
        """Relative change of the median; 0.1 is 10 % slower at the end."""
        return self.end.median_us / self.begin.median_us - 1

    @property
    def beyond_noise(self) -> bool:
        """Whether the difference is beyond noise."""
        return compare(self.begin, self.end) is not Comparison.WITHIN_NOISE

    @property
    def sentence(self) -> str:
        """The drift as a sentence."""
        begin, end = phrases.timed(self.begin), phrases.timed(self.end)
        both = f"The dense layer took {begin} at first. In the final it took {end}"
        if not self.beyond_noise:
            return f"{both}: {100 * self.change:+.1f}%, which their own spread explains."
        return (
            f"{both}: it drifted by {100 * self.change:+.1f}%, beyond its noise. Clocks, "
            "throttling or another process changed the machine meanwhile. Ratios to dense, "
            "measured in turns, allow for that; absolute times do not."
        )


def drift(result: LayerResult) -> Drift | None:
    """The drift in a result's run; None if it measured no chain, or had no final."""
    first = next(
        (
            trial.dense
            for trial in result.trials
            if trial.state == "complete"
            and trial.run == result.run
            and trial.device == result.request.device
        ),
        None,
    )
    last = next((f.dense for f in result.finalists if f.retimed), None)
    return None if first is None or last is None else Drift(first, last)


def failures(result: LayerResult) -> str:
    """Number of failed trials, and the reason of the first, as a sentence; empty if none failed."""
    failed = [trial for trial in result.trials if trial.state == "failed"]
    if not failed:
        return ""
    count = f"{len(failed)} of {len(result.trials)} trials"
    if len(failed) == len(result.trials):
        count = "The only trial" if len(failed) == 1 else f"All {len(failed)} trials"
    first = "" if len(failed) == 1 else ", the first"
    return f"{count} failed{first} because of {failed[0].reason}"


@dataclass(frozen=True)
class Predictor:
    """A property of a chain that is known before it is measured."""

    key: str
    name: str
    value: Callable[[ChainFacts], float | None]


PREDICTORS = (
    Predictor("rho", "rho", lambda facts: facts.rho),
    Predictor("d_rho", "d rho", lambda facts: facts.d_rho),
    Predictor("floor_us", "roofline floor, us", lambda facts: facts.floor_us),
    Predictor("predicted_us", "cost model, us", lambda facts: facts.predicted_us),
)


@dataclass(frozen=True)
class Correlation:
    """Rank correlation of a predictor with measurements.

    Args:
        predictor: The predictor.
        spearman: Spearman's coefficient, -1 to 1, with latency over the dense layer's.
        chains: Number of chains that were measured and have a prediction.
        energy_spearman: The same with the energy of a call; None unless three chains have one.
    """

    predictor: Predictor
    spearman: float
    chains: int
    energy_spearman: float | None = None


def correlations(trials: Sequence[TrialRecord]) -> tuple[Correlation, ...]:
    """Correlations of all predictors that have values for at least three chains, not all equal.

    Pruned chains count with their provisional time: without them, only the fast half of the space
    would be ranked.
    """
    ranked = []
    for predictor in PREDICTORS:
        pairs = points(trials, predictor)
        spearman = _spearman(pairs)
        if spearman is not None:
            used = [
                (value, used_mj)
                for trial in trials
                if (used_mj := ENERGY.of(trial)) is not None
                and (value := predictor.value(trial.facts)) is not None
            ]
            ranked.append(Correlation(predictor, spearman, len(pairs), _spearman(used)))
    return tuple(ranked)


def _spearman(pairs: Sequence[tuple[float, float]]) -> float | None:
    """The coefficient of (predicted, measured); None if there are too few, or one is constant."""
    if len(pairs) < _FEWEST_CHAINS:
        return None
    import pandas as pd  # half a second, which processes that measure do not need

    frame = pd.DataFrame(pairs, columns=["predicted", "measured"]).rank()
    coefficient = float(frame["predicted"].corr(frame["measured"]))
    return coefficient if coefficient == coefficient else None  # not a NaN


def points(trials: Sequence[TrialRecord], predictor: Predictor) -> list[tuple[float, float]]:
    """(predicted, latency over the dense layer's) of the chains that have both."""
    return [
        (value, trial.ratio_seen)
        for trial in trials
        if trial.ratio_seen is not None and (value := predictor.value(trial.facts)) is not None
    ]


def within_noise_of(finalist: Finalist, others: Sequence[Finalist]) -> list[int]:
    """Indices, from 0, of the others in the final that are within noise of a finalist."""
    if not finalist.retimed:
        return []
    return [
        place
        for place, other in enumerate(others)
        if other is not finalist
        and compare(other.latency, finalist.latency) is Comparison.WITHIN_NOISE
    ]
