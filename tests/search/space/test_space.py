"""The space against brute force over every valid chain of small dims."""

from itertools import product
from math import gcd

import pytest

from ksopt.errors import InvalidInputError
from ksopt.patterns.chain import Chain, Pattern
from ksopt.patterns.divisors import divisors
from ksopt.patterns.size import Dims
from ksopt.search import LayerRequest
from ksopt.search.space import space as spaces
from ksopt.search.space.enumerate import Walk
from ksopt.search.space.named_families import families
from ksopt.search.space.smallest import smallest
from ksopt.search.space.space import build


def every_pattern(rows: int, columns: int) -> list[Pattern]:
    return [
        Pattern(a, rows // ad, columns // ad, ad // a)
        for ad in divisors(gcd(rows, columns))
        for a in divisors(ad)
    ]


def reducible(chain: Chain) -> bool:
    """By the definition: a pair's exact product has no more weights than the pair."""
    pairs = [chain[i : i + 2] for i in range(len(chain) - 1)]
    products = [(pair, pair.product_support) for pair in pairs]
    return any(actual is not None and actual.nnz <= pair.nnz for pair, actual in products)


def refines_two_factors(chain: Chain) -> bool:
    return len(chain) < 3 or any(
        pair.product_support is not None for pair in (chain[:2], chain[1:])
    )


def brute_force(dims: Dims, most: int, least_inner: int, factors: int) -> list[Chain]:
    rows, columns = dims.out_features, dims.in_features
    collected = []
    for inner in product(range(least_inner, max(rows, columns) + 1), repeat=factors - 1):
        sizes = (rows, *inner, columns)
        options = [every_pattern(sizes[i], sizes[i + 1]) for i in range(factors)]
        for patterns in product(*options):
            if sum(pattern.nnz for pattern in patterns) <= most:
                chain = Chain(patterns)
                if chain.is_dense_support and not reducible(chain):
                    collected.append(chain)
    return collected


CASES = [
    (Dims(8, 12), 60, 8),
    (Dims(12, 8), 60, 8),
    (Dims(12, 8), 96, 4),
    (Dims(6, 4), 24, 2),
    (Dims(16, 24), 200, 16),
    (Dims(16, 16), 140, 12),
    (Dims(7, 5), 35, 1),
]


@pytest.mark.parametrize("factors", [1, 2, 3])
@pytest.mark.parametrize(("dims", "most", "least_inner"), CASES)
def test_each_chain_once(dims: Dims, most: int, least_inner: int, factors: int) -> None:
    expected = {c for c in brute_force(dims, most, least_inner, factors) if refines_two_factors(c)}
    actual = [Chain(f) for f in Walk(dims, most, least_inner).factors(factors)]
    assert len(actual) == len(set(actual))
    assert set(actual) == expected


def test_the_cases_are_not_empty() -> None:
    counts = [len(list(Walk(*case).factors(factors))) for case in CASES for factors in (2, 3)]
    assert sum(count > 0 for count in counts) >= 8
    # What enumerate.py says of the chains that are left out.
    case = (Dims(12, 8), 96, 4)
    every = brute_force(*case, factors=3)
    assert (sum(map(refines_two_factors, every)), len(every)) == (291, 336)


def test_the_smallest_is_the_smallest() -> None:
    for dims in (Dims(8, 12), Dims(6, 4), Dims(12, 16)):
        rank = min(dims.in_features, dims.out_features)
        chains = [
            chain
            for factors in (1, 2, 3)
            for chain in Walk(dims, dims.dense_parameters, rank).factors(factors)
        ]
        best, certain = smallest(dims, rank, max_factors=3)
        assert certain
        assert best is not None
        assert best.nnz == min(sum(pattern.nnz for pattern in chain) for chain in chains)


def test_an_impossible_budget_names_the_smallest_that_works() -> None:
    with pytest.raises(InvalidInputError, match=r"smallest budget that works is 56 weights"):
        build(LayerRequest("12x8", budgets=("50%",)))
    assert build(LayerRequest("12x8", budgets=("56",))).candidates


def test_the_share_named_works() -> None:
    with pytest.raises(InvalidInputError, match=r"\(58.34% of the dense layer\)"):
        build(LayerRequest("12x8", budgets=("50%",)))
    assert build(LayerRequest("12x8", budgets=("58.34%",))).candidates


def test_primes_leave_the_dense_layer_only() -> None:
    space = build(LayerRequest("7x13", budgets=("100%",)))
    assert [str(chain) for chain in space.candidates] == ["(1,13,7,1)"]


def test_a_step_that_nothing_meets_does_not_stop_the_others() -> None:
    space = build(LayerRequest("12x8", budgets=("10%", "100%")))
    assert [budget.text for budget in space.unmet] == ["10%"]
    assert [step.budget.text for step in space.steps] == ["100%"]


def test_candidates_use_their_budget() -> None:
    request = LayerRequest("64x64", budgets=("50%",), min_use=0.9)
    space = build(request)
    assert space.exact
    assert space.complete
    assert all(0.9 * 2048 <= chain.nnz <= 2048 for chain in space.candidates)
    everything = build(LayerRequest("64x64", budgets=("50%",), min_use=0.0))
    assert everything.count == space.count == len(everything.candidates)


def test_where_nothing_uses_the_budget_the_largest_below_stands_in() -> None:
    space = build(LayerRequest("64x64", budgets=("50%",), max_factors=2, min_use=1.0))
    assert space.steps[0].least == space.steps[0].requested == 2048
    space = build(LayerRequest("64x64", budgets=("2040",), max_factors=2, min_use=1.0))
    step = space.steps[0]
    assert step.least < step.requested == 2040
    assert {chain.nnz for chain in space.candidates} == {step.least}


def test_a_space_too_large_is_sampled_by_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spaces, "_MOST_VISITS", 2000)
    monkeypatch.setattr(spaces, "_most", lambda factors: 50)
    monkeypatch.setattr(spaces, "_MOST_PER_STRATUM", 50)
    request = LayerRequest("96x192", budgets=("25%",), seed=1)
    space = build(request)
    assert not space.exact
    assert not space.complete
    named = sum(1 for _ in families(request))
    assert 50 <= len(space.candidates) <= 3 * 50 + named
    assert {len(chain) for chain in space.candidates} == {2, 3}
    for chain in space.candidates:
        assert chain.shape == (192, 96)
        assert chain.is_dense_support
        assert chain.rank_bound == 96
        assert space.steps[0].holds(chain.nnz)
        assert not reducible(chain)
    assert build(request) == space
    assert build(LayerRequest("96x192", budgets=("25%",), seed=2)) != space


