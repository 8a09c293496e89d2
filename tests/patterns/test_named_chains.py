"""The named families against their definitions, built without the formulas of Table 1."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksopt.errors import InvalidInputError
from ksopt.patterns.chain import Chain, Pattern

sizes = st.integers(1, 6)


def supports(chain: Chain) -> list[np.ndarray]:
    """The supports of the factors, I_a (x) 1_{b x c} (x) I_d each."""
    return [
        np.kron(np.kron(np.eye(p.a), np.ones((p.b, p.c))), np.eye(p.d)).astype(int) for p in chain
    ]


def shuffled(rows: int, groups: int) -> np.ndarray:
    """The permutation matrix that reads a (groups, rows / groups) array column by column."""
    order = np.arange(rows).reshape(groups, rows // groups).T.ravel()
    return np.eye(rows, dtype=int)[order]


def butterfly_level(blocks: int, block: int, distance: int) -> np.ndarray:
    """Block row r is full at block columns r and r + distance or r - distance (r XOR distance)."""
    matrix = np.zeros((blocks, blocks), dtype=int)
    for row in range(blocks):
        matrix[row, row] = matrix[row, row ^ distance] = 1
    return np.kron(matrix, np.ones((block, block), dtype=int))


@given(sizes, sizes)
def test_dense_is_one_full_matrix(in_features: int, out_features: int) -> None:
    (support,) = supports(Chain.dense(in_features, out_features))
    np.testing.assert_array_equal(support, np.ones((out_features, in_features)))


@given(sizes, sizes, st.data())
def test_low_rank_is_two_full_matrices(in_features: int, out_features: int, data: st.DataObject):
    rank = data.draw(st.integers(1, min(in_features, out_features)))
    chain = Chain.low_rank(in_features, out_features, rank)
    left, right = supports(chain)
    np.testing.assert_array_equal(left, np.ones((out_features, rank)))
    np.testing.assert_array_equal(right, np.ones((rank, in_features)))
    assert chain.rank_bound == rank
    assert chain.ranks == (rank,)
    assert chain.is_dense_support


@pytest.mark.parametrize("levels", [1, 2, 3, 4, 5])
def test_square_dyadic_is_the_fourier_butterfly(levels: int) -> None:
    n = 2**levels
    chain = Chain.square_dyadic(n)
    distances = [n >> level for level in range(1, levels + 1)]
    for support, distance in zip(supports(chain), distances, strict=True):
        np.testing.assert_array_equal(support, butterfly_level(n, 1, distance))
    assert chain.is_dense_support
    assert chain.rank_bound == n
    assert chain.is_chainable
    assert set(chain.ranks) <= {1}


@pytest.mark.parametrize("levels", [1, 2, 3, 4])
def test_kaleidoscope_is_a_butterfly_and_a_transposed_one(levels: int) -> None:
    n = 2**levels
    butterfly = supports(Chain.square_dyadic(n))
    kaleidoscope = Chain.kaleidoscope(n)
    expected = butterfly + [factor.T for factor in reversed(butterfly)]
    for support, factor in zip(supports(kaleidoscope), expected, strict=True):
        np.testing.assert_array_equal(support, factor)
    assert kaleidoscope.shape == (n, n)
    assert kaleidoscope.is_dense_support
    assert kaleidoscope.rank_bound == n


@given(st.integers(1, 4), st.integers(1, 5))
def test_block_butterfly_is_a_butterfly_of_full_blocks(levels: int, block: int) -> None:
    blocks = 2**levels
    chain = Chain.block_butterfly(blocks * block, block=block)
    distances = [blocks >> level for level in range(1, levels + 1)]
    for support, distance in zip(supports(chain), distances, strict=True):
        # Within each run of distance * block features, blocks are interleaved instead of stacked.
        reorder = np.kron(np.eye(blocks // distance, dtype=int), shuffled(distance * block, block))
        level = butterfly_level(blocks, block, distance)
        np.testing.assert_array_equal(reorder @ support @ reorder.T, level)
    assert chain.is_dense_support
    assert chain.rank_bound == blocks * block
    assert chain.is_chainable
    if block == 1:
        assert chain == Chain.square_dyadic(blocks)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5))
def test_monarch_is_two_block_diagonals_and_shuffles(p: int, rows: int, columns: int) -> None:
    out_features, in_features = p * rows, p * columns
    chain = Chain.monarch(in_features, out_features, p=p)
    left, right = supports(chain)
    inner = min(rows, columns)
    block_diagonal = np.kron(np.eye(p), np.ones((rows, inner))).astype(int)
    shuffle_rows, shuffle_inner = shuffled(p * rows, p), shuffled(p * inner, p)
    np.testing.assert_array_equal(right, np.kron(np.eye(p), np.ones((inner, columns))))
    np.testing.assert_array_equal(left, shuffle_rows @ block_diagonal @ shuffle_inner.T)
    assert chain.rank_bound == min(in_features, out_features)
    # Each output meets each of the p blocks only if a block has p features to give it.
    assert chain.is_dense_support == (inner >= p)
    assert chain.is_chainable == (inner % p == 0)


@given(st.lists(st.tuples(sizes, sizes, sizes, sizes), min_size=1, max_size=3))
def test_deformable_butterfly_is_any_valid_chain(quads: list[tuple[int, int, int, int]]) -> None:
    shapes = [(a * b * d, a * c * d) for a, b, c, d in quads]
    if all(left[1] == right[0] for left, right in pairwise(shapes)):
        chain = Chain.deformable_butterfly(quads)
        assert [pattern.weight_shape for pattern in chain] == quads
        assert chain == Chain.deformable_butterfly([Pattern(*quad) for quad in quads])
        assert chain.shape == (shapes[0][0], shapes[-1][1])
    else:
        with pytest.raises(InvalidInputError, match="is not a chain: factor"):
            Chain.deformable_butterfly(quads)


def test_table_1_at_the_size_of_a_transformer_layer() -> None:
    assert str(Chain.monarch(384, 1536, p=2)) == "(1,768,192,2)*(2,192,192,1)"
    assert str(Chain.monarch(1536, 384, p=4)) == "(1,96,96,4)*(4,96,384,1)"
    assert str(Chain.low_rank(384, 1536, rank=64)) == "(1,1536,64,1)*(1,64,384,1)"
    assert str(Chain.block_butterfly(768, block=192)) == "(1,384,384,2)*(2,384,384,1)"


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (
            lambda: Chain.low_rank(4, 6, rank=5),
            "Chain.low_rank(4, 6, rank=5): rank must be at most min(in_features, out_features) = 4",
        ),
        (
            lambda: Chain.square_dyadic(12),
            "Chain.square_dyadic(12): n must be a power of two; the nearest are 8 and 16",
        ),
        (
            lambda: Chain.kaleidoscope(100),
            "Chain.kaleidoscope(100): n must be a power of two; the nearest are 64 and 128",
        ),
        (
            lambda: Chain.square_dyadic(1),
            "Chain.square_dyadic(1): n must be at least 2, got 1",
        ),
        (
            lambda: Chain.block_butterfly(12, block=4),
            "Chain.block_butterfly(12, block=4): n / block must be 2, 4, 8 or a higher power of "
            "two; for n = 12 block can be 3 or 6",
        ),
        (
            lambda: Chain.block_butterfly(12, block=12),
            "Chain.block_butterfly(12, block=12): n / block must be 2, 4, 8 or a higher power of "
            "two; for n = 12 block can be 3 or 6",
        ),
        (
            lambda: Chain.block_butterfly(9, block=3),
            "Chain.block_butterfly(9, block=3): n must be even: it is block * 2**L with L at "
            "least 1",
        ),
        (
            lambda: Chain.monarch(8, 12, p=3),
            "Chain.monarch(8, 12, p=3): p must divide both in_features and out_features; "
            "it can be 1, 2 or 4",
        ),
        (
            lambda: Chain.monarch(3, 5, p=2),
            "Chain.monarch(3, 5, p=2): p must divide both in_features and out_features; "
            "it can be 1",
        ),
        (
            lambda: Chain.monarch(5040, 5040, p=11),
            "Chain.monarch(5040, 5040, p=11): p must divide both in_features and out_features; "
            "it can be 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, ..., 1680, 2520 or 5040",
        ),
        (
            lambda: Chain.dense(0, 3),
            "Chain.dense(0, 3): in_features must be at least 1, got 0",
        ),
        (
            lambda: Chain.deformable_butterfly([(1, 2, 3)]),
            "(1, 2, 3) is not a pattern: give four integers (a, b, c, d)",
        ),
        (
            lambda: Chain.deformable_butterfly([]),
            "A chain needs at least one pattern, got none",
        ),
    ],
)
def test_dims_that_do_not_allow_a_family_get_a_sentence(build, sentence: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        build()
    assert str(caught.value) == sentence
