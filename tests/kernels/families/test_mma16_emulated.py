"""The 16-bit tensor-core family's packing and index logic, run on the CPU by the emulator."""

from collections.abc import Iterator
from dataclasses import asdict, replace

import pytest
import torch
from checks import Tiles, assert_close_to_float64, assert_not_finite_stays, gpu, operands
from cuda_emulator import EmulationError, Instance

from ksopt.kernels.families.base import family_of
from ksopt.kernels.families.mma16 import Config
from ksopt.kernels.problem import Problem
from ksopt.patterns.chain import Pattern

mma16 = family_of("mma16")

# A shape for every class of d, whose c has a tail: it is no multiple of the unit of l (16 or 32).
SHAPES = [
    (2, 24, 48, 1),
    (1, 48, 168, 1),
    (2, 24, 20, 2),
    (1, 48, 84, 2),
    (1, 48, 40, 3),
    (2, 24, 72, 3),
    (2, 48, 18, 4),
    (1, 96, 90, 4),
    (2, 24, 20, 6),
    (1, 48, 40, 6),
    (2, 24, 18, 12),
    (1, 16, 50, 12),
    (2, 48, 21, 8),
    (1, 64, 85, 8),
    (1, 48, 33, 16),
    (2, 32, 7, 16),
    (2, 24, 18, 24),
    (1, 32, 5, 40),
    (1, 24, 40, 48),
    (2, 40, 24, 1),  # from here on b has no divisors for wide tiles
    (1, 20, 20, 2),
    (2, 26, 18, 4),
    (1, 28, 20, 6),
    (2, 33, 21, 8),
    (3, 13, 24, 1),  # groups' results begin at multiples of 2 bytes, of 4, of 8, and of 2
    (2, 11, 20, 2),
    (3, 5, 18, 4),
    (2, 23, 40, 3),
]
BATCHES = (1, 7, 17, 63)
CONFIGS_EACH = 2
OF_TEMPLATE = ("warps_j", "warps_m", "warps_n", "mt", "nt", "kl", "stages")


def cases() -> Iterator[tuple[Problem, Config]]:
    """For each shape, tiles that have most values no earlier case had."""
    tiles = Tiles(OF_TEMPLATE)
    for at, shape in enumerate(SHAPES):
        for turn in range(CONFIGS_EACH):
            dtype = list(mma16.dtypes)[(at + turn) % 2]
            problem = Problem.of_factor(Pattern(*shape), dtype, batch_last=False)
            candidates = list(mma16.configs(problem, gpu(4)))
            yield problem, tiles.draw(candidates)


# The template takes more than `configs` gives it: outputs that do not divide b, stages that do not
# divide c.
UNEVEN = [
    ((2, 40, 40, 8), (1, 2, 3, 1, 1, 32, 3, 1, 2)),
    ((2, 40, 18, 16), (2, 2, 1, 1, 2, 48, 4, 1, 2)),
    ((2, 40, 72, 3), (1, 2, 2, 1, 2, 64, 3, 1, 2)),
    ((2, 40, 20, 2), (1, 2, 3, 2, 1, 48, 3, 1, 2)),
]
CASES = list(cases())
CASES += [
    (Problem.of_factor(Pattern(*shape), "float16", False), Config(*tile)) for shape, tile in UNEVEN
]


def instance(problem: Problem, config: Config) -> Instance:
    return Instance(problem, mma16.source(problem, config), mma16.geometry(problem, config))


@pytest.fixture(scope="module")
def kernels(emulator):
    return emulator.on_demand([instance(*case) for case in CASES])


def name(at: int) -> str:
    problem, c = CASES[at]
    tile = f"{c.warps_j}x{c.warps_m}x{c.warps_n}w-{c.mt}x{c.nt}-{c.kl}l-{c.stages}s"
    return f"{problem.pattern}-{problem.dtype}-{tile}"


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(len(CASES)), ids=name)
def test_results(kernels, at):
    problem, config = CASES[at]
    for batch in (*BATCHES, 2 * config.rows + 5):
        x, weight = operands(problem, batch, seed=batch)
        y = kernels[at](x, weight)
        assert_close_to_float64(y, x, weight, problem)
    assert torch.equal(y, kernels[at](x, weight, seed=1)), "it depends on the order of threads"


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(len(CASES)), ids=name)
def test_what_is_not_finite_reaches_what_it_met(kernels, at):
    assert_not_finite_stays(kernels[at], CASES[at][0], batch=17, seed=at)


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(0, len(CASES), 3), ids=name)
def test_blocks_walk_over_many_tiles(kernels, at):
    problem, config = CASES[at]
    x, weight = operands(problem, 5 * config.rows + 3, seed=at)
    results = []
    for persistent_ctas in (1, 2, 4):
        geometry = mma16.geometry(problem, replace(config, persistent_ctas=persistent_ctas))
        kernel = kernels[at].launched_as(geometry)
        results.append(kernel(x, weight, seed=persistent_ctas))
        assert_close_to_float64(results[-1], x, weight, problem)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_the_cases_differ_in_every_template_argument():
    for field in OF_TEMPLATE:
        assert len({asdict(config)[field] for _, config in CASES}) >= 2, field


def test_operands_that_are_not_aligned_are_an_error_of_the_caller(kernels):
    problem, _ = CASES[0]
    x, weight = operands(problem, 17, seed=0)
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)
    with pytest.raises(EmulationError, match="multiple of its size"):
        kernels[0](shifted, weight)
