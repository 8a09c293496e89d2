"""Projection: optimal where that is known, within its guarantee elsewhere, exact on products."""

import json
import math
import subprocess
import sys
from importlib.util import find_spec
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import ksopt
from ksopt import Chain, InvalidInputError, Pattern
from ksopt.patterns.support import product_support
from ksopt.projection import least_squares, project
from ksopt.projection.alternating import alternate
from ksopt.projection.hierarchical import preserves_optimum, suffixes
from ksopt.projection.least_squares import Between, first_factor, solved
from ksopt.projection.products import product
from ksopt.projection.two_factors import blocks
from ksopt.reference import chain_to_dense, to_dense

SMALL = st.integers(1, 4)
SEEDS = st.integers(0, 2**16)


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


@st.composite
def chains(draw: st.DrawFn, factors: int, most: int = 64) -> Chain:
    """Any valid chain of so many factors."""
    patterns = [Pattern(draw(SMALL), draw(SMALL), draw(SMALL), draw(SMALL))]
    while len(patterns) < factors:
        inner = patterns[-1].in_features
        a = draw(st.sampled_from(divisors(inner)))
        d = draw(st.sampled_from(divisors(inner // a)))
        c = draw(st.integers(1, max(1, min(4, most // (a * d)))))
        patterns.append(Pattern(a, inner // (a * d), c, d))
    return Chain(tuple(patterns))


@st.composite
def chainable_chains(draw: st.DrawFn, factors: int) -> Chain:
    """Any chainable chain of so many factors, ranks of 1 and more, redundant pairs included."""
    patterns = [
        Pattern(draw(st.integers(1, 2)), draw(SMALL), draw(SMALL), draw(st.integers(1, 12)))
    ]
    while len(patterns) < factors:
        left = patterns[-1]
        p = draw(st.sampled_from(divisors(left.c)))
        d = draw(st.sampled_from(divisors(left.d)))
        patterns.append(Pattern(left.a * p, left.c // p * left.d // d, draw(SMALL), d))
    return Chain(tuple(patterns))


def random_weights(chain: Chain, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(pattern.weight_shape, generator=generator, dtype=torch.float64)
        for pattern in chain
    ]


def random_matrix(chain: Chain, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(chain.shape, generator=generator, dtype=torch.float64)


def best_of_two(matrix: torch.Tensor, chain: Chain) -> float:
    """The least relative error, from the supports alone: equal rank-one supports add to a rank."""
    left, right = (to_dense(torch.ones(p.weight_shape)).numpy() > 0 for p in chain)
    ranks: dict[tuple[bytes, bytes], int] = {}
    for n in range(left.shape[1]):
        key = (left[:, n].tobytes(), right[n].tobytes())
        ranks[key] = ranks.get(key, 0) + 1
    rest, entries = 0.0, matrix.numpy().copy()
    for (rows, columns), rank in ranks.items():
        place = np.ix_(np.frombuffer(rows, bool), np.frombuffer(columns, bool))
        rest += (np.linalg.svd(entries[place], compute_uv=False)[rank:] ** 2).sum()
        entries[place] = 0
    return math.sqrt(rest + (entries**2).sum()) / matrix.norm().item()


@given(chains(2), SEEDS)
@settings(max_examples=60)
def test_any_two_factors_get_the_least_error_there_is(chain: Chain, seed: int) -> None:
    matrix = random_matrix(chain, seed)
    projection = project(matrix, chain)
    assert projection.relative_error == pytest.approx(
        best_of_two(matrix, chain), rel=1e-9, abs=1e-12
    )
    assert (projection.method, projection.iterations, projection.guarantee) == (
        "hierarchical",
        0,
        1,
    )
    assert projection.lower_bound == pytest.approx(projection.relative_error, rel=1e-6, abs=1e-6)


@given(st.integers(1, 4).flatmap(chainable_chains), SEEDS)
@settings(max_examples=60)
def test_a_product_of_a_chainable_chain_is_recovered(chain: Chain, seed: int) -> None:
    assert chain.is_chainable
    matrix = chain_to_dense(random_weights(chain, seed))
    for way, goal in ((chain, matrix), (chain.T, matrix.T)):
        projection = project(goal, way)
        assert projection.relative_error < 1e-13
        assert projection.method == "hierarchical"
        assert projection.lower_bound <= projection.relative_error
        torch.testing.assert_close(
            projection.to_dense(), goal, rtol=1e-11, atol=1e-12 * goal.norm()
        )


@given(st.integers(3, 4).flatmap(chainable_chains), SEEDS)
@settings(max_examples=60)
def test_the_error_is_within_the_guarantee(chain: Chain, seed: int) -> None:
    exact = chain_to_dense(random_weights(chain, seed))
    matrix = exact + 0.1 * exact.norm() / math.sqrt(exact.numel()) * random_matrix(chain, seed + 1)
    projection = project(matrix, chain)
    assert projection.guarantee == math.sqrt(len(chain) - 1)
    # The product that the noise was added to is one candidate; the best may be nearer.
    noise = ((matrix - exact).norm() / matrix.norm()).item()
    assert projection.lower_bound <= noise + 1e-12
    assert projection.relative_error <= projection.guarantee * noise + 1e-12
    # Cutting the chain at any one place gives a floor of the error; all of them together bound it.
    floors = []
    for cut in range(1, len(chain)):
        sides = product_support(chain.patterns[:cut]), product_support(chain.patterns[cut:])
        assert sides[0] is not None
        assert sides[1] is not None
        floors.append(project(matrix, Chain(sides)).relative_error)
    assert projection.relative_error <= math.sqrt(sum(floor**2 for floor in floors)) + 1e-12
    assert projection.relative_error >= max(floors) - 1e-12


@given(st.integers(3, 4).flatmap(chains), SEEDS)
@settings(max_examples=80)
def test_whatever_is_guaranteed_holds_for_chains_that_are_not_chainable(
    chain: Chain, seed: int
) -> None:
    guaranteed = preserves_optimum(chain) or preserves_optimum(chain.T)
    assert guaranteed or not (chain.is_chainable or chain.T.is_chainable)
    exact = chain_to_dense(random_weights(chain, seed))
    projection = project(exact, chain, iterations=0)
    assert (projection.guarantee is not None) == guaranteed
    if not guaranteed:
        return
    assert projection.relative_error < 1e-13
    matrix = exact + 0.1 * exact.norm() / math.sqrt(exact.numel()) * random_matrix(chain, seed + 1)
    noise = ((matrix - exact).norm() / matrix.norm()).item()
    assert project(matrix, chain).relative_error <= math.sqrt(len(chain) - 1) * noise + 1e-12


def test_a_chain_that_is_not_chainable_may_have_the_guarantee() -> None:
    chain = Chain.parse("(1,2,3,2)*(2,3,2,1)*(4,1,3,1)")  # r = 3/2 between the first two
    assert not chain.is_chainable
    assert not chain.T.is_chainable
    assert preserves_optimum(chain)
    assert project(random_matrix(chain, 0), chain).guarantee == math.sqrt(2)
    assert not preserves_optimum(INTERLEAVED)


@given(chains(2))
@settings(max_examples=40)
def test_every_feature_is_in_one_block(chain: Chain) -> None:
    groups = blocks(*chain)
    features = torch.cat([group.features.flatten() for group in groups])
    assert torch.equal(features.sort().values, torch.arange(chain[0].in_features))
    pairs = [
        pair
        for group in groups
        for pair in zip(group.rows.tolist(), group.columns.tolist(), strict=True)
    ]
    assert len(pairs) == len(set(pairs))


@given(st.integers(3, 4).flatmap(chains), SEEDS)
@example(Chain.parse("(3,3,2,2)*(3,4,4,1)*(4,3,1,1)*(1,4,2,1)"), 324)  # the error is rounding's
@settings(max_examples=25)
def test_any_chain_gets_weights_and_an_honest_error(chain: Chain, seed: int) -> None:
    matrix = random_matrix(chain, seed)
    projection = project(matrix, chain, iterations=5)
    assert [tuple(w.shape) for w in projection.weights] == [p.weight_shape for p in chain]
    error = ((matrix - chain_to_dense(projection.weights)).norm() / matrix.norm()).item()
    assert projection.relative_error == pytest.approx(error, rel=1e-9, abs=1e-12)
    assert projection.lower_bound <= projection.relative_error <= 1 + 1e-12
    more = project(matrix, chain, iterations=5, refine=10)
    assert more.relative_error <= projection.relative_error * (1 + 1e-12) + 1e-12


KALEIDOSCOPE = Chain.kaleidoscope(8)
INTERLEAVED = Chain.parse("(8,4,4,1)*(1,4,4,8)*(8,4,4,1)")


@pytest.mark.parametrize("chain", [KALEIDOSCOPE, INTERLEAVED], ids=str)
def test_alternating_least_squares_never_rises_and_helps(chain: Chain) -> None:
    assert not chain.is_chainable
    assert not chain.T.is_chainable
    matrix = random_matrix(chain, 0)
    weights = random_weights(chain, 1)
    errors = []
    for _ in range(20):
        errors.append((matrix - product(weights)).norm().item())
        weights, sweeps = alternate(matrix, chain, weights, sweeps=1, tolerance=0.0)
        assert sweeps == 1
    assert all(after <= before * (1 + 1e-12) for before, after in pairwise(errors))
    assert errors[-1] < 0.8 * errors[0]
    projection = project(matrix, chain)
    assert projection.method == "alternating"
    assert projection.guarantee is None
    assert 0 < projection.iterations <= 10
    assert projection.relative_error < project(matrix, chain, iterations=0).relative_error


def best_factor(
    matrix: torch.Tensor,
    pattern: Pattern,
    left: torch.Tensor,
    right: torch.Tensor,
    weight: torch.Tensor,
) -> tuple[float, float]:
    """The least ||matrix - left K right||, by a general solver that knows no structure.

    And the most that a refit of ``weight`` may leave: it finds the least of
    ||matrix - left K right||^2 + ridge ||K - weight||^2, which is no more than the best K's.
    """
    support = to_dense(torch.ones(pattern.weight_shape, dtype=torch.float64)).bool()
    columns = [torch.outer(left[:, m], right[n]).flatten() for m, n in support.nonzero()]
    system = torch.stack(columns, dim=1)
    goal = matrix.flatten()
    fitted = torch.linalg.lstsq(system, goal.unsqueeze(1), driver="gelsd").solution[:, 0]
    best = float((goal - system @ fitted).norm())
    # Each equation has a share of its diagonal's mean: at most that of the largest column's square.
    ridge = least_squares._RIDGE * float(system.square().sum(0).max())
    change = float((fitted - to_dense(weight)[support]).norm())
    return best, math.sqrt(best**2 + ridge * change**2)


@given(st.integers(3, 4).flatmap(lambda factors: chains(factors, most=24)), SEEDS)
@settings(max_examples=60, deadline=None)
def test_every_factor_is_refitted_to_the_best_there_is(chain: Chain, seed: int) -> None:
    matrix, weights = random_matrix(chain, seed), random_weights(chain, seed + 1)
    rounding = 1e-8 * float(matrix.norm())
    after = suffixes(chain)
    before = [pattern.T for pattern in reversed(suffixes(chain.T))]
    for index, pattern in enumerate(chain):
        left = product(weights[:index]) if index else torch.eye(chain.out_features).double()
        last = index == len(chain) - 1
        right = torch.eye(chain.in_features).double() if last else product(weights[index + 1 :])
        best, most = best_factor(matrix, pattern, left, right, weights[index])
        if index == 0:
            fitted = first_factor(matrix, weights[0], right, after[1])
        elif last:
            own = weights[-1].transpose(1, 2)
            fitted = first_factor(matrix.mT, own, left.mT, before[-2].T).transpose(1, 2)
        else:
            solver = Between(before[index - 1], pattern, after[index + 1], matrix.device)
            solver._is_small = True  # in the place of the cached property
            fitted = solver.refitted(matrix, weights[index], left, right)
            # The other way, for equations that are too large, comes near to it in a few steps.
            solver._is_small = False
            nearer = weights[index]
            error = (matrix - left @ to_dense(nearer) @ right).norm()
            for _ in range(3):
                nearer = solver.refitted(matrix, nearer, left, right)
                previous, error = error, (matrix - left @ to_dense(nearer) @ right).norm()
                # Where nothing is left to gain, a step may lose what rounding is.
                assert best - rounding <= error <= previous + 1e-5 * float(matrix.norm())
        assert fitted.shape == weights[index].shape
        error = float((matrix - left @ to_dense(fitted) @ right).norm())
        assert best - rounding <= error <= most + rounding


def test_an_equation_that_is_indefinite_by_rounding_changes_nothing() -> None:
    gram = torch.stack([torch.eye(2), torch.tensor([[1.0, 2.0], [2.0, 1.0]])]).double()
    actual = solved(gram, torch.ones(2, 2, 1, dtype=torch.float64))
    torch.testing.assert_close(actual[:, :, 0], torch.tensor([[1.0, 1], [0, 0]]).double())


def test_a_factor_between_others_with_unused_features_stays_finite() -> None:
    weights = random_weights(INTERLEAVED, 0)
    weights[0][:, :, 0] = 0  # nothing of these features reaches the output
    weights[2][:, 1] = 0
    matrix = random_matrix(INTERLEAVED, 1)
    before = (matrix - product(weights)).norm()
    actual, _ = alternate(matrix, INTERLEAVED, weights, sweeps=3, tolerance=0.0)
    assert all(bool(weight.isfinite().all()) for weight in actual)
    assert (matrix - product(actual)).norm() < before


def test_alternating_stops_when_it_is_exact() -> None:
    weights = random_weights(INTERLEAVED, 0)
    matrix = product(weights)
    actual, sweeps = alternate(matrix, INTERLEAVED, weights, sweeps=9, tolerance=0.0)
    assert sweeps == 1
    assert (product(actual) - matrix).norm() < 1e-12 * matrix.norm()


def test_refinement_lowers_the_error_of_three_factors() -> None:
    chain = Chain.square_dyadic(16)
    matrix = random_matrix(chain, 3)
    plain, better = project(matrix, chain), project(matrix, chain, refine=50)
    assert plain.iterations == 0
    assert 0 < better.iterations <= 50
    assert better.relative_error < 0.99 * plain.relative_error
    assert better.relative_error >= better.lower_bound
    pair = Chain.monarch(16, 16, p=4)  # already the best
    assert project(matrix, pair, refine=50).iterations == 0


ORACLE = """
import json, sys
import numpy as np
from lazylinop.butterfly import Chain, ksd

cases = json.load(sys.stdin)
errors = []
for patterns, rows in cases:
    matrix = np.array(rows)
    approximation = ksd(matrix, Chain([tuple(p) for p in patterns])).toarray()
    errors.append(float(np.linalg.norm(matrix - approximation) / np.linalg.norm(matrix)))
print(json.dumps(errors))
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("lazylinop") is None, reason="lazylinop is not installed")
def test_the_error_is_never_above_lazylinops() -> None:
    named = [
        Chain.square_dyadic(16),
        Chain.monarch(12, 24, p=2),
        Chain.block_butterfly(24, block=3),
        Chain.parse("(1,6,2,6)*(2,3,4,2)*(4,4,3,1)"),
        Chain.parse("(1,8,4,6)*(2,6,6,2)*(6,4,5,1)"),
        Chain.parse("(1,2,4,6)*(2,12,3,1)"),  # more features than the blocks' ranks
    ]
    cases = [(chain, random_matrix(chain, seed)) for chain in named for seed in (0, 1)]
    done = subprocess.run(  # a process of its own: importing it changes torch's thread settings
        [sys.executable, "-c", ORACLE],
        input=json.dumps([[[p.weight_shape for p in c], m.tolist()] for c, m in cases]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for (chain, matrix), error in zip(cases, json.loads(done.stdout), strict=True):
        projection = project(matrix, chain)
        assert projection.relative_error <= error * (1 + 1e-9) + 1e-12, chain
        if len(chain) == 2:  # one least error, so both have it
            assert projection.relative_error == pytest.approx(error, rel=1e-9)


@pytest.mark.parametrize(
    ("dtype", "rounding"),
    [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)],
    ids=str,
)
def test_every_dtype(dtype: torch.dtype, rounding: float) -> None:
    chain = Chain.parse("(1,6,2,6)*(2,3,4,2)*(4,4,3,1)")
    matrix = chain_to_dense(random_weights(chain, 1)).to(dtype)
    projection = project(matrix, chain)
    assert {w.dtype for w in projection.weights} == {dtype}
    assert all(w.is_contiguous() for w in projection.weights)
    assert projection.relative_error < rounding
    assert project(matrix, chain, dtype=torch.float64).weights[0].dtype == torch.float64
    # For narrower dtypes the splits go through Gram matrices; they must agree with the others.
    noisy = random_matrix(chain, 2)
    exact = project(noisy, chain).relative_error
    wide = project(noisy.to(dtype), chain, dtype=torch.float64).relative_error
    assert wide == pytest.approx(exact, rel=max(rounding, 1e-12))


def test_scale_of_a_narrow_dtype() -> None:
    chain = Chain.square_dyadic(16)
    for scale in (1e-30, 1.0, 1e30):
        matrix = (scale * chain_to_dense(random_weights(chain, 0))).float()
        projection = project(matrix, chain)
        assert projection.relative_error < 1e-6
        sizes = torch.stack([w.square().mean() for w in projection.weights])
        assert sizes.max() < 1.01 * sizes.min()


def test_permutations_of_outputs_and_inputs() -> None:
    chain = Chain.monarch(12, 24, p=3)
    exact = chain_to_dense(random_weights(chain, 0))
    rows, columns = torch.randperm(24), torch.randperm(12)
    matrix = exact[torch.argsort(rows)][:, torch.argsort(columns)]
    assert project(matrix, chain).relative_error > 0.1
    projection = project(matrix, chain, rows=rows, columns=columns.tolist())
    assert projection.relative_error < 1e-13
    torch.testing.assert_close(projection.to_dense(), matrix)
    for wrong in (torch.zeros(24, dtype=torch.int64), torch.arange(23), [0.5] * 24):
        with pytest.raises(InvalidInputError, match=r"rows must be a permutation of 0 \.\.\. 23"):
            project(matrix, chain, rows=wrong)


def test_features_without_use_can_still_be_trained() -> None:
    chain = Chain.low_rank(6, 4, rank=3)
    matrix = torch.outer(torch.arange(1.0, 5.0), torch.ones(6))  # rank one
    weights = [w.requires_grad_() for w in project(matrix, chain).weights]
    (torch.randn(4, 6) * chain_to_dense(weights)).sum().backward()
    assert (weights[1].grad.reshape(3, 6).norm(dim=1) > 1e-3).all()


def test_a_matrix_outside_the_support_and_a_zero_one() -> None:
    projection = project(torch.ones(4, 4), "(2,2,2,1)")
    assert projection.relative_error == pytest.approx(math.sqrt(0.5))
    assert projection.lower_bound == pytest.approx(math.sqrt(0.5))
    zero = project(torch.zeros(8, 8), Chain.square_dyadic(8))
    assert zero.relative_error == zero.lower_bound == 0
    assert not zero.to_dense().any()


def test_suffixes() -> None:
    assert suffixes(INTERLEAVED) == [Pattern(1, 32, 32, 1), Pattern(1, 32, 32, 1), INTERLEAVED[2]]
    # K_2 K_3 is a diagonal, but must keep the 2 that both d share.
    assert suffixes(Chain.parse("(2,1,1,2)*(2,1,1,2)*(1,1,1,4)"))[1] == Pattern(2, 1, 1, 2)
    # K_2 K_3 has a support that is not Kronecker-sparse: all of 4 x 4 stands for it.
    assert suffixes(Chain.parse("(1,2,4,1)*(1,2,1,2)*(2,1,2,1)"))[1] == Pattern(1, 4, 4, 1)


@pytest.mark.parametrize(
    ("matrix", "chain", "options", "message"),
    [
        (torch.ones(4, 5), "(1,4,4,1)", {}, r"shape \[4, 5\], but the chain \(1,4,4,1\)"),
        (torch.ones(4, 4, dtype=torch.int32), "(1,4,4,1)", {}, "is int32, but must be"),
        (torch.ones(4, 4, device="meta"), "(1,4,4,1)", {}, "meta device"),
        (torch.full((4, 4), torch.nan), "(1,4,4,1)", {}, "NaN or infinity"),
        (torch.ones(4, 4), "(1,4", {}, "is not a pattern"),
        (torch.ones(4, 4), 3, {}, "chain is 3"),
        ([[1.0]], "(1,1,1,1)", {}, "the matrix is a list"),
        (torch.ones(4, 4), "(1,4,4,1)", {"refine": -1}, "refine must be at least 0"),
        (torch.ones(4, 4), "(1,4,4,1)", {"iterations": 0.5}, "iterations must be an integer"),
    ],
)
def test_wrong_arguments(matrix, chain, options, message) -> None:
    with pytest.raises(InvalidInputError, match=message):
        project(matrix, chain, **options)


def test_it_is_a_public_name_that_keeps_gradients_out() -> None:
    assert ksopt.project is project
    matrix = torch.randn(4, 4, requires_grad=True)
    with torch.enable_grad():
        projection = ksopt.project(matrix, "(1,2,2,2)*(2,2,2,1)*(1,4,4,1)", refine=3)
    assert not any(weight.requires_grad for weight in projection.weights)
    assert matrix.grad is None
    before = projection.weights[0].clone()
    with torch.inference_mode():
        again = ksopt.project(matrix, projection.chain, refine=3)
    assert torch.equal(again.weights[0], before)
