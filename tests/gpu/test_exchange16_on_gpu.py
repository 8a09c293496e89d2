"""16-bit products over clusters, against float64 and against PyTorch."""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from ksopt.kernels import cpu, exchange16
from ksopt.kernels.problem import Problem
from ksopt.pattern import Pattern
from ksopt.reference import ks_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="warpgroup products need compute capability 9.0",
    ),
]

# Every size of cluster; b and c with and without a tail; one and several tiles of outputs.
SHAPES = [
    (3, 128, 128, 4), (2, 72, 40, 4), (2, 192, 768, 4), (2, 64, 96, 8), (1, 264, 136, 8),
    (1, 96, 96, 16), (2, 384, 96, 16), (1, 128, 512, 24), (1, 200, 72, 32), (3, 96, 384, 16),
    (1, 256, 256, 64),
]  # fmt: skip
BATCHES = (1, 7, 63, 64, 1000, 4133)
CONFIGS_EACH = 5
JOBS = [(shape, dtype) for shape in SHAPES for dtype in ("float16", "bfloat16")]


def problem_of(shape: tuple[int, int, int, int], dtype: str) -> Problem:
    return Problem(Pattern(*shape), dtype, batch_last=False)


def chosen(shape: tuple[int, int, int, int], dtype: str) -> list[exchange16.Config]:
    """The best predicted tile, and random ones."""
    problem = problem_of(shape, dtype)
    candidates = sorted(
        exchange16.configs(problem, 132),
        key=lambda c: exchange16.predicted_us(problem.pattern, c, max(BATCHES), 132),
    )
    drawn = random.Random(f"{shape} {dtype}").sample(candidates, CONFIGS_EACH - 1)
    return list(dict.fromkeys([candidates[0], *drawn]))


@pytest.fixture(scope="module", autouse=True)
def compiled_ahead():
    """Compile on all cores; the tests then take the kernels from the cache."""
    with ThreadPoolExecutor(16) as pool:
        every = [(problem_of(*job), config) for job in JOBS for config in chosen(*job)]
        list(pool.map(lambda one: exchange16.launcher(*one, 0), every))


def operands(problem: Problem, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(batch)
    dtype, p = getattr(torch, problem.dtype), problem.pattern
    x = torch.randn(batch, p.in_features, generator=generator, device="cuda").to(dtype)
    weight = torch.randn(p.weight_shape, generator=generator, device="cuda") / p.c**0.5
    return x, weight.to(dtype)


def relative_error(result: torch.Tensor, truth: torch.Tensor) -> float:
    return float((result.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize(("shape", "dtype"), JOBS, ids=str)
def test_as_close_to_float64_as_pytorch(shape, dtype):
    problem = problem_of(shape, dtype)
    x, weight = operands(problem, max(BATCHES))
    truth = ks_reference(x.double(), weight.double())
    theirs = relative_error(cpu.multiply_by_bmm(x, weight, False), truth)
    for config in chosen(shape, dtype):
        launch = exchange16.launcher(problem, config, 0)
        for batch in BATCHES:
            torch.full((batch, truth.shape[1]), torch.nan, device="cuda").to(x.dtype)  # freed: y's
            error = relative_error(launch(x[:batch], weight), truth[:batch])
            # The last rounding decides, and is the same; a few rows scatter around the mean.
            slack = 1.02 if batch == max(BATCHES) else 1.3
            assert error <= slack * theirs, (config, batch, error, theirs)


@pytest.mark.parametrize(
    "shape", [(3, 128, 128, 4), (2, 64, 96, 8), (2, 384, 96, 16), (1, 256, 256, 64)], ids=str
)
def test_repeated_launches_agree(shape):
    """Stages and slices change hands without a race that the emulator could not see."""
    problem = problem_of(shape, "float16")
    x, weight = operands(problem, 25_088)
    for config in chosen(shape, "float16"):
        launch = exchange16.launcher(problem, config, 0)
        first = launch(x, weight)
        for _ in range(20):
            assert torch.equal(launch(x, weight), first), config


def test_any_number_of_clusters():
    problem = problem_of((2, 384, 96, 16), "float16")
    x, weight = operands(problem, 2000)
    truth = ks_reference(x.double(), weight.double())
    config = chosen((2, 384, 96, 16), "float16")[0]
    for clusters in (1, 2, 7, 16, 40):
        other = replace(config, clusters=clusters)
        assert relative_error(exchange16.launcher(problem, other, 0)(x, weight), truth) < 4e-4


def test_rows_apart_and_rows_that_are_not_aligned():
    problem = problem_of((1, 96, 96, 16), "float16")
    x, weight = operands(problem, 65)
    launch = exchange16.launcher(problem, chosen((1, 96, 96, 16), "float16")[0], 0)
    truth = ks_reference(x.double(), weight.double())
    shifted = torch.empty(x.numel() + 1, device="cuda", dtype=x.dtype)[1:].view(x.shape).copy_(x)
    apart = torch.empty(65, x.shape[1] + 8, device="cuda", dtype=x.dtype)[:, :-8].copy_(x)
    for given in (shifted, apart, x.view(5, 13, -1)):
        y = launch(given, weight).reshape(truth.shape)
        assert relative_error(y, truth) < 4e-4
    strided = weight.transpose(1, 2).contiguous().transpose(1, 2)
    assert relative_error(launch(x, strided), truth) < 4e-4


def test_a_changed_weight_is_packed_anew():
    problem = problem_of((3, 128, 128, 4), "bfloat16")
    x, weight = operands(problem, 200)
    launch = exchange16.launcher(problem, chosen((3, 128, 128, 4), "bfloat16")[0], 0)
    before = launch(x, weight)
    weight.mul_(-2)
    assert torch.equal(launch(x, weight), -2 * before)
