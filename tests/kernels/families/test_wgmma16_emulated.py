"""The 16-bit family on warpgroup products: its index logic and hand-over, run on the CPU."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from checks import assert_close_to_float64, assert_not_finite_stays, gpu, operands
from cuda_emulator import EmulationError, Instance
from packed_kernels import without_predicates

from ksopt.kernels.families.base import family_of
from ksopt.kernels.families.common.lane_layout import lane_layout
from ksopt.kernels.families.wgmma16 import Config
from ksopt.kernels.problem import Problem
from ksopt.patterns.chain import Pattern

wgmma16 = family_of("wgmma16")

# A shape for every class of d; c is a multiple of the unit of l (16 or 32), or is none.
SHAPES = [
    (1, 32, 20, 2),
    (2, 24, 40, 3),
    (1, 48, 22, 4),
    (2, 16, 20, 6),
    (3, 32, 33, 8),
    (1, 16, 18, 12),
    (2, 48, 17, 16),
    (1, 64, 32, 24),
    (1, 32, 48, 32),
]
# b without divisors for wide tiles: tiles that compute more outputs than there are.
PADDED = [
    (2, 36, 20, 2),
    (1, 40, 22, 4),
    (2, 20, 24, 6),
    (1, 33, 20, 8),
    (2, 29, 17, 16),
    (2, 13, 20, 2),  # groups' results begin at multiples of 4 bytes, of 8, of 2, and of 4
    (3, 21, 22, 4),
    (2, 37, 24, 3),
    (1, 23, 20, 6),
]
MULTIPROCESSORS = 4


def problem_of(shape: tuple[int, int, int, int], dtype: str = "float16") -> Problem:
    return Problem.of_factor(Pattern(*shape), dtype, batch_last=False)


def padded_tiles(family: Any, problem: Problem) -> list[Any]:
    """The tiles that compute more outputs than there are."""
    b, several = problem.pattern.b, family.configs(problem, gpu(MULTIPROCESSORS))
    return [config for config in several if b % config.outputs]


def cases() -> Iterator[tuple[Problem, Config]]:
    """For each shape two tiles, which divide the work between warpgroups in different ways."""
    draw = random.Random(0)
    for at, shape in enumerate(SHAPES):
        problem = problem_of(shape, "bfloat16" if at % 4 == 3 else "float16")
        candidates = list(wgmma16.configs(problem, gpu(MULTIPROCESSORS)))
        alone = [c for c in candidates if c.groups == 1]
        several = [c for c in candidates if c.groups > 1]
        yield problem, draw.choice(alone or several)
        yield problem, draw.choice(several)
    for at, shape in enumerate(PADDED):
        problem = problem_of(shape, "bfloat16" if at % 2 else "float16")
        yield problem, draw.choice(padded_tiles(wgmma16, problem))


CASES = list(cases())


def instance(problem: Problem, config: Config) -> Instance:
    source = wgmma16.source(problem, config)
    return Instance(problem, source, wgmma16.geometry(problem, config))


@pytest.fixture(scope="module")
def kernels(emulator):
    return emulator.on_demand([instance(*case) for case in CASES], without_predicates)


def name(at: int) -> str:
    problem, c = CASES[at]
    groups = f"{c.groups_j}x{c.groups_n}x{c.groups_m}w"
    return f"{problem.pattern}-{groups}-{c.nt}n-{c.kl}l-{c.stages}s-{c.team_j}t"


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(len(CASES)), ids=name)
def test_results(kernels, at):
    problem, config = CASES[at]
    for batch in (1, config.rows + 37):
        x, weight = operands(problem, batch, seed=batch)
        y = kernels[at](x, weight)
        assert_close_to_float64(y, x, weight, problem)
        assert torch.equal(y, kernels[at](x, weight, seed=1))


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(len(CASES)), ids=name)
def test_what_is_not_finite_reaches_what_it_met(kernels, at):
    assert_not_finite_stays(kernels[at], CASES[at][0], batch=37, seed=at)


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(0, len(CASES), 3), ids=name)
def test_teams_share_rows_and_groups_of_columns(kernels, at):
    """One team does everything, and three share the rows of groups that three do not divide."""
    problem, config = CASES[at]
    x, weight = operands(problem, 4 * config.rows + 3, seed=at)
    results = []
    for teams in (1, 3):
        few = replace(config, max_blocks=teams * config.team(problem.pattern))
        launched = kernels[at].launched_as(wgmma16.geometry(problem, few))
        results.append(launched(x, weight, seed=teams))
        assert_close_to_float64(results[-1], x, weight, problem)
    assert torch.equal(results[0], results[1])


@pytest.mark.slow
@pytest.mark.parametrize(("at", "teams"), [(15, 2), (17, 3)])
def test_teams_take_groups_that_share_lines_side_by_side(kernels, at, teams):
    """Thirteen tiles of rows, in two or three shares, for three groups of columns or two."""
    problem, config = CASES[at]
    width = config.groups_j * lane_layout(problem.pattern.d).j * config.team_j
    assert width < problem.pattern.d
    x, weight = operands(problem, 13 * config.rows - 5, seed=at)
    few = replace(config, max_blocks=teams * config.team(problem.pattern))
    y = kernels[at].launched_as(wgmma16.geometry(problem, few))(x, weight)
    assert_close_to_float64(y, x, weight, problem)
    assert torch.equal(y, kernels[at](x, weight))


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (
            "full[slot].wait(parity);",
            "race|nothing wrote|under way",
        ),
        ("empty[slot].wait(parity);", "race|under way|for ever"),
        ("named_barrier_sync(Tile::ALL_MULTIPLIERS, Tile::MULTIPLIERS);", "race|nothing wrote"),
        ("meet();", "race|nothing wrote"),
    ],
)
def test_a_missing_wait_is_detected(emulator, cut, message):
    """So the hand-over of stages, weights and results is really checked."""
    shape = (2, 16, 32, 16)
    problem = problem_of(shape)
    config = Config(2, 1, 1, 2, 16, 2, 1, 1, max_blocks=1)

    def edit(header: str, text: str) -> str:
        if header == "wgmma16.cuh":
            assert cut in text
            text = text.replace(cut, "")
        return without_predicates(header, text)

    (kernel,) = emulator.build([instance(problem, config)], edit)
    x, weight = operands(problem, 3 * config.rows, seed=0)
    with pytest.raises(EmulationError, match=message):
        kernel(x, weight)
