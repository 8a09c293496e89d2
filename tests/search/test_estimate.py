"""Estimates of chains that were never run, and the search that follows them."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ksopt.kernels.families import Machine
from ksopt.pattern import Chain
from ksopt.search.claims import Claims
from ksopt.search.cost import CostModel
from ksopt.search.estimate import ORIGIN, Estimator, estimates, factor_times, turns
from ksopt.search.locks import Presence
from ksopt.search.request import STUDY, SearchRequest
from ksopt.search.sampler import ChainSampler
from ksopt.search.space import build
from ksopt.search.storage import Storage

SPACE = build(SearchRequest("32x64", budgets=("30%", "60%"), max_factors=2))


def model(times: dict) -> CostModel:
    return CostModel(Machine((9, 0), 132, 228 * 1024), "float16", 64, False, dict(times))


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
            storage.create(STUDY),
            ChainSampler(SPACE.candidates, "TPE", seed=0),
            [("largest rho", SPACE.candidates[-1])],
            limit=9,
            run=1,
            presence=presence,
            estimator=Estimator(SPACE.candidates, SPACE.steps, model(guess)),
        )


def test_estimates_and_the_sampler_take_turns_after_the_priors(claims: Claims) -> None:
    origins, chains = [], []
    for _ in range(9):
        claim = claims.next()
        assert claim is not None
        claim.trial.set_user_attr("device", "cuda:0")
        origins.append(claim.trial.user_attrs["origin"])
        chains.append(claim.chain)
        claims.study.tell(claim.trial, [1.0, float(claim.chain.nnz)])
    assert origins == ["largest rho", *[ORIGIN] * 5, "TPE", *[ORIGIN] * 2]
    assert len(set(chains)) == 9
    # What is estimated to be fastest of the step that was tried least.
    small, large = SPACE.steps
    fastest = min((c for c in SPACE.candidates if small.holds(c.nnz)), key=lambda c: c.nnz)
    assert large.holds(chains[0].nnz)
    assert chains[1].nnz == fastest.nnz


def test_the_sampler_has_every_second_turn_where_an_estimate_knows_too_little(
    claims: Claims,
) -> None:
    assert claims.estimator is not None
    claims.estimator = replace(claims.estimator, turns=turns(("latency_us", "energy_mj")))
    origins = []
    for _ in range(7):
        claim = claims.next()
        assert claim is not None
        claim.trial.set_user_attr("device", "cuda:0")
        origins.append(claim.trial.user_attrs["origin"])
        claims.study.tell(claim.trial, [1.0, float(claim.chain.nnz)])
    assert origins == ["largest rho", *[ORIGIN, "TPE"] * 3]


def test_what_was_measured_of_factors_counts_more_than_predictions(claims: Claims) -> None:
    first = claims.next()
    assert first is not None
    # Ten times as slow as predicted: then so are all the others, and their order stays.
    first.trial.set_user_attr("factors_us", [10.0 * p.nnz for p in first.chain])
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
    second.trial.set_user_attr("factors_us", [1e6] * len(best))
    claims.study.tell(second.trial, [1.0, 1.0])
    trials = claims.study.get_trials()
    trials[1].user_attrs["origin"] = "TPE"  # so that it is the estimator's turn
    following = estimator.next(trials, {first.chain, best})
    assert following is not None
    assert not set(following) & set(best)
