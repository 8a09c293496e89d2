"""The fp32 batch-last family on warpgroup products: its index logic and hand-over, on the CPU."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from checks import assert_close_to_float64, assert_not_finite_stays, gpu, operands
from cuda_emulator import EmulationError
from packed_kernels import build, on_demand, without_predicates

from ksopt.kernels.families.base import family_of
from ksopt.kernels.families.batch_last_wgmma_tf32x3 import Config
from ksopt.kernels.problem import Problem
from ksopt.patterns.chain import Pattern
from ksopt.reference import ks_reference

batch_last_wgmma_tf32x3 = family_of("batch_last_wgmma_tf32x3")

# c has a tail in most of them, and outputs that do not exist in some.
SHAPES = [
    (2, 24, 40, 1),
    (1, 48, 33, 2),
    (2, 17, 50, 3),
    (1, 64, 16, 8),
    (1, 16, 136, 2),  # so long that the tensor cores sum 16 l; half of the last 16 are zeros
    (3, 8, 9, 1),
]
BATCHES = (4, 72, 200)  # rows start at multiples of 16 bytes


def problem_of(shape: tuple[int, int, int, int]) -> Problem:
    return Problem.of_factor(Pattern(*shape), "float32", batch_last=True)


def cases() -> Iterator[tuple[Problem, Config]]:
    """For each shape a tile with resident and one with streamed weights.

    All ways to share the work among warpgroups, and both widths of a thread's columns, take turns.
    """
    draw = random.Random(0)
    seen: set[tuple[int, ...]] = set()

    def way(c: Config) -> tuple[int, ...]:
        return c.groups_n, c.groups_m, c.mt, c.pending, c.resident

    for shape in SHAPES:
        problem = problem_of(shape)
        candidates = list(batch_last_wgmma_tf32x3.configs(problem, gpu(4)))
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
    return on_demand(emulator, batch_last_wgmma_tf32x3, CASES)


def name(at: int) -> str:
    problem, c = CASES[at]
    where = "resident" if c.resident else "streamed"
    return (
        f"{problem.pattern}-{c.groups_n}x{c.groups_m}w-{c.mt}x{c.nt}t-{c.kl}l-{c.stages}s-"
        f"{c.chain}c-{c.pending}p-{where}"
    )


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(len(CASES)), ids=name)
def test_results(kernels, at):
    problem, config = CASES[at]
    for batch in (*BATCHES, config.rows + 4):
        x, weight = operands(problem, batch, seed=batch)
        y = kernels[at](x, weight)
        assert_close_to_float64(y, x, weight, problem)
        assert torch.equal(y, kernels[at](x, weight, seed=1))


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(len(CASES)), ids=name)
def test_what_is_not_finite_reaches_what_it_met(kernels, at):
    assert_not_finite_stays(kernels[at], CASES[at][0], batch=BATCHES[-1], seed=at)


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(len(CASES)), ids=name)
def test_blocks_walk_over_many_tiles_and_columns(kernels, at):
    problem, config = CASES[at]
    x, weight = operands(problem, 2 * config.rows + 8, seed=at)
    results = []
    for groups in (1, 2):
        geometry = batch_last_wgmma_tf32x3.geometry(problem, replace(config, groups=groups))
        results.append(kernels[at].launched_as(geometry)(x, weight, seed=groups))
        assert_close_to_float64(results[-1], x, weight, problem)
    assert torch.equal(results[0], results[1])


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(0, len(CASES), 3), ids=name)
def test_what_tf32_cannot_hold_is_as_in_fp32(kernels, at):
    problem, _ = CASES[at]
    x, weight = operands(problem, 72, seed=3)
    weight.clamp_(-1, 1)
    weight[0, 0, 0, 0] = float("inf")
    x[0, 3], x[1, 4], x[2, 5] = float("inf"), float("nan"), 3e38
    truth = ks_reference(x.double(), weight.double(), "batch_last").float()
    y = kernels[at](x, weight)
    torch.testing.assert_close(y, truth, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_one_product_is_tf32(emulator):
    problem, config = CASES[1]
    tf32 = replace(problem, exact=False)
    (kernel,) = build(emulator, batch_last_wgmma_tf32x3, [(tf32, config)])
    x, weight = operands(problem, 72, seed=5)
    truth = ks_reference(x.double(), weight.double(), "batch_last")
    error = (kernel(x, weight).double() - truth).norm() / truth.norm()
    assert 2**-16 < error < 2**-11


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("resident", "cut", "message"),
    [
        (False, "full[slot].wait(parities >> slot & 1);", "race|nothing wrote|under way"),
        (False, "if (loaded >= Tile::STAGES) wait_for_empty(loaded);", "race|under way|only waits"),
        (False, "named_barrier_arrive(Tile::FIRST_EMPTY + slot, Tile::AT_BARRIER);", "for ever"),
        (False, "stage < loaded; ++stage) wait_for_empty(stage);", "nobody waited|race|for ever"),
        (True, "full[Tile::STAGES].wait(weights_parity);", "race|nothing wrote|under way"),
        (
            True,
            "if (columns++ > 0) named_barrier_sync(Tile::WEIGHTS_EMPTY, Tile::AT_BARRIER);",
            "race|under",
        ),
        (True, "named_barrier_arrive(Tile::WEIGHTS_EMPTY, Tile::AT_BARRIER);", "for ever"),
    ],
)
def test_a_missing_wait_is_detected(emulator, resident, cut, message):
    """So the hand-over of stages and of resident weights is really checked."""
    problem, config = next(
        case for case in CASES if case[1].resident == resident and case[0].pattern.d > 1
    )

    def edit(header: str, text: str) -> str:
        if header == "batch_last_wgmma_tf32x3.cuh":
            assert text.count(cut) == 1
            text = text.replace(cut, "stage < loaded; ++stage) {}" if "; ++stage" in cut else "")
        return without_predicates(header, text)

    (kernel,) = build(emulator, batch_last_wgmma_tf32x3, [(problem, config)], edit)
    x, weight = operands(problem, 8 * config.rows, seed=0)
    alone = batch_last_wgmma_tf32x3.geometry(problem, replace(config, groups=1))
    with pytest.raises(EmulationError, match=message):
        kernel.launched_as(alone)(x, weight)
