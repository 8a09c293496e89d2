"""Kernels for factors of any size and alignment, against float64 and PyTorch on a GPU."""

import random
from typing import Any

import pytest
import torch
from devices import H200, compile_all

from ksopt.kernels.backends import cpu
from ksopt.kernels.families.base import TemplateFamily, family_of
from ksopt.kernels.problem import Problem
from ksopt.patterns.chain import Pattern
from ksopt.reference import ks_reference

ANY_SIZE = tuple(map(family_of, ("gather_mma", "gather_mma_packed")))
FAMILIES = (*ANY_SIZE, family_of("lane_fma"))

pytestmark = pytest.mark.gpu

# Sizes of users' models, and sizes that nothing has: rows at any address, sums short and long.
SHAPES = [
    (1, 50257, 24, 1), (7, 27, 128, 1), (3, 45, 35, 5), (9, 3, 232, 6), (5, 45, 702, 1),
    (80, 30, 7, 1), (1, 544, 377, 3), (3, 8, 1, 380), (120, 4, 1, 14), (1, 40, 115, 97),
    (2, 244, 1, 7), (1, 9, 1001, 19), (5, 20, 168, 4), (1, 57, 264, 1),
    (1, 82, 8, 158), (2, 21, 8, 1033), (6, 5, 2, 57), (1, 16, 19, 266),
]  # fmt: skip
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BATCHES = (1, 7, 64, 1000)
CONFIGS_EACH = 2  # of each family


def problem_of(shape: tuple[int, int, int, int], dtype: torch.dtype) -> Problem:
    return Problem.of_factor(Pattern(*shape), str(dtype).removeprefix("torch."), batch_last=False)


def chosen(
    family: TemplateFamily[Any], shape: tuple[int, int, int, int], dtype: torch.dtype
) -> list[Any]:
    """The best predicted tile, and others at random."""
    problem = problem_of(shape, dtype)
    several = [one for one in family.configs(problem, H200) if family.fits(problem, one, H200)]
    several.sort(key=lambda one: family.predicted_us(problem, one, 1000, H200))
    drawn = random.Random(str(shape)).sample(several, min(CONFIGS_EACH - 1, len(several)))
    return list(dict.fromkeys([several[0], *drawn]))


CASES = [
    (family, shape, dtype)
    for family in FAMILIES
    for shape in SHAPES
    for dtype in DTYPES
    if family.unsupported_reason(problem_of(shape, dtype), H200) is None
]


def case_name(case: tuple[TemplateFamily[Any], tuple[int, int, int, int], torch.dtype]) -> str:
    family, shape, dtype = case
    return f"{family.name}-{shape}-{dtype}"


@pytest.fixture(scope="module", autouse=True)
def compiled_ahead():
    """Compile on all cores; the tests then take the kernels from the cache."""
    jobs = [
        (family, problem_of(shape, dtype), config)
        for family, shape, dtype in CASES
        for config in chosen(family, shape, dtype)
    ]
    compile_all(lambda job: job[0].launcher(*job[1:], 0), jobs)


def relative_error(result: torch.Tensor, truth: torch.Tensor) -> float:
    return float((result.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_as_close_to_float64_as_pytorch(case):
    family, shape, dtype = case
    pattern = Pattern(*shape)
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    x = torch.randn(max(BATCHES), pattern.in_features, generator=generator, device="cuda").to(dtype)
    weight = torch.rand(shape, generator=generator, device="cuda") * 2 - 1
    weight = (weight / pattern.c**0.5).to(dtype)
    truth = ks_reference(x.double(), weight.double())
    # The same rows from an address that is a multiple of nothing but an element.
    memory = torch.empty(x.numel() + 1, dtype=dtype, device="cuda")
    shifted = memory[1:].view_as(x).copy_(x)
    for config in chosen(family, shape, dtype):
        launch = family.launcher(problem_of(shape, dtype), config, 0)
        for batch in BATCHES:
            torch.full((batch * pattern.out_features,), float("nan"), dtype=dtype, device="cuda")
            y = launch(x[:batch], weight)
            theirs = cpu.multiply_by_bmm(x[:batch], weight, False)
            allowed = max(2 * relative_error(theirs, truth[:batch]), 1e-7)
            assert relative_error(y, truth[:batch]) <= allowed, (config, batch)
            assert torch.equal(launch(shifted[:batch], weight), y), (config, batch)


@pytest.mark.parametrize("family", ANY_SIZE, ids=lambda one: one.name)
def test_its_choice_is_known_to_the_host_library_whatever_rows_begin_at(family):
    for shape in ((3, 45, 35, 5), (2, 9, 24, 5)):  # the second with a fallback
        problem = problem_of(shape, torch.bfloat16)
        launch = family.launcher(problem, chosen(family, shape, torch.bfloat16)[0], 0)
        entry = launch.entry()
        if entry is None:
            pytest.skip("there is no host library")
        assert entry.any_rows
