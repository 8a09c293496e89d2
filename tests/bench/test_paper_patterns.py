"""The paper's patterns, and samples of them."""

import itertools
from collections import Counter

import pytest

from ksopt.bench.paper_patterns import (
    BATCH,
    Stratum,
    energy_patterns,
    patterns,
    proportional_sample,
    stratified_sample,
)
from ksopt.errors import InvalidInputError


def figure_8() -> list[tuple[int, int, int, int]]:
    """The loops of Figure 8, as printed."""
    a_list = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128]
    b_list = [48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
    c_list = [48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
    d_list1 = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128]
    d_list2 = [4, 16, 64]
    skipped = [(1024, 256), (256, 1024), (128, 512), (512, 128), (64, 256), (256, 64)]
    limit, fitting = 2_147_483_647, []
    for b, c, d in itertools.product(b_list, c_list, d_list1):
        if b == c or b == 4 * c or c == 4 * b:
            fitting.append((1, b, c, d))
    for a, b, c, d in itertools.product(a_list, b_list, c_list, d_list2):
        if a != 1 and (b, c) not in skipped and (b == c or b == 4 * c or c == 4 * b):
            fitting.append((a, b, c, d))
    return [
        (a, b, c, d)
        for a, b, c, d in fitting
        if 25_088 * a * c * d <= limit and 25_088 * a * b * d <= limit and a * b * c * d <= limit
    ]


def test_the_patterns_are_the_627_of_figure_8() -> None:
    assert [pattern.weight_shape for pattern in patterns()] == figure_8()
    assert len(set(patterns())) == 627
    assert BATCH == 25_088


def test_every_stratum_name_is_used() -> None:
    strata = [Stratum.of(pattern) for pattern in patterns()]
    assert {stratum.a for stratum in strata} == {"1", "2-4", "6-16", "24-128"}
    assert {stratum.d for stratum in strata} == {"1", "2,3,4,6", "12,24,48,96", "8,16,32,64,128"}
    rho = Counter(stratum.rho for stratum in strata)
    assert len(rho) == 4
    assert min(rho.values()) > 100  # "quarters of about equal size"
    for pattern, stratum in zip(patterns(), strata, strict=True):
        if "-" not in stratum.a:
            assert str(pattern.a) == stratum.a
        else:
            low, high = map(int, stratum.a.split("-"))
            assert low <= pattern.a <= high
        assert str(pattern.d) in stratum.d.split(",")


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_a_sample_of_100_has_enough_of_every_class(seed: int) -> None:
    sample = stratified_sample(100, seed)
    assert len(set(sample)) == 100
    assert set(sample) <= set(patterns())
    strata = [Stratum.of(pattern) for pattern in sample]
    for field in ("a", "d", "rho"):
        counts = Counter(getattr(stratum, field) for stratum in strata)
        assert len(counts) == 4
        assert min(counts.values()) >= 15, (field, counts)


def test_a_sample_of_ten_has_every_class() -> None:
    strata = [Stratum.of(pattern) for pattern in stratified_sample(10, seed=7)]
    for field in ("a", "d", "rho"):
        assert len({getattr(stratum, field) for stratum in strata}) == 4


def test_samples_are_fixed_by_the_seed_and_nested() -> None:
    # Pinned: a change of the sample must be seen, since stored results refer to it.
    assert [str(pattern) for pattern in stratified_sample(5, seed=0)] == [
        "(4,128,128,64)",
        "(1,64,64,96)",
        "(32,192,192,4)",
        "(8,768,192,4)",
        "(1,768,192,1)",
    ]
    assert stratified_sample(100, 3)[:10] == stratified_sample(10, 3)
    assert stratified_sample(20, 3) != stratified_sample(20, 4)
    assert set(stratified_sample(627, 3)) == set(patterns())


def test_sizes_out_of_range_get_a_sentence() -> None:
    with pytest.raises(InvalidInputError, match="n must be at most 627, got 628"):
        stratified_sample(628, seed=0)
    with pytest.raises(InvalidInputError, match="n must be at least 1, got 0"):
        stratified_sample(0, seed=0)
    with pytest.raises(InvalidInputError, match="seed must be at least 0, got -1"):
        stratified_sample(3, seed=-1)


def test_a_proportional_sample_gives_each_stratum_its_share() -> None:
    population = patterns()
    share = sum(pattern.a == 1 for pattern in population) / len(population)
    for seed in range(3):
        drawn = proportional_sample(population, 60, seed, Stratum.of)
        assert len(set(drawn)) == 60
        assert sum(pattern.a == 1 for pattern in drawn) == pytest.approx(60 * share, abs=1.01)
    assert set(proportional_sample(population, 10_000, 0, Stratum.of)) == set(population)


def test_every_pattern_is_as_likely_as_any_other() -> None:
    population = patterns()[:20]
    counts = Counter(
        pattern
        for seed in range(400)
        for pattern in proportional_sample(population, 5, seed, lambda each: each.c)
    )
    assert set(counts) == set(population)
    assert min(counts.values()) > 60  # 100 expected
    assert max(counts.values()) < 145


def test_the_energy_subset_is_the_papers_product_of_lists() -> None:
    sample = energy_patterns()
    assert {pattern.a for pattern in sample} == {1, 4, 16, 32, 64}
    assert {pattern.d for pattern in sample} == {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64}
    assert all((p.b, p.c) not in {(1024, 256), (64, 256)} for p in sample)
    assert all(BATCH * max(p.shape) <= 2**31 - 1 for p in sample)
    assert len(sample) == len(set(sample))
