"""Recommendations from invented times, which cover every case."""

from dataclasses import replace
from typing import Any

import pytest

from ksopt.measure.timing import Measurement
from ksopt.patterns.chain import Chain
from ksopt.patterns.size import Budget, Dims
from ksopt.search.layer_request import LayerRequest
from ksopt.search.metrics import ENERGY, LATENCY, PARAMETERS
from ksopt.search.pareto import pareto_front
from ksopt.search.recommend import admitted, elect, finalists, front_of, recommend
from ksopt.search.results import ChainFacts, TrialRecord, Verdict
from ksopt.search.space.space import Space, Step

SMALL = Chain.parse("(1,8,8,8)*(8,8,8,1)")
MIDDLE = Chain.parse("(1,16,16,4)*(4,16,16,1)")
MIRROR = Chain.parse("(4,16,16,1)*(1,16,16,4)")
ODD = Chain.parse("(1,8,8,8)*(8,8,16,1)*(1,128,64,1)")


def time_of(us: float) -> Measurement:
    return Measurement(us, 0.95 * us, 1.05 * us, 50)


def trial(
    number: int, chain: Chain, us: float, dense_us: float = 100.0, nnz: int | None = None
) -> TrialRecord:
    facts = ChainFacts(chain, nnz or chain.nnz, 0.25, rho=1 / us, d_rho=1.0, floor_us=us / 2)
    return TrialRecord(
        number, "complete", facts, "TPE", time_of(us), time_of(dense_us), 1e-7, None, 1
    )


def failed(number: int, chain: Chain) -> TrialRecord:
    facts = ChainFacts(chain, chain.nnz, 0.25, rho=9.0, d_rho=1.0, floor_us=1.0)
    return TrialRecord(number, "failed", facts, "TPE", None, None, None, "wrong", 1)


def space(*steps: Step, unmet: tuple[Budget, ...] = ()) -> Space:
    return Space(Dims(64, 64), steps, unmet, (SMALL, MIDDLE, MIRROR), 3, True, True)


def step(parameters: int, least: int, requested: int | None = None) -> Step:
    return Step(Budget(f"{parameters}", parameters), least, requested or least)


LADDER = (step(1024, 512), step(2048, 1100))


def test_the_fastest_of_each_step_is_used() -> None:
    trials = [trial(0, SMALL, 20), trial(1, MIDDLE, 50), trial(2, MIRROR, 40)]
    elected = elect(trials, LADDER)
    final = {"dense": time_of(100), str(SMALL): time_of(25), str(MIDDLE): time_of(40)}
    final[str(MIRROR)] = time_of(60)  # the final turns the trials' order around, and counts
    answers = recommend(space(*LADDER), finalists(elected, final))
    assert [str(a.chosen.facts.chain) for a in answers if a.chosen] == [str(SMALL), str(MIDDLE)]
    assert [a.verdict for a in answers] == [Verdict.USE, Verdict.USE]
    assert "4.00 times as fast as the dense layer" in answers[0].sentence
    assert "25.0 us" in answers[0].sentence
    assert "100 us" in answers[0].sentence


def test_dense_wins() -> None:
    standing = finalists(elect([trial(0, SMALL, 150)], LADDER[:1]), None)
    answer = recommend(space(*LADDER[:1]), standing)[0]
    assert answer.verdict is Verdict.KEEP_DENSE
    assert "keep the dense layer" in answer.sentence
    assert "0.67 times as fast as" in answer.sentence
    assert str(SMALL) in answer.sentence


def test_within_noise_is_reported() -> None:
    standing = finalists(elect([trial(0, SMALL, 98)], LADDER[:1]), None)
    answer = recommend(space(*LADDER[:1]), standing)[0]
    assert answer.verdict is Verdict.NO_DIFFERENCE
    assert "within noise" in answer.sentence
    assert "use " not in answer.sentence


def test_a_busy_machine_is_reported() -> None:
    final = {"dense": Measurement(100, 90, 180, 50), str(SMALL): time_of(25)}
    standing = finalists([trial(0, SMALL, 20)], final)
    answer = recommend(space(*LADDER[:1]), standing)[0]
    assert "spread over 90% of their median" in answer.sentence
    assert "idle" in answer.sentence
    final = {"dense": Measurement(100, 20, 180, 50), str(SMALL): time_of(25)}
    answer = recommend(space(*LADDER[:1]), finalists([trial(0, SMALL, 20)], final))[0]
    assert answer.verdict is Verdict.NO_DIFFERENCE
    assert "too noisy to tell" in answer.sentence
    assert "eep the dense layer" not in answer.sentence
    calm = finalists([trial(0, SMALL, 20)], {"dense": time_of(100), str(SMALL): time_of(25)})
    assert "idle" not in recommend(space(*LADDER[:1]), calm)[0].sentence


