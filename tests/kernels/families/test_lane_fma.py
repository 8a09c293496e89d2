"""The description of a template in families/lane_fma.py: support, tiles, launch, times."""

import csv
import math
import statistics
from pathlib import Path

import pytest
from checks import H200

from ksopt.bench import random_subjects
from ksopt.kernels import registry
from ksopt.kernels.families.base import family_of
from ksopt.kernels.families.lane_fma import Config
from ksopt.kernels.problem import Problem
from ksopt.patterns.chain import Pattern

lane_fma = family_of("lane_fma")
DATA = Path(__file__).parents[3] / "docs" / "data"
DTYPES = ("bfloat16", "float32")


def problem_of(text: str, dtype: str) -> Problem:
    return Problem.of_factor(Pattern.parse(text), dtype, False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_tile_covers_every_output_once(dtype):
    patterns = [factor for chain, _ in random_subjects.draw(200, seed=5) for factor in chain]
    problems = [Problem.of_factor(pattern, dtype, False) for pattern in patterns]
    problems = [one for one in problems if lane_fma.unsupported_reason(one, H200) is None]
    assert len(problems) >= 10
    for problem in problems:
        p = problem.pattern
        tiles = list(lane_fma.configs(problem, H200))
        assert tiles
        assert len(set(tiles)) == len(tiles)
        for tile in tiles:
            assert tile.slots * tile.windows(p) * tile.width >= p.d
            assert tile.slots * (tile.windows(p) - 1) * tile.width < p.d
            assert p.d % tile.width == 0
            geometry = lane_fma.geometry(problem, tile)
            assert geometry.rows_per_tile == tile.groups * tile.rows
            assert geometry.tiles_per_row_tile == p.a * tile.windows(p)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("(1,4,4,8)", "runs of 16 bytes"),
        ("(1,4,300,64)", "sums of c = 300"),
        ("(1,100,100,64)", "50 multiply-adds for each element"),
    ],
)
def test_what_other_kernels_are_for(text, words):
    assert words in lane_fma.unsupported_reason(problem_of(text, "bfloat16"), H200)


def measured(dtype: str) -> dict[tuple[str, int], list[tuple[Config, float]]]:
    """The timed tiles by pattern and rows, with microseconds on an H200."""
    by_problem: dict[tuple[str, int], list[tuple[Config, float]]] = {}
    with (DATA / f"lane-fma-tiles-{dtype}.csv").open(newline="", encoding="utf-8") as file:
        for text, rows, *rest in list(csv.reader(file))[1:]:
            tile = Config(*map(int, rest[:5]))
            by_problem.setdefault((text, int(rows)), []).append((tile, float(rest[-2])))
    return by_problem


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_best_predicted_tiles_are_near_the_fastest(dtype):
    regrets, errors = [], []
    for (text, rows), tiles in measured(dtype).items():
        problem = problem_of(text, dtype)
        times = [
            (lane_fma.predicted_us(problem, tile, rows, H200), us)
            for tile, us in tiles
            if tile in set(lane_fma.configs(problem, H200))
        ]
        fastest_us = min(us for _, us in times)
        regrets.append(min(us for _, us in sorted(times)[:3]) / fastest_us)
        errors += [abs(math.log(guess / us)) for guess, us in times if us < 1.5 * fastest_us]
    assert statistics.geometric_mean(regrets) < 1.1
    assert statistics.median(errors) < math.log(1.35)


@pytest.mark.parametrize(
    ("text", "rows", "dtype"),
    [("(2,21,8,1033)", 1684, "bfloat16"), ("(1,32,1,266)", 14203, "float32")],
)
def test_it_is_raced_where_it_was_faster(text, rows, dtype):
    names = {one.name for one in registry.candidates(problem_of(text, dtype), rows, H200)}
    assert "lane_fma" in names
