"""Pattern and Chain against the definition, written out with Kronecker products."""

import doctest
import importlib
import random
from itertools import pairwise
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksopt.errors import InvalidInputError, KsoptError
from ksopt.patterns import support
from ksopt.patterns.chain import Chain, Pattern


def support_matrix(pattern: Pattern) -> np.ndarray:
    """I_a (x) 1_{b x c} (x) I_d, as in the paper's Definition 2.1."""
    block = np.kron(np.ones((pattern.b, pattern.c), dtype=np.int64), np.eye(pattern.d, dtype=int))
    return np.kron(np.eye(pattern.a, dtype=int), block)


def product_matrix(chain: Chain) -> np.ndarray:
    """Number of paths from each output to each input."""
    product = support_matrix(chain[0])
    for pattern in chain.patterns[1:]:
        product = product @ support_matrix(pattern)
    return product


def patterns_with(rows: int, columns: int) -> list[Pattern]:
    """Every pattern of that shape."""
    return [
        Pattern(a, rows // (a * d), columns // (a * d), d)
        for a in range(1, columns + 1)
        for d in range(1, columns + 1)
        if rows % (a * d) == 0 and columns % (a * d) == 0
    ]


def rank_mod_prime(matrix: list[list[int]], prime: int = 2**61 - 1) -> int:
    """Exact rank over the integers modulo a prime, by elimination."""
    rows, rank = [row[:] for row in matrix], 0
    for column in range(len(rows[0])):
        pivot = next((r for r in range(rank, len(rows)) if rows[r][column] % prime), None)
        if pivot is None:
            continue
        rows[rank], rows[pivot] = rows[pivot], rows[rank]
        inverse = pow(rows[rank][column], -1, prime)
        for r in range(rank + 1, len(rows)):
            factor = rows[r][column] * inverse % prime
            if factor:
                rows[r] = [
                    (x - factor * y) % prime for x, y in zip(rows[r], rows[rank], strict=True)
                ]
        rank += 1
    return rank


def rank_of_random_product(chain: Chain, seed: int) -> int:
    """Rank of a product of factors with random weights, in exact arithmetic modulo a prime."""
    generator, prime = random.Random(seed), 2**61 - 1
    product: np.ndarray | None = None
    for pattern in chain:
        mask = support_matrix(pattern).astype(object)
        weights = [generator.randrange(1, prime) for _ in range(mask.size)]
        factor = mask * np.array(weights, dtype=object).reshape(mask.shape)
        product = factor if product is None else product @ factor % prime
    assert product is not None
    return rank_mod_prime(product.tolist(), prime)


sizes = st.integers(1, 4)
patterns = st.builds(Pattern, sizes, sizes, sizes, sizes)


@st.composite
def chains(draw: st.DrawFn, most: int = 3, up_to: int = 24) -> Chain:
    """Valid chains, chainable and not: dims first, then any pattern of each shape."""
    number = draw(st.integers(1, most))
    # Dims with common divisors, or most factors would be dense.
    dims = st.sampled_from([n for n in (1, 2, 3, 4, 6, 8, 9, 12, 16, 18, 24) if n <= up_to])
    boundary = [draw(dims) for _ in range(number + 1)]
    return Chain(
        tuple(
            draw(st.sampled_from(patterns_with(rows, columns)))
            for rows, columns in pairwise(boundary)
        )
    )


# --- one pattern ---------------------------------------------------------------------------------


@given(patterns)
def test_counts_are_those_of_the_support_matrix(pattern: Pattern) -> None:
    matrix = support_matrix(pattern)
    assert pattern.shape == (pattern.out_features, pattern.in_features) == matrix.shape
    assert pattern.nnz == np.prod(pattern.weight_shape) == matrix.sum()
    assert pattern.sparsity == pytest.approx((matrix == 0).mean(), abs=1e-12)
    assert pattern.flops(7) == 2 * 7 * matrix.sum()
    assert pattern.bytes(7, "fp32") == 4 * (7 * sum(matrix.shape) + matrix.sum())


@given(patterns)
def test_support_is_that_of_the_canonical_weight(pattern: Pattern) -> None:
    a, b, c, d = pattern.weight_shape
    matrix = np.zeros(pattern.shape, dtype=int)
    for i, k, c_index, j in np.ndindex(a, b, c, d):
        matrix[i * b * d + k * d + j, i * c * d + c_index * d + j] += 1
    np.testing.assert_array_equal(matrix, support_matrix(pattern))


@given(patterns)
def test_transpose_is_the_transposed_matrix(pattern: Pattern) -> None:
    np.testing.assert_array_equal(support_matrix(pattern.T), support_matrix(pattern).T)
    assert pattern.transpose() == pattern.T


@given(patterns)
def test_pattern_text_round_trip(pattern: Pattern) -> None:
    assert Pattern.parse(str(pattern)) == pattern


def test_heuristics() -> None:
    pattern = Pattern(3, 48, 192, 8)
    assert pattern.rho == (48 + 192) / (48 * 192)
    assert pattern.d_rho == 8 * pattern.rho


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("float16", 2),
        ("fp16", 2),
        ("half", 2),
        ("bf16", 2),
        ("bfloat16", 2),
        ("float32", 4),
        ("fp32", 4),
        ("Float", 4),
        ("float64", 8),
        ("torch.bfloat16", 2),
        (np.dtype("float64"), 8),
    ],
)
def test_bytes_knows_the_dtype(dtype: object, size: int) -> None:
    assert Pattern(2, 3, 5, 7).bytes(11, dtype) == size * (11 * (42 + 70) + 210)


