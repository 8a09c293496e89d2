"""The general kernel's index logic, run on the CPU by the emulator."""

import pytest
import torch
from checks import assert_close_to_float64, assert_not_finite_stays, operands
from cuda_emulator import Instance

from ksopt.kernels.families.base import family_of
from ksopt.kernels.problem import Problem
from ksopt.patterns.chain import Pattern

naive = family_of("naive")

FOLDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 40, 48)
SHAPES = [(1, 17, 9, 1), (2, 5, 33, 2), (1, 65, 3, 3), (3, 1, 1, 5)]
SHAPES += [(2, 3 + d % 5, 5 + d % 7, d) for d in FOLDS]
BATCHES = (1, 7, 17, 63, 130)

# Every shape in both layouts; the element types take turns.
PROBLEMS = [
    Problem.of_factor(Pattern(*shape), list(naive.dtypes)[(at + last) % 3], last)
    for at, shape in enumerate(SHAPES)
    for last in (False, True)
]


def instance(problem: Problem) -> Instance:
    config = naive.default_config(problem)
    return Instance(problem, naive.source(problem, config), naive.geometry(problem, config))


@pytest.fixture(scope="module")
def kernels(emulator):
    return dict(zip(PROBLEMS, emulator.build([instance(p) for p in PROBLEMS]), strict=True))


def name(problem: Problem) -> str:
    return f"{problem.pattern}-{problem.dtype}-{'last' if problem.batch_last else 'first'}"


@pytest.mark.sweep
@pytest.mark.parametrize("problem", PROBLEMS, ids=name)
def test_results(kernels, problem):
    for batch in BATCHES:
        x, weight = operands(problem, batch, seed=batch)
        y = kernels[problem](x, weight)
        assert_close_to_float64(y, x, weight, problem)
    assert torch.equal(y, kernels[problem](x, weight, seed=1)), "it depends on the order of threads"


@pytest.mark.sweep
@pytest.mark.parametrize("problem", PROBLEMS, ids=name)
def test_what_is_not_finite_reaches_what_it_met(kernels, problem):
    assert_not_finite_stays(kernels[problem], problem, batch=BATCHES[-1], seed=0)


@pytest.mark.parametrize("problem", PROBLEMS[::5], ids=name)
def test_strides(kernels, problem):
    x, weight = operands(problem, 29, seed=0)
    last, (slow, fast) = problem.batch_last, x.shape
    spread = torch.full((2 * slow, 3 * fast), float("nan"), dtype=x.dtype)
    spread[::2, ::3] = x
    shifted = torch.empty(slow * fast + 1, dtype=x.dtype)
    shifted[1:] = x.reshape(-1)
    views = {
        "both strides": spread[::2, ::3],
        "the other layout's memory": x.T.contiguous().T,
        "misaligned": shifted[1:].view(slow, fast),
        "one row for all": x[:, :1].expand(slow, fast) if last else x[:1].expand(slow, fast),
    }
    weights = {
        "contiguous": weight,
        "permuted": weight.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2),
    }
    for x_view in views.values():
        for w in weights.values():
            assert_close_to_float64(kernels[problem](x_view, w), x_view, w, problem)


def test_several_batch_dimensions(kernels):
    problem = PROBLEMS[2]
    x, weight = operands(problem, 30, seed=3)
    y = kernels[problem](x.view(5, 6, -1), weight)
    assert torch.equal(y.view(30, -1), kernels[problem](x, weight))
