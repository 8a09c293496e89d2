"""The batch-last families' index logic and accuracy, run on the CPU by the emulator."""

import random
from collections.abc import Iterator

import pytest
import torch
from checks import assert_close_to_float64, assert_not_finite_stays, gpu, operands
from cuda_emulator import Instance

from ksopt.kernels.families.base import family_of
from ksopt.kernels.families.common.batch_last_mma import Config
from ksopt.kernels.problem import Problem
from ksopt.patterns.chain import Pattern
from ksopt.reference import ks_reference

batch_last_mma16 = family_of("batch_last_mma16")
batch_last_mma_tf32x3 = family_of("batch_last_mma_tf32x3")

SHAPES = [(2, 24, 40, 1), (1, 48, 33, 2), (2, 17, 50, 3), (1, 64, 16, 8)]
FAMILIES = {
    "float16": batch_last_mma16,
    "bfloat16": batch_last_mma16,
    "float32": batch_last_mma_tf32x3,
}
# Rows of x and y start at multiples of 16 bytes in the first ones alone.
ALIGNED = (8, 72, 200)
SHIFTED = (1, 7, 63, 130)


def cases() -> Iterator[tuple[Problem, Config, bool]]:
    """For each shape and dtype, one small random tile, for aligned rows and for all others."""
    draw = random.Random(0)
    for shape in SHAPES:
        for dtype, family in FAMILIES.items():
            problem = Problem.of_factor(Pattern(*shape), dtype, batch_last=True)
            small = [
                c for c in family.configs(problem, gpu(2)) if c.threads <= 192 and c.rows <= 128
            ]
            config = draw.choice(small)
            yield problem, config, False
            yield problem, config, True


CASES = list(cases())


@pytest.fixture(scope="module")
def kernels(emulator):
    return emulator.on_demand(
        [
            Instance(
                problem,
                FAMILIES[problem.dtype].source(problem, config, shifted=shifted),
                FAMILIES[problem.dtype].geometry(problem, config),
            )
            for problem, config, shifted in CASES
        ]
    )


def name(at: int) -> str:
    problem, c, shifted = CASES[at]
    tile = f"{c.warps_k}x{c.warps_m} warps of {c.mt}x{c.nt}, {c.stages} stages of {c.kl}"
    return f"{problem.pattern} {problem.dtype} {tile}{', shifted' if shifted else ''}"


def packed(weight: torch.Tensor) -> torch.Tensor:
    return weight.permute(0, 3, 1, 2).contiguous()


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(len(CASES)), ids=name)
def test_against_float64(kernels, at):
    problem, _, shifted = CASES[at]
    for batch in SHIFTED + ALIGNED[:1] if shifted else ALIGNED:
        x, weight = operands(problem, batch, seed=batch)
        if shifted:
            x = x.contiguous()  # rows start anywhere
        y = kernels[at](x, packed(weight), seed=batch)
        assert_close_to_float64(y, x, weight, problem)


@pytest.mark.sweep
@pytest.mark.parametrize("at", range(len(CASES)), ids=name)
def test_what_is_not_finite_reaches_what_it_met(kernels, at):
    assert_not_finite_stays(
        lambda x, weight: kernels[at](x, packed(weight)), CASES[at][0], batch=ALIGNED[0], seed=at
    )


@pytest.mark.sweep
@pytest.mark.parametrize("at", [i for i, case in enumerate(CASES) if case[2]][::2], ids=name)
def test_any_strides_of_x(kernels, at):
    problem = CASES[at][0]
    x, weight = operands(problem, 2 * 41, seed=1)
    every_other = x[:, ::2]
    y = kernels[at](every_other, packed(weight))
    assert_close_to_float64(y, every_other, weight, problem)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "at", [i for i, case in enumerate(CASES) if case[0].dtype == "float32"][:4], ids=name
)
def test_fp32_values_that_tf32_cannot_split(kernels, at):
    problem = CASES[at][0]
    x, weight = operands(problem, 72, seed=3)
    weight.clamp_(-1, 1)
    weight[0, 0, 0, 0] = float("inf")
    x[0, 3], x[1, 4], x[2, 5] = float("inf"), float("nan"), 3e38
    truth = ks_reference(x.double(), weight.double(), "batch_last").float()
    y = kernels[at](x, packed(weight))
    torch.testing.assert_close(y, truth, rtol=1e-5, atol=1e-5, equal_nan=True)