def test_bytes_takes_torch_dtypes() -> None:
    torch = pytest.importorskip("torch")
    pattern = Pattern(2, 3, 5, 7)
    assert pattern.bytes(11, torch.float16) == pattern.bytes(11, "fp16")
    assert pattern.bytes(11, torch.float64) == pattern.bytes(11, "fp64")


def test_numpy_integers_become_python_ints() -> None:
    pattern = Pattern(*np.array([1, 2, 3, 4], dtype=np.int32))
    assert pattern == Pattern(1, 2, 3, 4)
    assert all(type(value) is int for value in pattern.weight_shape)
    assert pattern.flops(np.int64(5)) == pattern.flops(5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ((1, 0, 4, 2), "Pattern(1, 0, 4, 2): b must be at least 1, got 0"),
        ((1, 2, 4, -2), "Pattern(1, 2, 4, -2): d must be at least 1, got -2"),
        ((True, 2, 4, 2), "Pattern(True, 2, 4, 2): a must be an integer, got True (bool)"),
        ((1, 2, 4.0, 2), "Pattern(1, 2, 4.0, 2): c must be an integer, got 4.0 (float)"),
        ((1, "2", 4, 2), "Pattern(1, '2', 4, 2): b must be an integer, got '2' (str)"),
        ((1, 2, None, 2), "Pattern(1, 2, None, 2): c must be an integer, got None (NoneType)"),
    ],
)
def test_bad_pattern_values_get_a_sentence(values: tuple, sentence: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        Pattern(*values)
    assert str(caught.value) == sentence
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, KsoptError)


def test_bad_batches_and_dtypes_get_a_sentence() -> None:
    pattern = Pattern(1, 2, 3, 4)
    assert pattern.flops(0) == 0
    with pytest.raises(InvalidInputError, match="batch must be at least 0, got -1"):
        pattern.flops(-1)
    with pytest.raises(InvalidInputError, match="batch must be an integer, got True"):
        pattern.bytes(True, "fp16")
    with pytest.raises(InvalidInputError, match="dtype 'int4' is not known: use one of float16"):
        pattern.bytes(1, "int4")


# --- chains --------------------------------------------------------------------------------------


def test_a_chain_is_a_sequence_of_its_patterns() -> None:
    chain = Chain.square_dyadic(16)
    assert len(chain) == 4
    assert list(chain) == list(chain.patterns)
    assert chain[0] == Pattern(1, 2, 2, 8)
    assert chain[-1] == Pattern(8, 2, 2, 1)
    assert chain[1:3] == Chain((Pattern(2, 2, 2, 4), Pattern(4, 2, 2, 2)))
    assert Chain(list(chain.patterns)) == chain  # type: ignore[arg-type]
    assert hash(Chain(chain.patterns)) == hash(chain)


