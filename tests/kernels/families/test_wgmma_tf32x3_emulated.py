"""The fp32 family on warpgroup products: its index logic and hand-over, run on the CPU."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from checks import assert_close_to_float64, assert_not_finite_stays, gpu, operands
from cuda_emulator import EmulationError
from packed_kernels import build, on_demand, without_predicates

from ksopt.kernels.families.base import family_of
from ksopt.kernels.families.wgmma_tf32x3 import Config
from ksopt.kernels.problem import Problem
from ksopt.patterns.chain import Pattern
from ksopt.reference import ks_reference

wgmma_tf32x3 = family_of("wgmma_tf32x3")

# A shape for every class of d, whose c has a tail: it is no multiple of the unit of l (8 or 16).
SHAPES = [
    (2, 24, 20, 1),
    (1, 32, 42, 2),
    (2, 24, 36, 3),
    (1, 16, 22, 6),
    (2, 48, 9, 4),
    (1, 32, 17, 8),
    (2, 24, 12, 12),
    (1, 48, 33, 16),
    (1, 16, 136, 4),  # so long that the tensor cores sum 16 l; half of the last 16 are zeros
    (1, 16, 130, 2),
    (2, 44, 20, 1),  # from here on b has no divisors for wide tiles
    (1, 26, 42, 2),
    (2, 20, 36, 3),
    (1, 29, 9, 4),
    (2, 19, 17, 8),
    (1, 57, 33, 16),
    (3, 13, 20, 1),  # groups' results begin at multiples of 4 bytes, of 8, of 4, and of 8
    (2, 11, 42, 2),
    (2, 23, 36, 3),
    (2, 13, 22, 6),
]


def cases() -> Iterator[tuple[Problem, Config]]:
    """For each shape a tile with resident and one with streamed weights.

    All ways to share the work among warpgroups and teams take turns.
    """
    draw = random.Random(0)
    seen: set[tuple[int, ...]] = set()

    def way(c: Config) -> tuple[int, ...]:
        return c.warpgroups_j, c.warpgroups_m, c.teams, c.resident

    for shape in SHAPES:
        problem = Problem.of_factor(Pattern(*shape), "float32", batch_last=False)
        candidates = list(wgmma_tf32x3.configs(problem, gpu(4)))
        longest = max(c.chain for c in candidates)
        for resident in (True, False):
            fitting = [c for c in candidates if c.resident == resident and c.chain == longest]
            ways = sorted({way(c) for c in fitting}, key=lambda w: (w in seen, draw.random()))
            seen.add(ways[0])
            config = draw.choice([c for c in fitting if way(c) == ways[0]])
            yield problem, replace(config, stages=draw.choice([2, 3, config.stages]))


CASES = list(cases())


@pytest.fixture(scope="module")
def kernels(emulator):
    return on_demand(emulator, wgmma_tf32x3, CASES)


def name(at: int) -> str:
    problem, c = CASES[at]
    where = "resident" if c.resident else "streamed"
    team = f"{c.teams}x{c.warpgroups_j}x{c.warpgroups_m}w"
    return f"{problem.pattern}-{team}-{c.nt}n-{c.kl}l-{c.stages}s-{c.chain}c-{where}"


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(len(CASES)), ids=name)
def test_results(kernels, at):
    problem, config = CASES[at]
    for batch in (1, 2 * config.rows + 5):
        x, weight = operands(problem, batch, seed=batch)
        y = kernels[at](x, weight)
        assert_close_to_float64(y, x, weight, problem)
        assert torch.equal(y, kernels[at](x, weight, seed=1))


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(len(CASES)), ids=name)
def test_what_is_not_finite_reaches_what_it_met(kernels, at):
    assert_not_finite_stays(kernels[at], CASES[at][0], batch=37, seed=at)


@pytest.mark.slow
@pytest.mark.parametrize("cached", [0, 2 * 40_960 + 1])
def test_weights_that_no_cache_holds_are_taken_in_parts(emulator, cached):
    """Columns of 32 j and one or two of four tiles of outputs at a time, instead of all 128."""
    problem = Problem.of_factor(Pattern(2, 32, 20, 64), "float32", batch_last=False)
    tiles = wgmma_tf32x3.configs(problem, gpu(4))
    config = next(tile for tile in tiles if not tile.resident and tile.outputs == 8)

    def edit(header: str, text: str) -> str:
        if header == "mma_tf32x3.cuh":
            text, replaced = re.subn(r"(CACHED_WEIGHTS = )32 << 20", rf"\g<1>{cached}", text)
            assert replaced == 1
        return without_predicates(header, text)

    (kernel,) = build(emulator, wgmma_tf32x3, [(problem, config)], edit)
    x, weight = operands(problem, 2 * config.rows + 3, seed=0)
    for blocks in (3, 7):
        geometry = wgmma_tf32x3.geometry(problem, replace(config, max_blocks=blocks))
        y = kernel.launched_as(geometry)(x, weight)
        assert_close_to_float64(y, x, weight, problem)


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(0, len(CASES), 3), ids=name)
def test_blocks_walk_over_many_tiles(kernels, at):
    problem, config = CASES[at]
    x, weight = operands(problem, 4 * config.rows + 3, seed=at)
    columns = config.columns(problem.pattern)
    results = []
    for persistent_ctas in (1, 3):
        geometry = wgmma_tf32x3.geometry(
            problem, replace(config, max_blocks=persistent_ctas * columns)
        )
        results.append(kernels[at].launched_as(geometry)(x, weight, seed=persistent_ctas))
        assert_close_to_float64(results[-1], x, weight, problem)
    assert torch.equal(results[0], results[1])


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(0, len(CASES), 4), ids=name)
def test_what_tf32_cannot_hold_is_as_in_fp32(kernels, at):
    problem, _ = CASES[at]
    x, weight = operands(problem, 5, seed=at)
    for row, value in enumerate((torch.inf, torch.nan, torch.finfo(torch.float32).max)):
        x[row, row] = value
    weight.clamp_(-0.9, 0.9)
    torch.testing.assert_close(
        kernels[at](x, weight), ks_reference(x, weight), rtol=1e-5, atol=1e-5, equal_nan=True
    )


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (
            "full[team * Tile::STAGES + slot].wait(parities >> slot & 1);",
            "race|nothing wrote|under way",
        ),
        ("if (loaded >= Tile::STAGES) wait_for_empty(loaded);", "race|under way|nobody|only waits"),
        ("named_barrier_arrive(Tile::FIRST_EMPTY + slot, Tile::LOADERS + Tile::TEAM);", "for ever"),
        ("stage < loaded; ++stage) wait_for_empty(stage);", "nobody waited|race"),
    ],
)
def test_a_missing_wait_is_detected(emulator, cut, message):
    """So the hand-over of stages is really checked."""
    problem, config = next(case for case in CASES if not case[1].resident)

    def edit(header: str, text: str) -> str:
        if header == "wgmma_tf32x3.cuh":
            assert text.count(cut) == 1
            text = text.replace(cut, "stage < loaded; ++stage);" if cut.startswith("stage") else "")
        return without_predicates(header, text)

    (kernel,) = build(emulator, wgmma_tf32x3, [(problem, config)], edit)
    x, weight = operands(problem, 8 * config.rows, seed=0)
    few = wgmma_tf32x3.geometry(
        problem, replace(config, max_blocks=config.columns(problem.pattern))
    )
    with pytest.raises(EmulationError, match=message):
        kernel.launched_as(few)(x, weight)
