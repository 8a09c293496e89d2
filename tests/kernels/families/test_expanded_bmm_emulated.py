"""The kernel behind a product with zeros, run on the CPU by the emulator."""

import pytest
import torch
from checks import assert_close_to_float64, assert_not_finite_stays, operands
from cuda_emulator import Instance

from ksopt.baselines import BASELINES
from ksopt.kernels.families import expanded_bmm
from ksopt.kernels.families.base import family_of
from ksopt.kernels.problem import Problem
from ksopt.patterns.chain import Pattern

SHAPES = [(1, 5, 3, 2), (3, 4, 6, 2), (2, 3, 5, 3), (5, 7, 2, 1), (2, 1, 1, 8), (1, 33, 9, 16)]
CASES = [
    (Problem.of_factor(Pattern(*shape), dtype, last), config)
    for at, shape in enumerate(SHAPES)
    for last in (False, True)
    for dtype in (("float32", "bfloat16", "float16")[(at + last) % 3],)
    for config in family_of("expanded_bmm").configs(
        Problem.of_factor(Pattern(*shape), dtype, last), None
    )
]


def name(at):
    problem, config = CASES[at]
    layout = "last" if problem.batch_last else "first"
    return f"{problem.pattern}-{config.by}-{problem.dtype}-{layout}"


@pytest.fixture(scope="module")
def kernels(emulator):
    return emulator.on_demand(
        [
            Instance(
                problem,
                expanded_bmm.source(problem, config),
                expanded_bmm.geometry(problem.pattern, config),
            )
            for problem, config in CASES
        ]
    )


def spoilt(at, x, weight):
    """The product, zeros and all."""
    problem, config = CASES[at]
    p, last = problem.pattern, problem.batch_last
    baseline = BASELINES[expanded_bmm._WAYS[config.by]]
    return baseline.multiply(x.contiguous(), baseline.prepare(weight, last), p, last).contiguous()


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(len(CASES)), ids=name)
def test_what_zeros_spoil_is_mended(kernels, at):
    problem, _ = CASES[at]
    for batch in (1, 7, 300):
        assert_not_finite_stays(
            lambda x, weight: kernels[at](x, weight, out=spoilt(at, x, weight)),
            problem,
            batch,
            seed=batch,
        )


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(len(CASES)), ids=name)
def test_every_row_that_is_spoilt_is_computed_again(kernels, at):
    problem, _ = CASES[at]
    x, weight = operands(problem, 65, seed=0)
    y = torch.full_like(spoilt(at, x, weight), torch.nan)
    assert_close_to_float64(kernels[at](x, weight, out=y), x, weight, problem)


@pytest.mark.parametrize("at", range(0, len(CASES), 4), ids=name)
def test_what_is_finite_stays_as_it_is(kernels, at):
    problem, _ = CASES[at]
    x, weight = operands(problem, 65, seed=0)
    y = torch.zeros_like(spoilt(at, x, weight))  # not the product: nothing is computed
    assert not kernels[at](x, weight, out=y).any()
    rows = y.T if problem.batch_last else y
    rows[7] = torch.nan
    mended = kernels[at](x, weight, seed=1, out=y)
    mended = mended.T if problem.batch_last else mended
    assert mended[7].any()
    mended[7] = 0
    assert not mended.any()
