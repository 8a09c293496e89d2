"""Constraints against brute force: the walk cuts exactly what a filter would drop."""

import functools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ksopt.errors import InvalidInputError
from ksopt.kernels.families.base import family_of
from ksopt.kernels.problem import DeviceSpec, Problem
from ksopt.patterns.chain import Chain, Pattern
from ksopt.patterns.size import Dims
from ksopt.search.space.alignment import Alignment
from ksopt.search.space.block_sizes import BlockSizes
from ksopt.search.space.constraints import Constraints
from ksopt.search.space.enumerate import Walk
from ksopt.search.space.families import EVERY, NAMES, is_member, names_of, obstacle

H200 = DeviceSpec((9, 0), multiprocessors=132, shared_bytes=228 * 1024)
mma16 = family_of("mma16")
mma_tf32x3 = family_of("mma_tf32x3")

SIZES = (1, 2, 5, 8, 12, 16, 24, 32)


@functools.cache
def every(dims: Dims, least_inner: int) -> list[Chain]:
    """The space without constraints, which test_space.py compares with every valid chain."""
    walk = Walk(dims, dims.dense_parameters, least_inner)
    return [Chain(factors) for count in (1, 2, 3) for factors in walk.factors(count)]


def constrained(dims: Dims, least_inner: int, constraints: Constraints) -> list[Chain]:
    walk = Walk(dims, dims.dense_parameters, least_inner, constraints=constraints)
    return [Chain(factors) for count in (1, 2, 3) for factors in walk.factors(count)]


def members_of(name: str, dims: Dims) -> Iterator[Chain]:
    """A family's members, from every parameter that its constructor takes."""
    n, rows = dims.in_features, dims.out_features
    parameters = range(1, max(n, rows) + 1)
    if name == "dense":
        yield Chain.dense(n, rows)
    elif name in ("low_rank", "monarch"):
        for parameter in parameters:
            try:
                yield getattr(Chain, name)(n, rows, parameter)
            except InvalidInputError:
                continue
    elif n == rows and name != EVERY:
        for words in [(t,) for t in parameters] if name == "block_butterfly" else [()]:
            try:
                yield getattr(Chain, name)(n, *words)
            except InvalidInputError:
                continue


@functools.cache
def suits_the_kernels(pattern: Pattern, dtype: str) -> bool:
    """By the kernels' own rules, and without padding.

    Too many weights for a tile are another matter.
    """
    if pattern.b % 8:
        return False
    kernels = mma_tf32x3 if dtype == "float32" else mma16
    reason = kernels.unsupported_reason(Problem.of_factor(pattern, dtype, False, exact=False), H200)
    return reason is None or "shared memory" in reason


@st.composite
def block_sizes(draw: st.DrawFn) -> tuple[str, frozenset[int]]:
    """A text, and the sizes up to 64 that it means."""
    size = st.sampled_from(SIZES)
    kind = draw(st.sampled_from(("list", "range", "multiple")))
    if kind == "list":
        listed = draw(st.lists(size, min_size=1, max_size=5))
        return ",".join(map(str, listed)), frozenset(listed)
    if kind == "range":
        least, most = sorted((draw(size), draw(size)))
        return f"{least}-{most}", frozenset(range(least, most + 1))
    step = draw(size)
    return f"multiple:{step}", frozenset(range(step, 65, step))


