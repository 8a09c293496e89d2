"""Factors written out with zeros, run by the emulator: values, and what is not finite."""

import random
from dataclasses import astuple
from functools import partial

import pytest
from checks import H200, assert_close_to_float64, assert_not_finite_stays, gpu, operands
from cuda_emulator import OnDemand
from packed_kernels import PackedKernel, instances

from ksopt.kernels import registry
from ksopt.kernels.families.base import family_of
from ksopt.kernels.problem import Problem
from ksopt.patterns.chain import Pattern

family = family_of("gather_mma_written_out")

# Rows of whole chunks, of an even number of elements, and of others; one i and several; long sums.
SHAPES = [
    ("bfloat16", (1, 12, 24, 4)),
    ("float16", (5, 9, 10, 2)),
    ("bfloat16", (3, 5, 21, 3)),
    ("float16", (7, 3, 2, 14)),
    ("bfloat16", (2, 40, 130, 2)),
]
BATCHES = (1, 17, 130)


def cases():
    several = []
    for at, (dtype, shape) in enumerate(SHAPES):
        problem = Problem.of_factor(Pattern(*shape), dtype, batch_last=False)
        tiles = [tile for tile in family.configs(problem, gpu(4)) if tile.bm <= 64]
        several += [(problem, tile) for tile in random.Random(at).sample(tiles, 2)]
    return several


CASES = cases()


def build(emulator, several):
    made = emulator.build([one for case in several for one in instances(family, *case)])
    return [PackedKernel(*two) for two in zip(made[0::2], made[1::2], strict=True)]


@pytest.fixture(scope="module")
def kernels(emulator):
    return OnDemand(partial(build, emulator), CASES)


def name(at):
    problem, tile = CASES[at]
    return f"{problem.pattern}-{problem.dtype}-{'x'.join(map(str, astuple(tile)[:11]))}"


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(len(CASES)), ids=name)
def test_results(kernels, at):
    problem, _ = CASES[at]
    for batch in BATCHES:
        x, weight = operands(problem, batch, seed=batch)
        assert_close_to_float64(kernels[at](x, weight), x, weight, problem)
        x = x.contiguous()
        assert_close_to_float64(kernels[at](x, weight), x, weight, problem)


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(len(CASES)), ids=name)
def test_a_stored_zero_spoils_nothing(kernels, at):
    """An infinity of x meets zeros of all other classes."""
    assert_not_finite_stays(kernels[at], CASES[at][0], batch=17, seed=at)


def test_it_is_for_small_d_whose_weights_do_not_become_many():
    for shape, word in (((2, 8, 8, 1), "d = 1"), ((2, 8, 8, 20), "d = 20")):
        problem = Problem.of_factor(Pattern(*shape), "bfloat16", False)
        assert word in family.unsupported_reason(problem, H200)
    problem = Problem.of_factor(Pattern(20, 200, 200, 8), "bfloat16", False)
    for one in registry.ranked(family, problem, 1000, H200):
        assert family.packed_elements(problem, one.tile) <= 8 * problem.pattern.nnz