def test_families_are_candidates_even_of_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spaces, "_most", lambda factors: 1)
    monkeypatch.setattr(spaces, "_MOST_PER_STRATUM", 1)
    request = LayerRequest("96x192", budgets=("50%",))
    candidates = build(request).candidates
    inside = [chain for _, chain in families(request) if 2 * chain.nnz >= 96 * 192 // 2]
    assert inside
    assert set(inside) <= set(candidates)


def test_a_reservoir_is_fair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the chains has the same chance of being selected."""
    monkeypatch.setattr(spaces, "_most", lambda factors: 3)
    monkeypatch.setattr(spaces, "_MOST_PER_STRATUM", 3)
    dims = {"dims": "12x8", "budgets": ("100%",), "min_rank": 4, "max_factors": 2, "min_use": 0.0}
    drawn = [build(LayerRequest(**dims, seed=seed)).candidates for seed in range(400)]
    everything = list(Walk(Dims(12, 8), 96, 4).factors(2))
    named = {chain for _, chain in families(LayerRequest(**dims))}
    free = [Chain(f) for f in everything if Chain(f) not in named]
    counts = [sum(chain in candidates for candidates in drawn) for chain in free]
    expected = 400 * 3 / len(everything)  # about 27 each, standard deviation about 5
    assert all(expected / 3 < count < expected * 2 for count in counts)