@pytest.mark.slow
@given(
    rows=st.sampled_from(SIZES),
    columns=st.sampled_from(SIZES),
    share=st.sampled_from((0.5, 1.0)),
    sizes=st.none() | block_sizes(),
    chainable=st.booleans(),
    dtype=st.sampled_from((None, "float16", "float32")),
    train=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_cut_branches_are_what_a_filter_drops(
    rows: int,
    columns: int,
    share: float,
    sizes: tuple[str, frozenset[int]] | None,
    chainable: bool,
    dtype: str | None,
    train: bool,
) -> None:
    dims = Dims(columns, rows)
    rank = max(1, int(share * min(rows, columns)))

    def admitted(chain: Chain) -> bool:
        factors = [*chain, *(chain.transpose() if train else ())]
        return (
            (sizes is None or all(p.b in sizes[1] and p.c in sizes[1] for p in chain))
            and (not chainable or chain.is_chainable)
            and (dtype is None or all(suits_the_kernels(p, dtype) for p in factors))
        )

    constraints = Constraints(
        block_sizes=BlockSizes.parse(sizes[0]) if sizes else BlockSizes(),
        chainable=chainable,
        alignment=None if dtype is None else Alignment(4 if dtype == "float32" else 2, train=train),
    )
    expected = {chain for chain in every(dims, rank) if admitted(chain)}
    actual = constrained(dims, rank, constraints)
    assert len(actual) == len(set(actual))
    assert set(actual) == expected
    assert {chain for chain in every(dims, rank) if constraints.admits(chain)} == expected


any_families = given(
    rows=st.sampled_from((*SIZES, 7)),
    columns=st.sampled_from((*SIZES, 7)),
    share=st.sampled_from((0.25, 0.5, 1.0)),
    names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=4),
    chainable=st.booleans(),
)


@any_families
@settings(max_examples=20, deadline=None)
def test_families_are_what_their_constructors_make(
    rows: int, columns: int, share: float, names: list[str], chainable: bool
) -> None:
    check_families(rows, columns, share, names, chainable)


@pytest.mark.slow
@any_families
@settings(max_examples=60, deadline=None)
def test_families_of_more_layers(
    rows: int, columns: int, share: float, names: list[str], chainable: bool
) -> None:
    check_families(rows, columns, share, names, chainable)


def check_families(
    rows: int, columns: int, share: float, names: list[str], chainable: bool
) -> None:
    """Searched with those names, a layer has the chains that their constructors make."""
    dims, rank = Dims(columns, rows), max(1, int(share * min(rows, columns)))
    named = {chain for name in names for chain in members_of(name, dims)}
    expected = {
        chain
        for chain in named
        if len(chain) <= 3
        and chain.nnz <= dims.dense_parameters
        and chain.rank_bound >= rank
        and chain.is_dense_support
        and (not chainable or chain.is_chainable)
    }
    plain = every(dims, rank)
    if EVERY in names:
        expected |= {chain for chain in plain if not chainable or chain.is_chainable}
    constraints = Constraints(names_of(names), chainable=chainable)
    actual = constrained(dims, rank, constraints)
    assert len(actual) == len(set(actual))
    assert set(actual) == expected
    assert all(map(constraints.admits, actual))
    for name in names:
        members = {chain for chain in {*plain, *named} if is_member(name, chain)}
        assert members == (
            {*plain, *named} if name == EVERY else set(members_of(name, dims)) & members
        )
        assert name == EVERY or set(members_of(name, dims)) <= members


def test_the_cases_hold_something() -> None:
    dims = Dims(64, 64)
    assert len(constrained(dims, 16, Constraints(chainable=True))) > 20
    assert len(constrained(dims, 16, Constraints(alignment=Alignment(2)))) > 20
    assert len(constrained(dims, 16, Constraints(block_sizes=BlockSizes.parse("16,32")))) > 5
    butterflies = constrained(dims, 64, Constraints(("block_butterfly",)))
    assert [str(chain) for chain in butterflies] == [
        "(1,64,64,1)",
        "(1,32,32,2)*(2,32,32,1)",
        "(1,16,16,4)*(2,16,16,2)*(4,16,16,1)",
    ]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_aligned_is_what_the_kernels_take_without_padding(dtype: str) -> None:
    """Every pattern of small sizes, one by one."""
    constraints = Constraints(alignment=Alignment(4 if dtype == "float32" else 2))
    sizes = (1, 2, 3, 4, 6, 8, 12, 16, 24, 36)
    for a in (1, 3):
        for b in sizes:
            for c in sizes:
                for d in (*sizes, 5, 9, 20, 40):
                    pattern = Pattern(a, b, c, d)
                    suits = suits_the_kernels(pattern, dtype)
                    assert constraints.admits_factor(pattern) == suits, pattern