def test_a_chain_that_was_held_back_in_the_final_alone_is_reported() -> None:
    final = {"dense": time_of(16_355), str(SMALL): time_of(40_015)}
    standing = finalists([trial(0, SMALL, 7_938, dense_us=14_560)], final)
    (answer,) = recommend(space(*LADDER[:1]), standing)
    assert answer.verdict is Verdict.KEEP_DENSE
    assert "In its trial the chain took 7,938 us." in answer.sentence
    assert "idle" in answer.sentence


def test_a_final_whose_dense_layer_is_strangely_slow_does_not_recommend() -> None:
    final = {"dense": time_of(13_800), str(SMALL): time_of(370)}
    standing = finalists([trial(0, SMALL, 160, dense_us=147)], final)
    (answer,) = recommend(space(*LADDER[:1]), standing, dense_in_trials_us=147)
    assert (answer.verdict, answer.chosen) == (Verdict.UNJUDGED, None)
    assert "147 us in the trials" in answer.sentence
    assert "times as fast" not in answer.sentence
    # Faster than the dense layer at its best, or a dense layer as in the trials: it is used.
    for dense_us, us in ((13_800, 100), (150, 60)):
        final = {"dense": time_of(dense_us), str(SMALL): time_of(us)}
        standing = finalists([trial(0, SMALL, 160, dense_us=147)], final)
        (answer,) = recommend(space(*LADDER[:1]), standing, dense_in_trials_us=147)
        assert answer.verdict is Verdict.USE


def test_without_a_final_the_dense_layer_is_not_reported_as_held_back_there() -> None:
    standing = finalists([trial(0, SMALL, 160, dense_us=700)], None)
    (answer,) = recommend(space(*LADDER[:1]), standing, dense_in_trials_us=147)
    assert answer.verdict is Verdict.USE
    assert "stopped before the final" in answer.sentence


@pytest.mark.parametrize(
    ("us", "min_speedup", "verdict"),
    [
        (92.0, None, Verdict.NOT_ENOUGH),  # 1.09 times as fast
        (89.0, None, Verdict.USE),
        (92.0, 1.0, Verdict.USE),
        (60.0, 2.0, Verdict.NOT_ENOUGH),
    ],
)
def test_a_chain_that_gains_little_is_not_used(
    us: float, min_speedup: float | None, verdict: Verdict
) -> None:
    def exact(median_us: float) -> Measurement:
        return Measurement(median_us, 0.99 * median_us, 1.01 * median_us, 50)

    final = {"dense": exact(100), str(SMALL): exact(us)}
    standing = finalists([trial(0, SMALL, us)], final)
    (answer,) = recommend(space(*LADDER[:1]), standing, min_speedup=min_speedup)
    assert answer.verdict is verdict


def test_ties_are_named() -> None:
    trials = [trial(0, MIDDLE, 40), trial(1, MIRROR, 41)]
    final = {"dense": time_of(100), str(MIDDLE): time_of(40), str(MIRROR): time_of(41)}
    answer = recommend(space(LADDER[1]), finalists(elect(trials, LADDER[1:]), final))[0]
    assert answer.chosen is not None
    assert answer.chosen.facts.chain == MIDDLE
    assert [tie.facts.chain for tie in answer.ties] == [MIRROR]


def test_trials_of_different_runs_are_ranked_by_their_ratio_to_dense() -> None:
    """60 us on a slow day (dense 300) beats 40 on a fast one (dense 100)."""
    trials = [trial(0, MIDDLE, 40), trial(1, MIRROR, 60, dense_us=300)]
    answer = recommend(space(LADDER[1]), finalists(elect(trials, LADDER[1:]), None))[0]
    assert answer.chosen is not None
    assert answer.chosen.facts.chain == MIRROR


def test_the_three_best_and_the_largest_rho_are_elected() -> None:
    trials = [trial(n, SMALL, us) for n, us in enumerate((50, 10, 30, 20, 40))]
    assert [t.number for t in elect(trials, LADDER[:1])] == [1, 2, 3]  # rho is 1/us here: 1 again
    slow = trial(5, SMALL, 60)
    large = TrialRecord(**{**vars(slow), "facts": ChainFacts(SMALL, 1024, 0.25, 7.0, 1.0, 1.0)})
    assert [t.number for t in elect([*trials, large], LADDER[:1])] == [1, 2, 3, 5]


def test_failures_are_never_elected() -> None:
    assert elect([failed(0, SMALL)], LADDER) == []
    answers = recommend(space(*LADDER), ())
    assert [a.verdict for a in answers] == [Verdict.UNKNOWN] * 2