@given(chains())
def test_chain_totals_are_those_of_the_factors(chain: Chain) -> None:
    product = product_matrix(chain)
    assert chain.shape == (chain.out_features, chain.in_features) == product.shape
    assert chain.nnz == sum(support_matrix(pattern).sum() for pattern in chain)
    assert chain.flops(3) == 6 * chain.nnz
    assert chain.bytes(3, "bf16") == sum(pattern.bytes(3, "bf16") for pattern in chain)
    assert chain.sparsity == pytest.approx(1 - chain.nnz / product.size, abs=1e-12)


@given(chains())
def test_chain_text_round_trip(chain: Chain) -> None:
    assert Chain.parse(str(chain)) == chain
    spaced = str(chain).replace("*", " *\t").replace(",", " , ").replace("(", " ( ")
    assert Chain.parse(spaced + "\n") == chain


@given(chains())
def test_transpose_of_a_chain(chain: Chain) -> None:
    np.testing.assert_array_equal(product_matrix(chain.T), product_matrix(chain).T)
    assert chain == chain.T.T


@pytest.mark.parametrize(
    ("text", "piece"),
    [
        ("", "''"),
        ("(1,2,3)", "'(1,2,3)'"),
        ("(1,2,3,4,5)", "'(1,2,3,4,5)'"),
        ("(1,2,2,1)*", "''"),
        ("(1,2,2,1)**(1,2,2,1)", "''"),
        ("(1,2,2,1)*(1,2,x,1)", "'(1,2,x,1)'"),
        ("(1,2,2,1)(1,2,2,1)", "'(1,2,2,1)(1,2,2,1)'"),
        ("(1,2.0,2,1)", "'(1,2.0,2,1)'"),
        ("1,2,2,1", "'1,2,2,1'"),
        ("(1,2 2,2,1)", "'(1,2 2,2,1)'"),
        (f"(1,{'9' * 5000},2,1)", "is not a pattern"),
    ],
)
def test_bad_text_is_quoted(text: str, piece: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        Chain.parse(text)
    assert str(caught.value).startswith(repr(text))
    assert piece in str(caught.value).removeprefix(f"{text!r} is not a chain: ")
    assert "write (a,b,c,d)" in str(caught.value)


def test_text_with_values_out_of_range_names_the_value() -> None:
    with pytest.raises(InvalidInputError, match=r"'\(1,-2,2,1\)' is not a pattern: b must"):
        Chain.parse("(1,-2,2,1)")
    with pytest.raises(InvalidInputError, match="give a text"):
        Chain.parse(3)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="None is not a pattern"):
        Pattern.parse(None)  # type: ignore[arg-type]


def test_sizes_that_do_not_meet_are_named() -> None:
    mismatched = (Pattern(1, 2, 3, 4), Pattern(1, 2, 3, 4))
    with pytest.raises(InvalidInputError) as caught:
        Chain(mismatched)
    assert str(caught.value) == (
        "(1,2,3,4)*(1,2,3,4) is not a chain: factor 1, (1,2,3,4), has 12 columns, "
        "but factor 2, (1,2,3,4), has 8 rows"
    )
    assert not Chain.is_valid(mismatched)
    assert not Chain.is_valid([])


@given(st.lists(patterns, min_size=1, max_size=3))
def test_is_valid_agrees_with_the_constructor(sequence: list[Pattern]) -> None:
    shapes = [support_matrix(pattern).shape for pattern in sequence]
    fits = all(left[1] == right[0] for left, right in pairwise(shapes))
    assert Chain.is_valid(sequence) == fits
    if fits:
        Chain(tuple(sequence))
    else:
        with pytest.raises(InvalidInputError):
            Chain(tuple(sequence))


