"""The batch-last tensor-core family against float64: tiles, tails, alignments, strides, offsets."""

import random

import pytest
import torch

from ksopt.kernels import batch_last16, cpu
from ksopt.kernels.problem import Problem
from ksopt.pattern import Pattern
from ksopt.reference import ks_reference

pytestmark = pytest.mark.gpu

DTYPES = ("float16", "bfloat16")
# Both are sums of the same products in fp32, rounded once to the storage type: only the order of
# summation differs, so ours may be no further from float64 than twice what cuBLAS gives.
ALLOWED_RATIO = 2.0


def tiles(problem, count, seed=0):
    """Some tiles of the family: random ones, and those with the fewest and most outputs."""
    every = sorted(batch_last16.configs(problem, 132), key=lambda c: (c.outputs, c.rows))
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
    truth = ks_reference(x.double(), weight.double(), "batch_last")
    theirs = relative_error(cpu.multiply_by_bmm(x, weight, True), truth)
    poison(truth.numel(), str(x.dtype).removeprefix("torch."))
    y = launch(x, weight)
    assert y.shape == truth.shape, words
    assert y.is_contiguous(), words
    error = relative_error(y, truth)
    assert error <= ALLOWED_RATIO * theirs, f"{words}: {error:.2e} against bmm's {theirs:.2e}"


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


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_and_batches(shape, dtype):
    pattern = Pattern(*shape)
    problem = Problem(pattern, dtype, batch_last=True)
    weight = draw(shape, dtype, 1)
    for config in tiles(problem, 3, seed=sum(shape)):
        launch = batch_last16.launcher(problem, config, 0)
        for batch in (1, 7, 8, 63, 64, 200, 1000, 3001, 5000):
            x = draw((pattern.in_features, batch), dtype, batch)
            assert_as_good_as_bmm(launch, x, weight, f"{pattern} batch {batch} {config}")


@pytest.mark.parametrize("shape", [(2, 48, 50, 3), (1, 64, 64, 4)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_and_alignments(shape, dtype):
    pattern = Pattern(*shape)
    problem = Problem(pattern, dtype, batch_last=True)
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
    for config in tiles(problem, 3):
        launch = batch_last16.launcher(problem, config, 0)
        for x_words, x in inputs.items():
            for w_words, weight in weights.items():
                assert_as_good_as_bmm(launch, x, weight, f"{x_words}, {w_words}, {config}")


@pytest.mark.parametrize("batch", [64, 61])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_beside_the_operands_reaches_the_result(dtype, batch):
    # c is no multiple of 16, so the last step of a sum reaches past the rows of its column.
    pattern = Pattern(2, 16, 20, 3)
    problem = Problem(pattern, dtype, batch_last=True)
    memory = torch.full((pattern.in_features + 100, 200), float("nan"), device="cuda")
    memory = memory.to(getattr(torch, dtype))
    x = memory[50:-50, 64 : 64 + batch]
    weights = torch.full((2, 20, 24, 4), float("nan"), device="cuda").to(x.dtype)
    weight = weights[:, 2:18, 2:22, :3]
    x.copy_(draw(x.shape, dtype, 1))
    weight.copy_(draw(weight.shape, dtype, 2))
    for w in (weight, weight.contiguous()):
        for config in tiles(problem, 4):
            launch = batch_last16.launcher(problem, config, 0)
            assert_as_good_as_bmm(launch, x, w, f"{config}")


def test_an_empty_batch():
    problem = Problem(Pattern(1, 16, 16, 2), "float16", batch_last=True)
    launch = batch_last16.launcher(problem, tiles(problem, 1)[0], 0)
    assert launch(draw((32, 0), "float16", 1), draw((1, 16, 16, 2), "float16", 2)).shape == (32, 0)


@pytest.mark.parametrize("more", [1000, 1001], ids=["aligned", "shifted"])
def test_more_elements_than_32_bits_count(more):
    pattern = Pattern(1, 16, 3, 1)
    problem = Problem(pattern, "float16", batch_last=True)
    rows = 2**27 + more  # times 16 outputs
    x = torch.empty(3, rows, dtype=torch.float16, device="cuda")
    x[:] = torch.tensor([[1.0], [2.0], [3.0]], device="cuda")
    x[:, -1] = 7.0
    weight = torch.ones(pattern.weight_shape, dtype=torch.float16, device="cuda")
    y = batch_last16.launcher(problem, tiles(problem, 2)[-1], 0)(x, weight)
    assert y.numel() > 2**31
    assert bool((y[:, -1] == 21.0).all())
    assert bool((y[:, :-1] == 6.0).all())