def test_a_chain_outside_every_step_is_never_elected() -> None:
    assert elect([trial(0, ODD, 10, nnz=9999)], LADDER) == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0, 1, 2, 3]),  # what is left out of all: the low rank
        ({"min_rank": 8}, [0, 1, 2, 3, 4]),
        ({"max_factors": 2}, [0, 1, 2]),
        ({"block_sizes": "16-64"}, [1, 2]),
        ({"families": "monarch"}, [0, 1]),
        ({"families": "monarch,low_rank", "min_rank": 8}, [0, 1, 4]),
        ({"chainable": True}, [0, 1]),
        ({"aligned": True, "dtype": "float16", "block_sizes": "multiple:16"}, [1, 2]),
    ],
)
def test_chains_that_an_earlier_run_requested_are_not_elected(
    options: dict[str, Any], expected: list[int]
) -> None:
    low_rank = Chain.low_rank(64, 64, 8)
    trials = [trial(n, c, 50 - n) for n, c in enumerate((SMALL, MIDDLE, MIRROR, ODD, low_rank))]
    request = LayerRequest("64x64", budgets=("50%",), **options)
    assert [one.number for one in admitted(trials, request)] == expected


def test_trials_of_chains_outside_the_request_are_reported_to_count() -> None:
    answer = recommend(space(LADDER[0]), (), not_admitted=7)[0]
    assert answer.verdict is Verdict.UNKNOWN
    assert "7 trials of earlier runs are of chains that are not asked for" in answer.sentence
    assert "earlier" not in recommend(space(LADDER[0]), ())[0].sentence


def test_nothing_measured_differs_from_nothing_near_enough() -> None:
    far = replace(trial(0, SMALL, 10), values={"weight_error": 0.5})
    assert elect([far], LADDER, max_error=0.1) == []
    answers = recommend(space(*LADDER), (), max_error=0.1, trials=[far, failed(1, MIDDLE)])
    assert [a.verdict for a in answers] == [Verdict.KEEP_DENSE, Verdict.UNKNOWN]
    assert "comes within a relative error of 0.1 of the given weights: keep" in answers[0].sentence
    assert answers[1].sentence == "No chain for the budget of 2048 was measured."


def test_an_unmet_step_says_what_would_work() -> None:
    answers = recommend(space(*LADDER, unmet=(Budget("1%", 40),)), ())
    assert [a.budget.text for a in answers] == ["1%", "1024", "2048"]
    assert answers[0].verdict is Verdict.UNMET
    assert "1,024" in answers[0].sentence


def test_a_step_that_nothing_uses_enough_says_so() -> None:
    standing = finalists([trial(0, SMALL, 10)], None)
    answer = recommend(space(step(2000, 1024, requested=1500)), standing)[0]
    assert "No chain uses 1,500 weights or more" in answer.sentence


def test_the_front_is_what_nothing_beats_in_both() -> None:
    trials = [
        trial(0, SMALL, 50, nnz=100),
        trial(1, SMALL, 60, nnz=200),
        trial(2, SMALL, 30, nnz=300),
        trial(3, SMALL, 40, nnz=100),
        failed(4, SMALL),
    ]
    assert [t.number for t in pareto_front(trials, (PARAMETERS, LATENCY))] == [3, 2]


def test_a_chain_of_little_energy_is_on_the_front_of_energy_alone() -> None:
    slow = trial(2, SMALL, 90, nnz=300)
    trials = [trial(0, SMALL, 50, nnz=100), trial(1, SMALL, 60, nnz=100), slow, slow]
    used = [
        replace(one, values={"energy_mj": mj}) for one, mj in zip(trials, (4, 5, 3, 3), strict=True)
    ]
    used.append(trial(4, SMALL, 1))  # of a run without energy
    assert [t.number for t in pareto_front(used, (LATENCY, ENERGY))] == [0, 2]
    assert [t.number for t in pareto_front(used[:4], (LATENCY, PARAMETERS))] == [0]


def test_the_front_keeps_to_the_limits() -> None:
    trials = [
        replace(trial(n, chain, us), values={"weight_error": error})
        for n, (chain, us, error) in enumerate(
            (
                (SMALL, 20, 0.9),
                (MIDDLE, 40, 0.5),
                (MIRROR, 60, 0.4),
                (Chain.low_rank(64, 64, 8), 9, 0.1),
            )
        )
    ]
    options = {"budgets": ("50%",), "weights": "w.safetensors", "objective": "pareto-error"}
    request = LayerRequest("64x64", max_error=0.6, min_speedup=2.0, **options)
    # The first errs too much, the third is too slow, the last has another rank than requested.
    assert [t.number for t in front_of(trials, request)] == [1]
    assert [t.number for t in front_of(trials, LayerRequest("64x64", **options))] == [0, 1, 2]