@pytest.mark.parametrize(
    ("sequence", "words"),
    [
        ((), "at least one pattern"),
        ("(1,2,3,4)", "use Chain.parse"),
        (Pattern(1, 2, 3, 4), "give a sequence of patterns"),
        (3, "give a sequence of patterns"),
        (((1, 2, 3, 4),), "Chain.deformable_butterfly takes"),
    ],
)
def test_what_is_not_patterns_gets_a_sentence(sequence: object, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        Chain(sequence)  # type: ignore[arg-type]


# --- the algebra of products ---------------------------------------------------------------------


def brute_force_support(chain: Chain) -> Pattern | None:
    """Try every pattern of the product's shape."""
    nonzero = product_matrix(chain) > 0
    for candidate in patterns_with(*nonzero.shape):
        if np.array_equal(support_matrix(candidate) > 0, nonzero):
            return candidate
    return None


@given(chains())
def test_product_support_is_exact(chain: Chain) -> None:
    computed, expected = chain.product_support, brute_force_support(chain)
    assert (computed is None) == (expected is None)
    if computed is not None and expected is not None:
        np.testing.assert_array_equal(support_matrix(computed), support_matrix(expected))
        if computed.b == computed.c == 1:
            assert (computed.a, computed.d) == (chain.out_features, 1)
    assert chain.is_dense_support == bool((product_matrix(chain) > 0).all())


def test_product_support_is_exact_on_every_small_pair() -> None:
    """All pairs with a, d up to 4 and b, c up to 2, by rows and by the closed form."""
    small = [Pattern(a, b, c, d) for a, b, c, d in np.ndindex(5, 3, 3, 5) if min(a, b, c, d) > 0]
    kinds: dict[bool, int] = {True: 0, False: 0}
    for left in small:
        for right in small:
            if left.in_features != right.out_features:
                continue
            expected = brute_force_support(Chain((left, right)))
            by_rows = support._by_rows((left, right))
            closed_form = support.pair_support(left, right)
            for computed in (by_rows, closed_form) if closed_form else (by_rows,):
                assert (computed is None) == (expected is None), (left, right)
                if computed is not None and expected is not None:
                    assert np.array_equal(support_matrix(computed), support_matrix(expected))
            if expected is not None and closed_form is None:
                # A closed form is missed only where shared factors of a and d leave more zeros.
                g, h = np.gcd(left.a, right.a), np.gcd(left.d, right.d)
                assert expected.a * expected.d > g * h
            kinds[expected is not None] += 1
    assert min(kinds.values()) > 30  # both answers were put to the test


@given(chains(most=4))
def test_chainable_is_the_definition(chain: Chain) -> None:
    """Le, Zheng, Riccietti, Gribonval 2024, by exact division."""

    def pair(left: Pattern, right: Pattern) -> bool:
        return (
            right.a % left.a == 0
            and left.d % right.d == 0
            and (left.a * left.c) % right.a == 0
            and (right.b * right.d) % left.d == 0
        )

    pairs = list(pairwise(chain))
    assert chain.is_chainable == all(pair(left, right) for left, right in pairs)
    if not chain.is_chainable:
        with pytest.raises(InvalidInputError, match="is not chainable"):
            _ = chain.ranks
        return
    # Paths between connected output and input: the product of the ranks, everywhere.
    product = product_matrix(chain)
    assert set(np.unique(product[product > 0])) == {np.prod(chain.ranks, dtype=int)}
    for (left, right), rank in zip(pairs, chain.ranks, strict=True):
        formula = Pattern(left.a, left.b * left.d // right.d, right.a * right.c // left.a, right.d)
        np.testing.assert_array_equal(
            support_matrix(left) @ support_matrix(right), rank * support_matrix(formula)
        )


def test_why_the_rank_of_a_chainable_pair_must_be_an_integer() -> None:
    """a_l | a_{l+1} and d_{l+1} | d_l alone: the smallest pair whose support is not Kronecker."""
    matches = []
    for values in np.ndindex(3, 3, 3, 3, 3, 3, 3, 3):
        if min(values) == 0:
            continue
        left, right = Pattern(*values[:4]), Pattern(*values[4:])
        divides = right.a % left.a == 0 and left.d % right.d == 0
        if left.in_features == right.out_features and divides:
            chain = Chain((left, right))
            if brute_force_support(chain) is None:
                assert not chain.is_chainable
                matches.append(chain)
    assert min(matches, key=lambda chain: (sum(chain.shape), chain.nnz)) == Chain.parse(
        "(1,2,1,2)*(2,1,2,1)"
    )
    # r = 3/2: the support is Kronecker-sparse, but not every entry is a sum of as many paths.
    uneven = Chain.parse("(1,2,3,2)*(2,3,2,1)")
    assert uneven.product_support == Pattern(1, 4, 4, 1)
    assert not uneven.is_chainable
    assert set(np.unique(product_matrix(uneven))) == {1, 2}


@given(chains(most=3, up_to=16), st.integers(0, 2**32))
def test_rank_bound_is_reached_by_random_weights(chain: Chain, seed: int) -> None:
    # A random product misses the highest possible rank with probability below 1e-15 (Schwartz,
    # Zippel: degree times sizes over a prime of 61 bits).
    assert rank_of_random_product(chain, seed) == chain.rank_bound


@given(chains(most=3, up_to=12), st.integers(0, 2**32))
def test_no_product_has_a_larger_rank_than_the_bound(chain: Chain, seed: int) -> None:
    generator = np.random.default_rng(seed)
    product = np.eye(chain.out_features)
    for pattern in chain:
        mask = support_matrix(pattern)
        product = product @ (mask * generator.integers(-1, 2, mask.shape))
    assert np.linalg.matrix_rank(product) <= chain.rank_bound


@given(chains(most=4), st.data())
def test_merge_keeps_the_support_of_the_product(chain: Chain, data: st.DataObject) -> None:
    if len(chain) == 1:
        with pytest.raises(InvalidInputError, match="no pair to merge"):
            chain.merge(0)
        return
    index = data.draw(st.integers(0, len(chain) - 2))
    if brute_force_support(chain[index : index + 2]) is None:
        with pytest.raises(InvalidInputError, match="has no Kronecker-sparse support"):
            chain.merge(index)
        return
    merged = chain.merge(index)
    assert len(merged) == len(chain) - 1
    assert merged.patterns[:index] == chain.patterns[:index]
    assert merged.patterns[index + 1 :] == chain.patterns[index + 2 :]
    np.testing.assert_array_equal(product_matrix(merged) > 0, product_matrix(chain) > 0)


def test_merge_names_the_pairs_there_are() -> None:
    chain = Chain.square_dyadic(8)
    with pytest.raises(
        InvalidInputError, match=r"merge\(2\): a chain of 3 factors has pairs 0 to 1"
    ):
        chain.merge(2)
    with pytest.raises(InvalidInputError, match="index must be at least 0, got -1"):
        chain.merge(-1)


def test_rows_that_start_like_a_pattern_but_are_none() -> None:
    # Row 0 alone suggests two diagonal blocks, which three rows cannot have.
    assert Chain.parse("(3,1,2,1)*(2,3,1,1)").product_support is None


def test_merging_goes_on_with_what_was_merged() -> None:
    # Halves and thirds do not merge; thirds and a full factor do, and then halves with the result.
    chain = Chain.parse("(2,2,3,1)*(3,2,2,1)*(1,6,6,1)*(1,6,4,1)")
    assert support._merge_neighbours(chain.patterns) == [Pattern(1, 4, 4, 1)]


@pytest.mark.parametrize(
    "chain",
    [
        Chain.kaleidoscope(64),
        Chain.block_butterfly(96, block=6),
        Chain.monarch(48, 64, p=4),
        Chain.low_rank(48, 64, rank=8),
    ],
    ids=str,
)
def test_the_usual_families_have_closed_forms(chain: Chain) -> None:
    assert len(support._merge_neighbours(chain.patterns)) == 1
    assert support._by_rows(chain.patterns) == chain.product_support


def test_large_chains_without_a_closed_form() -> None:
    # Halves and thirds: neither partition refines the other, so rows are followed one by one.
    thirds, halves = Pattern(3, 1376, 1376, 1), Pattern(2, 2064, 5504, 1)
    assert support.pair_support(thirds, halves) is None
    assert Chain((thirds, halves)).product_support is None
    assert not Chain((thirds, halves)).is_dense_support
    chain = Chain((Pattern(2, 2048, 2064, 1), thirds, halves))
    assert chain.shape == (4096, 11008)
    assert chain.product_support == Pattern(1, 4096, 11008, 1)
    assert chain.is_dense_support


# --- documentation -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "ksopt.bench.paper_patterns",
        "ksopt.patterns.validate",
        "ksopt.patterns.pattern",
        "ksopt.patterns.named_chains",
        "ksopt.patterns.chain",
        "ksopt.patterns.support",
    ],
)
def test_examples_in_docstrings(name: str) -> None:
    module: ModuleType = importlib.import_module(name)
    assert doctest.testmod(module).failed == 0