@pytest.mark.parametrize(("element_bytes", "step"), [(2, 16), (4, 8)])
def test_aligned_in_batch_last_is_whole_tensor_core_steps(element_bytes: int, step: int) -> None:
    constraints = Constraints(alignment=Alignment(element_bytes, batch_last=True))
    for b in (8, 16, 24, 32):
        for c in (4, 8, 12, 16, 24):
            whole = b % 16 == 0 and c % step == 0
            assert constraints.admits_factor(Pattern(3, b, c, 5)) == whole


def test_many_choices_are_never_built() -> None:
    """What cannot lead to a chain is not walked through."""
    dims = Dims(4096, 4096)

    def visits(constraints: Constraints) -> int:
        walk = Walk(dims, dims.dense_parameters // 4, 4096, visits=10**6, constraints=constraints)
        for count in (1, 2, 3):
            for _ in walk.factors(count):
                pass
        assert walk._visits is not None
        return 10**6 - walk._visits

    assert visits(Constraints(block_sizes=BlockSizes.parse("64"))) < 5_000
    assert visits(Constraints(("monarch", "low_rank"))) < 100
    assert visits(Constraints(chainable=True, block_sizes=BlockSizes.parse("multiple:32"))) < 50_000


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("16", [16]),
        (" 32, 16,16 ", [16, 32]),
        ("14-17", [14, 15, 16, 17]),
        ("16-16", [16]),
        ("multiple:20", [20, 40, 60]),
        ("multiple:1", list(range(1, 65))),
        ("1-9", list(range(1, 10))),
    ],
)
def test_block_sizes(text: str, sizes: list[int]) -> None:
    actual = BlockSizes.parse(text)
    assert [size for size in range(1, 65) if actual.holds(size)] == sizes
    assert BlockSizes.parse(str(actual)) == actual


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "write the b and c") for text in ("", "0", "x", "16,,32", "16-", "-16", "1.5")),
        *((text, "write the b and c") for text in ("multiple:", "multiple:0", "16-32,64", "16,")),
        ("9999999999", "write the b and c"),
        ("64-16", "the range is empty; write the smaller size first, 16-64"),
    ],
)
def test_other_block_sizes_are_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        BlockSizes.parse(text)
    assert str(refused.value).startswith(f"block_sizes {text!r}: ")
    assert message in str(refused.value)


def test_families_have_their_names() -> None:
    assert names_of("butterfly,dense,square_dyadic") == ("dense", "square_dyadic")
    assert names_of(["monarch", "low_rank"]) == ("low_rank", "monarch")
    for wrong in ("", "monarch,", "Monarch", "all"):
        with pytest.raises(InvalidInputError, match="there are dense, low_rank, square_dyadic"):
            names_of(wrong)
    for name in NAMES:
        assert name == EVERY or hasattr(Chain, name)


@pytest.mark.parametrize(
    ("name", "dims", "message"),
    [
        ("monarch", (7, 13), None),
        ("square_dyadic", (8, 8), None),
        ("square_dyadic", (16, 16), "4 factors there, and a search takes at most 3"),
        ("kaleidoscope", (4, 4), "4 factors there"),
        ("kaleidoscope", (12, 12), "is of square layers of a power of two"),
        ("block_butterfly", (12, 24), "is of square layers of an even size"),
        ("block_butterfly", (4096, 4096), None),
        (EVERY, (7, 13), None),
    ],
)
def test_what_keeps_a_layer_from_a_family(name: str, dims: tuple[int, int], message: str) -> None:
    actual = obstacle(name, *dims, max_factors=3)
    assert actual is None if message is None else message in (actual or "")
