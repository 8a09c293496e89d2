"""The batch-last tensor-core families against float64: tiles, tails, alignments, strides."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from devices import H200, compile_all

from ksopt.jit import arch, nvrtc
from ksopt.kernels.backends import cpu
from ksopt.kernels.families.base import family_of
from ksopt.kernels.problem import Problem
from ksopt.patterns.chain import Pattern
from ksopt.reference import ks_reference

batch_last_mma16 = family_of("batch_last_mma16")
batch_last_mma_tf32x3 = family_of("batch_last_mma_tf32x3")
batch_last_wgmma16 = family_of("batch_last_wgmma16")
batch_last_wgmma_tf32x3 = family_of("batch_last_wgmma_tf32x3")

pytestmark = pytest.mark.gpu

CASES = {
    "float16": (batch_last_mma16, "float16"),
    "bfloat16": (batch_last_mma16, "bfloat16"),
    "float16, Hopper": (batch_last_wgmma16, "float16"),
    "bfloat16, Hopper": (batch_last_wgmma16, "bfloat16"),
    "float32": (batch_last_mma_tf32x3, "float32"),
    "float32, Hopper": (batch_last_wgmma_tf32x3, "float32"),
}
HOPPER = (batch_last_wgmma16, batch_last_wgmma_tf32x3)
# Both are sums of the same products in fp32, rounded once to the storage type: only the order of
# summation differs, so ours may be no further from float64 than twice what cuBLAS gives.
ALLOWED_RATIO = 2.0
# Three TF32 products drop what is below 2^-22 of a product; where c is small, cuBLAS's fp32 sums
# are more exact than that, and ours need not be.
ALLOWED_ERROR = {"float16": 0.0, "bfloat16": 0.0, "float32": 2.5e-7}


def skip_unless_it_runs_here(family):
    if family in HOPPER and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("warpgroup products exist on sm_90 alone")


@pytest.fixture(params=CASES)
def case(request):
    """A family and a dtype that it takes."""
    family, dtype = CASES[request.param]
    skip_unless_it_runs_here(family)
    return family, dtype


def tiles(family, problem, count, seed=0):
    """Some tiles of a family: random ones, and those with the fewest and most outputs."""
    every = sorted(family.configs(problem, H200), key=lambda c: (c.outputs, c.rows))
    chosen = [every[0], every[-1], *random.Random(seed).sample(every, min(count, len(every)))]
    return list(dict.fromkeys(chosen))[:count]


def draw(sizes, dtype, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(sizes, generator=generator, device="cuda").to(getattr(torch, dtype))


def poison(elements, dtype):
    """Fill memory that the allocator will hand out next with NaN, then free it."""
    torch.full((elements,), float("nan"), dtype=getattr(torch, dtype), device="cuda")


def relative_error(result, truth):
    return float((result.double() - truth).norm() / truth.norm())


def assert_as_good_as_bmm(launch, x, weight, words):
    dtype = str(x.dtype).removeprefix("torch.")
    truth = ks_reference(x.double(), weight.double(), "batch_last")
    theirs = relative_error(cpu.multiply_by_bmm(x, weight, True), truth)
    poison(truth.numel(), dtype)
    y = launch(x, weight)
    assert y.shape == truth.shape, words
    assert y.is_contiguous(), words
    error = relative_error(y, truth)
    allowed = max(ALLOWED_RATIO * theirs, ALLOWED_ERROR[dtype])
    assert error <= allowed, f"{words}: {error:.2e} against bmm's {theirs:.2e}"


SHAPES = [
    (1, 48, 48, 1),
    (3, 64, 64, 6),
    (2, 128, 128, 3),
    (1, 192, 48, 12),
    (1, 48, 192, 16),
    (2, 96, 384, 2),
    (1, 256, 256, 4),
    (1, 512, 128, 2),
    (1, 1024, 256, 1),
    (1, 17, 33, 5),
    (2, 40, 100, 3),
    (5, 1, 16, 2),
    (1, 1, 1, 1),
    (24, 64, 64, 8),
]


@pytest.fixture(scope="module", autouse=True)
def compiled_ahead():
    """Compile what most tests need on all cores; they then take it from the cache."""
    target = arch.of_device(0)
    sources = []
    for shape, (family, dtype) in itertools.product(SHAPES, CASES.values()):
        if family in HOPPER and target != "sm_90a":
            continue
        problem = Problem.of_factor(Pattern(*shape), dtype, batch_last=True)
        for config in tiles(family, problem, 3, seed=sum(shape)):
            sources.append(family.source(problem, config))
            if family not in HOPPER:
                sources.append(family.source(problem, config, shifted=True))
            if family is batch_last_wgmma_tf32x3:
                sources.append(family.pack_source(problem, config))
        if family not in HOPPER:
            default = family.default_config(problem, H200)
            sources.append(family.source(problem, default, shifted=True))
    compile_all(lambda source: nvrtc.cubin(source, target), sources)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tiles_and_batches(case, shape):
    family, dtype = case
    pattern = Pattern(*shape)
    problem = Problem.of_factor(pattern, dtype, batch_last=True)
    weight = draw(shape, dtype, 1)
    for config in tiles(family, problem, 3, seed=sum(shape)):
        launch = family.launcher(problem, config, 0)
        for batch in (1, 7, 8, 63, 64, 200, 1000, 3001, 5000):
            x = draw((pattern.in_features, batch), dtype, batch)
            assert_as_good_as_bmm(launch, x, weight, f"{pattern} batch {batch} {config}")


@pytest.mark.parametrize("shape", [(2, 48, 50, 3), (1, 64, 64, 4), (2, 64, 32, 1)], ids=str)
def test_strides_and_alignments(case, shape):
    family, dtype = case
    pattern = Pattern(*shape)
    problem = Problem.of_factor(pattern, dtype, batch_last=True)
    features, batch = pattern.in_features, 328
    inputs = {
        f"offset by {shift}": draw((features * batch + shift,), dtype, 2)[shift:].view(
            features, batch
        )
        for shift in (1, 2, 4, 8)
    }
    inputs |= {
        f"rows {gap} further apart": draw((features, batch + gap), dtype, 3)[:, :batch]
        for gap in (1, 2, 4, 8)
    }
    inputs |= {
        "every third row of the batch": draw((features, 3 * batch), dtype, 4)[:, ::3],
        "every other feature": draw((2 * features, batch), dtype, 5)[::2],
        "batch first in memory": draw((batch, features), dtype, 6).T,
        "one input broadcast": draw((features, 1), dtype, 7).expand(features, batch),
        "two batch dims": draw((features, 8, 41), dtype, 8),
        "two batch dims, not collapsible": draw((features, 41, 8), dtype, 9).transpose(1, 2),
    }
    weights = {
        "contiguous": draw(shape, dtype, 10),
        "transposed": draw((shape[3], *shape[:3]), dtype, 11).permute(1, 2, 3, 0),
        "misaligned": draw((pattern.nnz + 1,), dtype, 12)[1:].view(shape),
    }
    for config in tiles(family, problem, 3):
        launch = family.launcher(problem, config, 0)
        for x_words, x in inputs.items():
            for w_words, weight in weights.items():
                assert_as_good_as_bmm(launch, x, weight, f"{x_words}, {w_words}, {config}")


@pytest.mark.parametrize("batch", [64, 61])
def test_nothing_beside_the_operands_reaches_the_result(case, batch):
    family, dtype = case
    # c is no multiple of 16, so the last step of a sum reaches past the rows of its column.
    pattern = Pattern(2, 16, 20, 3)
    problem = Problem.of_factor(pattern, dtype, batch_last=True)
    memory = torch.full((pattern.in_features + 100, 200), float("nan"), device="cuda")
    memory = memory.to(getattr(torch, dtype))
    x = memory[50:-50, 64 : 64 + batch]
    weights = torch.full((2, 20, 24, 4), float("nan"), device="cuda").to(x.dtype)
    weight = weights[:, 2:18, 2:22, :3]
    x.copy_(draw(x.shape, dtype, 1))
    weight.copy_(draw(weight.shape, dtype, 2))
    for w in (weight, weight.contiguous()):
        for config in tiles(family, problem, 4):
            launch = family.launcher(problem, config, 0)
            assert_as_good_as_bmm(launch, x, w, f"{config}")


def test_an_empty_batch(case):
    family, dtype = case
    problem = Problem.of_factor(Pattern(1, 16, 16, 2), dtype, batch_last=True)
    launch = family.launcher(problem, tiles(family, problem, 1)[0], 0)
    assert launch(draw((32, 0), dtype, 1), draw((1, 16, 16, 2), dtype, 2)).shape == (32, 0)


@pytest.fixture(params=["float32", "float32, Hopper"])
def fp32_family(request):
    family, _ = CASES[request.param]
    skip_unless_it_runs_here(family)
    return family


@pytest.mark.parametrize("batch", [64, 63])
def test_fp32_values_that_tf32_cannot_split(fp32_family, batch):
    pattern = Pattern(2, 20, 24, 3)
    problem = Problem.of_factor(pattern, "float32", batch_last=True)
    x = draw((pattern.in_features, batch), "float32", 1)
    x[5, 3] = float("inf")
    x[40, 4] = float("-inf")
    x[70, 5] = float("nan")
    x[100, 6] = 3e38
    weight = draw(pattern.weight_shape, "float32", 2).clamp(-1, 1)
    weight[1, 2, 3, 1] = 0.0
    weight[0, 7, 4, 0] = float("inf")
    truth = ks_reference(x.double(), weight.double(), "batch_last").float()
    for config in tiles(fp32_family, problem, 3):
        y = fp32_family.launcher(problem, config, 0)(x, weight)
        torch.testing.assert_close(y, truth, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_tf32_is_as_exact_as_tf32(fp32_family):
    pattern = Pattern(2, 64, 64, 3)
    problem = Problem.of_factor(pattern, "float32", batch_last=True)
    x = draw((pattern.in_features, 1000), "float32", 1)
    weight = draw(pattern.weight_shape, "float32", 2)
    truth = ks_reference(x.double(), weight.double(), "batch_last")
    for config in tiles(fp32_family, problem, 2):
        y = fp32_family.launcher(replace(problem, exact=False), config, 0)(x, weight)
        # Each factor is rounded to 11 bits: an error of 2^-12 at most, of either sign.
        assert relative_error(y, truth) < 2**-11


def test_a_weight_changed_in_place_is_packed_again():
    skip_unless_it_runs_here(batch_last_wgmma_tf32x3)
    pattern = Pattern(2, 64, 64, 3)
    problem = Problem.of_factor(pattern, "float32", batch_last=True)
    x, weight = draw((pattern.in_features, 328), "float32", 1), draw((2, 64, 64, 3), "float32", 2)
    launch = batch_last_wgmma_tf32x3.launcher(
        problem, tiles(batch_last_wgmma_tf32x3, problem, 1)[0], 0
    )
    for _ in range(2):
        assert_as_good_as_bmm(launch, x, weight, "as it is now")
        weight.mul_(-3.0)
