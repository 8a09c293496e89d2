"""The fp32 tensor-core family for batch first, against float64 and against cuBLAS in FP32."""

import random
from dataclasses import replace

import pytest
import torch
from devices import H200, compile_all

from ksopt.kernels.backends import cpu
from ksopt.kernels.families.base import family_of
from ksopt.kernels.families.mma_tf32x3 import Config as MmaTf32x3Config
from ksopt.kernels.families.wgmma_tf32x3 import Config as WgmmaTf32x3Config
from ksopt.kernels.problem import Problem
from ksopt.patterns.chain import Pattern
from ksopt.reference import ks_reference

mma_tf32x3 = family_of("mma_tf32x3")
wgmma_tf32x3 = family_of("wgmma_tf32x3")

pytestmark = pytest.mark.gpu

# Every class of d, resident and streamed weights, c with and without a tail. Two have weights that
# are too large for the L2 cache.
SHAPES = [
    (2, 64, 64, 1), (1, 48, 52, 2), (1, 96, 96, 3), (1, 48, 192, 6), (4, 64, 64, 4),
    (1, 128, 512, 8), (2, 48, 36, 12), (4, 64, 64, 16), (1, 1024, 256, 4), (1, 96, 384, 24),
    (1, 512, 256, 48), (1, 256, 512, 64),
    # b without divisors for wide tiles, and groups whose results begin at odd addresses.
    (1, 232, 96, 4), (2, 104, 64, 1), (3, 13, 36, 2), (1, 23, 64, 3), (2, 129, 168, 1),
    (1, 33, 48, 8),
]  # fmt: skip
BATCHES = (1, 7, 64, 1000)
CONFIGS_EACH = 4


def problem_of(shape: tuple[int, int, int, int]) -> Problem:
    return Problem.of_factor(Pattern(*shape), "float32", batch_last=False)


Config = MmaTf32x3Config | WgmmaTf32x3Config


def chosen(shape: tuple[int, int, int, int]) -> list[Config]:
    """Tiles of both families, or of the first alone where there are no warpgroup products."""
    draw = random.Random(str(shape))
    configs: list[Config] = []
    hopper = torch.cuda.get_device_capability()[0] == 9
    for family in (mma_tf32x3, wgmma_tf32x3) if hopper else (mma_tf32x3,):
        candidates = list(family.configs(problem_of(shape), H200))
        streamed = [c for c in candidates if not c.resident]
        resident = [c for c in candidates if c.resident] or streamed
        configs += draw.sample(resident, CONFIGS_EACH // 2)
        configs += draw.sample(streamed, CONFIGS_EACH // 2)
    return configs


@pytest.fixture(scope="module", autouse=True)
def compiled_ahead():
    """Compile on all cores; the tests then take the kernels from the cache."""
    jobs = [(shape, c, exact) for shape in SHAPES for c in chosen(shape) for exact in (True, False)]
    compile_all(lambda job: launcher_of(*job), jobs)


def launcher_of(shape, config: Config, exact=True):
    family = mma_tf32x3 if isinstance(config, MmaTf32x3Config) else wgmma_tf32x3
    return family.launcher(replace(problem_of(shape), exact=exact), config, 0)


def operands(shape: tuple[int, int, int, int], batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(sum(shape) + batch)
    pattern = Pattern(*shape)
    x = torch.randn(batch, pattern.in_features, generator=generator, device="cuda")
    weight = torch.rand(shape, generator=generator, device="cuda") * 2 - 1
    return x, weight / pattern.c**0.5


def relative_error(result: torch.Tensor, truth: torch.Tensor) -> float:
    return float((result.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_close_to_float64_as_cublas(shape):
    x, weight = operands(shape, max(BATCHES))
    truth = ks_reference(x.double(), weight.double())
    theirs = relative_error(cpu.multiply_by_bmm(x, weight, False), truth)
    for config in chosen(shape):
        launch = launcher_of(shape, config)
        for batch in BATCHES:
            torch.full((batch, truth.shape[1]), torch.nan, device="cuda")  # freed: y's memory
            ours = launch(x[:batch], weight)
            error = relative_error(ours, truth[:batch])
            # A few outputs scatter around the mean error; all rows together may not exceed it.
            slack = 1.0 if batch == max(BATCHES) else 1.3
            assert error <= slack * theirs, (config, batch, error, theirs)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_product_is_as_close_as_cublas_with_tf32(shape):
    x, weight = operands(shape, 500)
    truth = ks_reference(x.double(), weight.double())
    for config in chosen(shape):
        error = relative_error(launcher_of(shape, config, exact=False)(x, weight), truth)
        # Each factor is rounded to 11 bits: 2^-12 at most, about 0.6 of it on average (twice).
        assert 1e-5 < error < 4e-4, (config, error)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_that_tf32_cannot_hold(shape):
    x, weight = operands(shape, 300)
    weight = weight.clamp(-0.9, 0.9)
    weight[0, 0, 0, 0] = 0.5  # its rest is zero, and infinity times zero is NaN
    largest = torch.finfo(torch.float32).max
    for row, value in enumerate((torch.inf, -torch.inf, torch.nan, largest, -largest, 1e-40)):
        x[row, (7 * row) % x.shape[1]] = value
    x[6] = torch.inf
    expected = ks_reference(x, weight)
    assert torch.isinf(expected).any()
    assert torch.isnan(expected).any()
    for config in chosen(shape):
        result = launcher_of(shape, config)(x, weight)
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("scale", [1e-30, 1e-19, 1e18, 1e30])
def test_very_small_and_very_large_values(scale):
    shape = (4, 64, 64, 4)
    x, weight = operands(shape, 1000)
    x = x * scale
    weight = weight * (1.0 if abs(scale) > 1 else 1e-8)
    truth = ks_reference(x.double(), weight.double())
    theirs = (cpu.multiply_by_bmm(x, weight, False).double() - truth).norm()
    for config in chosen(shape):
        ours = (launcher_of(shape, config)(x, weight).double() - truth).norm()
        # Where results are subnormal, half their spacing of 2^-149 is all that fp32 can promise.
        spacing = 2.0**-149 * truth.numel() ** 0.5
        assert ours <= theirs + 4 * spacing, (config, ours, theirs)


def test_operands_unfit_for_vectors_take_the_general_kernel():
    shape = (4, 64, 64, 4)
    x, weight = operands(shape, 65)
    launch = launcher_of(shape, chosen(shape)[0])
    truth = ks_reference(x.double(), weight.double())
    shifted = torch.empty(x.numel() + 1, device="cuda")[1:].view(x.shape).copy_(x)
    assert relative_error(launch(shifted, weight), truth) < 5e-7
    assert (
        relative_error(launch(x, weight.transpose(1, 2).contiguous().transpose(1, 2)), truth) < 5e-7
    )
