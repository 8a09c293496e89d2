"""Estimates of chains that were never run, and the search that follows them."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import optuna
import pytest

from ksopt.kernels.problem import DeviceSpec, Epilogue
from ksopt.patterns.chain import Chain, Pattern
from ksopt.search.device_locks import Presence
from ksopt.search.layer_request import LayerRequest
from ksopt.search.options import STUDY
from ksopt.search.samplers.chain_sampler import ChainSampler
from ksopt.search.samplers.cost_model import CostModel
from ksopt.search.samplers.factor_times import ORIGIN, Estimator, estimates, factor_times, turns
from ksopt.search.space.space import build
from ksopt.search.storage import Storage
from ksopt.search.trial_claims import Claims

SPACE = build(LayerRequest("32x64", budgets=("30%", "60%"), max_factors=2))


class Apart(CostModel):
    """A cost model for which no kernel takes a whole chain."""

    def whole_us(self, chain: Chain) -> float | None:
        return None


def model(times: dict) -> CostModel:
    return Apart(DeviceSpec((9, 0), 132, 228 * 1024), "float16", 64, False, dict(times))


def test_a_chain_is_the_sum_of_its_factors() -> None:
    first, second = SPACE.candidates[:2]
    assert estimates([first, second], {}, {}) == {}
    times = {pattern: float(place + 1) for place, pattern in enumerate(first)}
    assert estimates([first], times, {}) == {first: 3.0}
    # A factor without a prediction, which the model gives None for, leaves the chain out.
    assert estimates([first], {first[0]: 1.0}, {first[1]: None}) == {}


def test_factors_take_what_they_took_in_most_chains() -> None:
    chain = SPACE.candidates[0]
    seen = [(chain, [1.0, None]), (chain, [9.0, 4.0]), (chain, [2.0, None]), (chain, [])]
    assert factor_times(seen) == {chain[0]: 2.0, chain[1]: 4.0}


@pytest.fixture
def claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Claims]:
    monkeypatch.setenv("KSOPT_CACHE_DIR", str(tmp_path / "cache"))
    storage = Storage(f"sqlite:///{tmp_path / 's.db'}")
    guess = {pattern: float(pattern.nnz) for chain in SPACE.candidates for pattern in chain}
    with Presence() as presence:
        yield Claims(
            storage,
            storage.create(STUDY, ("minimize", "minimize")),
            ChainSampler(SPACE.candidates, "TPE", seed=0),
            [("largest rho", SPACE.candidates[-1])],
            limit=12,
            run=1,
            presence=presence,
            estimator=Estimator(SPACE.candidates, SPACE.steps, model(guess), lambda _: 0.0),
        )


def test_estimates_and_the_sampler_take_turns_after_the_priors(claims: Claims) -> None:
    origins, chains = [], []
    for _ in range(12):
        claim = claims.next()
        assert claim is not None
        claim.trial.set_user_attr("facts", {"device": "cuda:0"})
        origins.append(claim.trial.user_attrs["origin"])
        chains.append(claim.chain)
        claims.study.tell(claim.trial, [1.0, float(claim.chain.nnz)])
    assert origins == ["largest rho", *[ORIGIN] * 8, "TPE", *[ORIGIN] * 2]
    assert len(set(chains)) == 12
    # What is estimated to be fastest of the step that was tried least.
    small, large = SPACE.steps
    fastest = min((c for c in SPACE.candidates if small.holds(c.nnz)), key=lambda c: c.nnz)
    assert large.holds(chains[0].nnz)
    assert chains[1].nnz == fastest.nnz


def test_the_sampler_has_every_second_turn_where_an_estimate_knows_too_little(
    claims: Claims,
) -> None:
    assert claims.estimator is not None
    claims.estimator = replace(claims.estimator, turns=turns(LayerRequest("8x8", energy=True)))
    origins = []
    for _ in range(7):
        claim = claims.next()
        assert claim is not None
        claim.trial.set_user_attr("facts", {"device": "cuda:0"})
        origins.append(claim.trial.user_attrs["origin"])
        claims.study.tell(claim.trial, [1.0, float(claim.chain.nnz)])
    assert origins == ["largest rho", *[ORIGIN, "TPE"] * 3]


def test_what_was_measured_of_factors_counts_more_than_predictions(claims: Claims) -> None:
    first = claims.next()
    assert first is not None
    # Ten times as slow as predicted: then so are all the others, and their order stays.
    first.trial.set_user_attr("outcome", {"factors_us": [10.0 * p.nnz for p in first.chain]})
    estimator = claims.estimator
    assert estimator is not None
    trials = claims.study.get_trials()
    best = estimator.next(trials, {first.chain})
    assert best is not None
    shared: dict[Chain, int] = {c: len(set(c) & set(best)) for c in SPACE.candidates}
    assert shared[best] == len(set(best))
    # A factor of it that is seen to be slow turns it down.
    second = claims.next()
    assert second is not None
    assert second.chain == best
    second.trial.set_user_attr("outcome", {"factors_us": [1e6] * len(best)})
    claims.study.tell(second.trial, [1.0, 1.0])
    trials = claims.study.get_trials()
    trials[1].user_attrs["origin"] = "TPE"  # so that it is the estimator's turn
    following = estimator.next(trials, {first.chain, best})
    assert following is not None
    assert not set(following) & set(best)


class Recording(Apart):
    """A cost model that knows some times, and records its predictions."""

    def __init__(self, times: dict, known: Iterable[Pattern] = ()) -> None:
        super().__init__(DeviceSpec((9, 0), 132, 228 * 1024), "float16", 64, False)
        self.times, self.predicted = times, []
        self._known.update({pattern: times[pattern] for pattern in known})

    def _factor(self, pattern: Pattern) -> float | None:
        if pattern not in self._known:
            self.predicted.append(pattern)
            self._known[pattern] = self.times[pattern]
        return self._known[pattern]


CHAINS = SPACE.candidates
PATTERNS = sorted({pattern for chain in CHAINS for pattern in chain})
STEP = SPACE.steps[-1:]
IN_STEP = [chain for chain in CHAINS if STEP[0].holds(chain.nnz)]


def test_a_factor_that_could_belong_to_the_fastest_chain_is_predicted_first() -> None:
    fast, *_, last = IN_STEP
    floors = dict.fromkeys(PATTERNS, 20.0) | dict.fromkeys(fast, 5.0)
    times = {pattern: floors[pattern] + 8 for pattern in PATTERNS}
    played = Recording(times, known=last)
    estimator = Estimator(CHAINS, STEP, played, floors.__getitem__, seconds=60)
    assert estimator.next([], set()) == fast
    assert set(fast) <= set(played.predicted)
    hopeless = [p for p in PATTERNS if all(p not in c for c in IN_STEP if set(c) & set(fast))]
    assert hopeless
    assert not set(hopeless) & set(played.predicted)


def test_without_time_what_is_known_has_to_do() -> None:
    last = IN_STEP[-1]
    played = Recording(dict.fromkeys(PATTERNS, 9.0), known=last)
    estimator = Estimator(CHAINS, STEP, played, lambda _: 1.0, seconds=0)
    assert estimator.next([], set()) == last
    assert played.predicted == []
    assert estimator.next([], {last}) is None


def test_a_factor_that_cannot_be_predicted_is_in_no_proposal() -> None:
    never = IN_STEP[0][0]
    played = Recording(dict.fromkeys(PATTERNS, 9.0) | {never: None})
    estimator = Estimator(CHAINS, STEP, played, lambda _: 1.0, seconds=60)
    actual, tried = [], set()
    while (chain := estimator.next([], tried)) is not None:
        actual.append(chain)
        tried.add(chain)
    assert set(actual) == {chain for chain in IN_STEP if never not in chain}


def test_factors_overlap() -> None:
    """A chain of three is slower by its sum, and faster as measured chains tell."""
    two, three = Chain.parse("(1,8,4,8)*(4,8,8,1)"), Chain.parse("(1,4,2,16)*(2,4,8,4)*(16,4,2,1)")
    known = dict.fromkeys(two, 15.0) | dict.fromkeys(three, 11.0)
    estimator = Estimator([two, three], [replace(STEP[0], least=1)], model(known), lambda _: 0.0)
    assert estimator.next([], set()) == two
    seen = optuna.trial.create_trial(
        value=1.0,
        user_attrs={
            "chain": "(1,16,8,4)*(4,8,8,1)",
            "outcome": {"factors_us": [10.0, 10.0], "latency": {"median_us": 16.0}},
        },
    )
    assert estimator.next([seen], set()) == three


class Whole(Recording):
    """A cost model with times of some chains in one launch, and 9 for every factor."""

    def __init__(self, wholes: dict[Chain, float]) -> None:
        super().__init__(dict.fromkeys(PATTERNS, 9.0))
        self.wholes = wholes

    def whole_us(self, chain: Chain) -> float | None:
        return self.wholes.get(chain)


def test_a_chain_that_is_faster_in_one_launch_comes_first() -> None:
    first, second, *_ = IN_STEP
    estimator = Estimator(CHAINS, STEP, Whole({second: 7.0, first: 8.0}), lambda _: 1.0, seconds=60)
    assert estimator.next([], set()) == second
    assert estimator.next([], {second}) == first
    # By launches a factor it takes 18, as all others do.
    assert estimator.next([], {first, second}) not in {None, first, second}


def test_predictions_of_one_launch_are_corrected_by_what_was_measured() -> None:
    first, second, *_ = IN_STEP
    played = Whole({second: 7.0, first: 8.0})
    played.times = played.times | dict.fromkeys(first, 90.0)
    estimator = Estimator(CHAINS, STEP, played, lambda _: 1.0, seconds=60)
    outcome = {"factors_us": [], "latency": {"median_us": 70.0}}
    attrs = {"chain": str(second), "outcome": outcome}
    seen = optuna.trial.create_trial(value=1.0, user_attrs=attrs)
    assert estimator.next([], {second}) == first
    assert estimator.next([seen], {second}) not in {None, first}


def test_what_follows_separate_launches_counts() -> None:
    alone = Whole({IN_STEP[1]: 20.0})
    assert Estimator(CHAINS, STEP, alone, lambda _: 1.0, seconds=60).next([], set()) != IN_STEP[1]
    surrounded = Whole({IN_STEP[1]: 20.0})
    surrounded.after, surrounded.siblings = Epilogue(bias=True, activation="gelu"), 3
    estimator = Estimator(CHAINS, STEP, surrounded, lambda _: 1.0, seconds=60)
    assert estimator.next([], set()) == IN_STEP[1]
