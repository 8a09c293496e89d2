"""The 16-bit family whose weights are streamed: its index logic and hand-over, run on the CPU."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from checks import assert_close_to_float64, assert_not_finite_stays, gpu, operands
from cuda_emulator import EmulationError
from packed_kernels import build, on_demand, without_predicates
from test_wgmma16_emulated import MULTIPROCESSORS, PADDED, SHAPES, padded_tiles, problem_of

from ksopt.kernels.families.base import family_of
from ksopt.kernels.families.wgmma16_streamed import Config
from ksopt.kernels.problem import Problem

wgmma16_streamed = family_of("wgmma16_streamed")


def cases() -> Iterator[tuple[Problem, Config]]:
    """For each shape one tile; all ways to share the work among warpgroups take turns."""
    draw = random.Random(0)
    seen: set[tuple[int, ...]] = set()

    def way(c: Config) -> tuple[int, ...]:
        return c.groups_j, c.groups_n, c.groups_m

    for at, shape in enumerate(SHAPES):
        problem = problem_of(shape, "bfloat16" if at % 4 == 3 else "float16")
        candidates = list(wgmma16_streamed.configs(problem, gpu(MULTIPROCESSORS)))
        ways = sorted({way(c) for c in candidates}, key=lambda w: (w in seen, draw.random()))
        seen.add(ways[0])
        config = draw.choice([c for c in candidates if way(c) == ways[0]])
        yield problem, replace(config, stages=draw.choice([2, 3, config.stages]))
    for shape in PADDED:
        problem = problem_of(shape)
        config = draw.choice(padded_tiles(wgmma16_streamed, problem))
        yield problem, replace(config, stages=3)


CASES = list(cases())


@pytest.fixture(scope="module")
def kernels(emulator):
    return on_demand(emulator, wgmma16_streamed, CASES)


def name(at: int) -> str:
    problem, c = CASES[at]
    groups = f"{c.groups_j}x{c.groups_n}x{c.groups_m}w"
    return f"{problem.pattern}-{groups}-{c.nt}n-{c.kl}l-{c.stages}s"


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
def test_any_number_of_blocks_computes_every_tile(kernels, at):
    problem, config = CASES[at]
    x, weight = operands(problem, 4 * config.rows + 3, seed=at)
    results = []
    for blocks in (1, 5):
        few = wgmma16_streamed.geometry(problem, replace(config, max_blocks=blocks))
        results.append(kernels[at].launched_as(few)(x, weight, seed=blocks))
        assert_close_to_float64(results[-1], x, weight, problem)
    assert torch.equal(results[0], results[1])


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("cut", "message"),
    [
        ("full[slot].wait(parity);", "race|nothing wrote|under way"),
        ("empty[slot].wait(parity);", "race|under way|for ever"),
        # A stage is given back before the products have read its weights.
        ("if (!Tile::STREAMED) empty[slot].arrive();", "race|under way|for ever"),
    ],
)
def test_a_missing_wait_is_detected(emulator, cut, message):
    """So the hand-over of stages is really checked."""
    problem = problem_of((2, 16, 32, 16))
    config = Config(2, 1, 1, 2, 16, 2, 1, 1, max_blocks=1)

    def edit(header: str, text: str) -> str:
        if header == "wgmma16.cuh":
            assert cut in text
            text = text.replace(cut, cut[cut.index("empty") :] if "STREAMED" in cut else "")
            if "STREAMED" in cut:
                text = text.replace("        empty[multiplied_slot].arrive();\n", "")
        return without_predicates(header, text)

    (kernel,) = build(emulator, wgmma16_streamed, [(problem, config)], edit)
    x, weight = operands(problem, 3 * config.rows, seed=0)
    with pytest.raises(EmulationError, match=message):
        kernel(x, weight)
