"""The 16-bit families on warpgroup products, against float64 and against PyTorch."""

import random
from dataclasses import replace

import pytest
import torch
from devices import H200, compile_all

from ksopt.kernels.backends import cpu
from ksopt.kernels.families.base import TemplateFamily, family_of
from ksopt.kernels.families.wgmma16 import Config
from ksopt.kernels.problem import Problem
from ksopt.patterns.chain import Pattern
from ksopt.reference import ks_reference

wgmma16 = family_of("wgmma16")
wgmma16_streamed = family_of("wgmma16_streamed")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="warpgroup products need compute capability 9.0",
    ),
]

# Every class of d; c with and without a tail; one and several tiles of outputs.
SHAPES = [
    (1, 48, 52, 2), (1, 96, 96, 3), (3, 128, 128, 4), (1, 48, 192, 6),
    (4, 64, 40, 8), (2, 48, 36, 12), (3, 96, 96, 16), (1, 64, 64, 24), (1, 128, 100, 32),
    (1, 192, 192, 16), (2, 48, 48, 64),
    # b without divisors for wide tiles, and groups whose results begin at odd addresses.
    (1, 232, 96, 4), (1, 104, 52, 2), (2, 37, 24, 3), (3, 21, 22, 4), (1, 33, 20, 8),
    (2, 29, 100, 16),
]  # fmt: skip
BATCHES = (1, 7, 63, 64, 1000, 4133)
CONFIGS_EACH = 4
FAMILIES = (wgmma16, wgmma16_streamed)
JOBS = [
    (family, shape, dtype)
    for family in FAMILIES
    for shape in SHAPES
    for dtype in ("float16", "bfloat16")
]


def problem_of(shape: tuple[int, int, int, int], dtype: str) -> Problem:
    return Problem.of_factor(Pattern(*shape), dtype, batch_last=False)


def chosen(family: TemplateFamily, shape: tuple[int, int, int, int], dtype: str) -> list[Config]:
    candidates = list(family.configs(problem_of(shape, dtype), H200))
    return random.Random(f"{shape} {dtype}").sample(candidates, min(CONFIGS_EACH, len(candidates)))


@pytest.fixture(scope="module", autouse=True)
def compiled_ahead():
    """Compile on all cores; the tests then take the kernels from the cache."""
    every = [(job[0], problem_of(*job[1:]), config) for job in JOBS for config in chosen(*job)]
    compile_all(lambda one: one[0].launcher(*one[1:], 0), every)


def operands(problem: Problem, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(batch)
    dtype, p = getattr(torch, problem.dtype), problem.pattern
    x = torch.randn(batch, p.in_features, generator=generator, device="cuda").to(dtype)
    weight = torch.randn(p.weight_shape, generator=generator, device="cuda") / p.c**0.5
    return x, weight.to(dtype)


def relative_error(result: torch.Tensor, truth: torch.Tensor) -> float:
    return float((result.double() - truth).norm() / truth.norm())


def name(value: object) -> str:
    return value.name if isinstance(value, TemplateFamily) else str(value)


@pytest.mark.parametrize(("family", "shape", "dtype"), JOBS, ids=name)
def test_as_close_to_float64_as_pytorch(family, shape, dtype):
    problem = problem_of(shape, dtype)
    x, weight = operands(problem, max(BATCHES))
    truth = ks_reference(x.double(), weight.double())
    theirs = relative_error(cpu.multiply_by_bmm(x, weight, False), truth)
    for config in chosen(family, shape, dtype):
        launch = family.launcher(problem, config, 0)
        for batch in BATCHES:
            torch.full((batch, truth.shape[1]), torch.nan, device="cuda").to(x.dtype)  # freed: y's
            error = relative_error(launch(x[:batch], weight), truth[:batch])
            # The last rounding decides, and is the same; a few rows scatter around the mean.
            slack = 1.02 if batch == max(BATCHES) else 1.3
            assert error <= slack * theirs, (config, batch, error, theirs)


@pytest.mark.parametrize("family", FAMILIES, ids=name)
@pytest.mark.parametrize("shape", [(1, 64, 64, 16), (3, 96, 96, 16), (3, 128, 128, 4)], ids=str)
def test_repeated_launches_agree(family, shape):
    """Stages, weights and slices change hands without a race that the emulator could not see."""
    problem = problem_of(shape, "float16")
    x, weight = operands(problem, 25_088)
    for config in chosen(family, shape, "float16"):
        launch = family.launcher(problem, config, 0)
        first = launch(x, weight)
        for _ in range(20):
            assert torch.equal(launch(x, weight), first), config


@pytest.mark.parametrize("family", FAMILIES, ids=name)
def test_few_blocks_change_their_weights_on_the_way(family):
    problem = problem_of((3, 96, 96, 16), "float16")
    x, weight = operands(problem, 2000)
    truth = ks_reference(x.double(), weight.double())
    config = chosen(family, (3, 96, 96, 16), "float16")[0]
    for teams in (1, 2, 7):
        few = replace(config, max_blocks=teams * config.team(problem.pattern))
        assert relative_error(family.launcher(problem, few, 0)(x, weight), truth) < 4e-4


@pytest.mark.parametrize("family", FAMILIES, ids=name)
def test_operands_unfit_for_vectors_take_another_way(family):
    problem = problem_of((1, 64, 64, 16), "float16")
    x, weight = operands(problem, 65)
    launch = family.launcher(problem, chosen(family, (1, 64, 64, 16), "float16")[0], 0)
    truth = ks_reference(x.double(), weight.double())
    shifted = torch.empty(x.numel() + 1, device="cuda", dtype=x.dtype)[1:].view(x.shape).copy_(x)
    assert relative_error(launch(shifted, weight), truth) < 4e-4
    wider = torch.empty(x.shape[0], x.shape[1] + 4, device="cuda", dtype=x.dtype)[:, :-4].copy_(x)
    assert relative_error(launch(wider, weight), truth) < 4e-4
    apart = weight.transpose(1, 2).contiguous().transpose(1, 2)
    assert relative_error(launch(x, apart), truth) < 4e-4
