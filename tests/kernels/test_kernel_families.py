"""The choice of tiles, which needs no GPU: what a device can run, and in which order."""

import dataclasses

import pytest

from ksopt.bench.paper import stratified_sample
from ksopt.kernels.families import FAMILIES, Family, Machine, ranked_tiles
from ksopt.kernels.problem import Problem
from ksopt.pattern import Pattern

H200 = Machine((9, 0), 132, 228 * 1024)
A100 = Machine((8, 0), 108, 164 * 1024)
RTX = Machine((12, 0), 170, 100 * 1024)
T4 = Machine((7, 5), 40, 64 * 1024)

PROBLEMS = [
    Problem(pattern, dtype, last)
    for pattern in stratified_sample(12, seed=2)
    for dtype in ("float32", "float16", "bfloat16")
    for last in (False, True)
]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_has_tiles_for_some_of_the_papers_patterns(family: Family) -> None:
    assert any(ranked_tiles(family, problem, 25_088, H200) for problem in PROBLEMS)


@pytest.mark.parametrize("machine", [H200, A100, RTX], ids=["H200", "A100", "RTX"])
def test_tiles_fit_and_come_by_predicted_time(machine: Machine) -> None:
    for problem in PROBLEMS:
        for family in FAMILIES:
            tiles = ranked_tiles(family, problem, 1000, machine)
            times = [tile.predicted_us for tile in tiles]
            assert times == sorted(times)
            assert all(us > 0 for us in times)
            for tile in tiles:
                assert tile.config.shared_bytes(problem.pattern) <= machine.shared_bytes - 1024


def test_a_device_without_the_instructions_gets_none() -> None:
    problem = Problem(Pattern(4, 64, 64, 16), "float16", False)
    assert not any(ranked_tiles(family, problem, 64, T4) for family in FAMILIES)


def test_what_a_family_cannot_compute_has_no_tiles() -> None:
    problem = Problem(Pattern(1, 7, 7, 7), "float64", False)
    assert not any(ranked_tiles(family, problem, 64, H200) for family in FAMILIES)


def test_a_longer_batch_is_predicted_to_take_longer() -> None:
    for problem in PROBLEMS:
        for family in FAMILIES:
            short = ranked_tiles(family, problem, 2_000, H200)[:1]
            long = ranked_tiles(family, problem, 200_000, H200)[:1]
            for one, other in zip(short, long, strict=True):
                assert one.predicted_us < other.predicted_us


def test_more_multiprocessors_are_predicted_to_be_faster() -> None:
    bigger = dataclasses.replace(H200, multiprocessors=264)
    for problem in PROBLEMS:
        for family in FAMILIES:
            small = ranked_tiles(family, problem, 25_088, H200)[:1]
            big = ranked_tiles(family, problem, 25_088, bigger)[:1]
            for one, other in zip(small, big, strict=True):
                assert other.predicted_us < one.predicted_us
