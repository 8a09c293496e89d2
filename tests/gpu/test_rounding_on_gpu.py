"""No product rounds its sums more often than PyTorch's batched product of the same operands.

cuBLAS may add 16-bit partial sums in 16 bit, which is on by default, and does so in some shapes.
And what is not finite reaches what it met, whichever way was taken.
"""

import random

import pytest
import torch

from ksopt import ops
from ksopt.baselines import BASELINES
from ksopt.kernels.backends import cuda
from ksopt.kernels.families.common import pytorch_ops
from ksopt.kernels.problem import Problem
from ksopt.measure.accuracy import AccuracyCheck
from ksopt.patterns.chain import Pattern

pytestmark = pytest.mark.gpu

# Where ways that multiplied stored zeros had errors up to 3e-3 of sum |x||w|.
SEEN = [((3, 32, 5, 1), 2049, False), ((1, 17, 192, 12), 100, False), ((8, 5, 512, 1), 100, True)]


def drawn(count):
    chance = random.Random(0)
    for _ in range(count):
        pattern = (
            chance.choice((1, 2, 3, 8)),
            chance.choice((1, 5, 8, 17, 32, 100)),
            chance.choice((5, 8, 17, 64, 192, 512)),
            chance.choice((1, 2, 3, 8, 12)),
        )
        yield pattern, chance.choice((1, 7, 100, 2049)), chance.random() < 0.4


PROBLEMS = SEEN + list(drawn(40))


def operands(pattern, batch, last, dtype):
    p = Pattern(*pattern)
    shape = (p.in_features, batch) if last else (batch, p.in_features)
    x = torch.randn(shape, device="cuda", dtype=dtype)
    return x, torch.randn(pattern, device="cuda", dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("pattern", "batch", "last"), PROBLEMS)
def test_sums_are_rounded_once(pattern, batch, last, dtype):
    assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    assert torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    x, weight = operands(pattern, batch, last, dtype)
    layout = "batch_last" if last else "batch_first"
    check = AccuracyCheck(x, [weight], layout, rounded_once=True)
    assert check.judge(ops.ks_mm(x, weight, last)) is None, cuda.choice_for(x, weight, last).name
    problem = Problem.of_factor(Pattern(*pattern), str(dtype).removeprefix("torch."), last)
    for name in pytorch_ops.names(problem, "cuda"):
        y = BASELINES[name].bind(weight, layout)(x)
        assert check.judge(y) is None, name


def test_the_check_knows_sums_in_16_bit():
    """Of at least one of the shapes in which they were seen; else cuBLAS no longer makes them."""
    refused = []
    for pattern, batch, last in SEEN:
        x, weight = operands(pattern, batch, last, torch.bfloat16)
        layout = "batch_last" if last else "batch_first"
        for name in pytorch_ops.FILLED:
            y = BASELINES[name].bind(weight, layout)(x)
            check = AccuracyCheck(x, [weight], layout, rounded_once=True)
            refused.append("more than once" in str(check.judge(y)))
    assert any(refused)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("pattern", "batch", "last"), PROBLEMS)
def test_what_is_not_finite_reaches_what_it_met(pattern, batch, last, dtype):
    x, weight = operands(pattern, batch, last, dtype)
    a, b, c, d = pattern
    rows = (x.T if last else x).unflatten(1, (a, c, d))
    rows[batch // 2, a - 1, c - 1, 0] = torch.inf
    rows[0, 0, 0, d - 1] = torch.nan
    y = ops.ks_mm(x, weight, last)
    y = (y.T if last else y).unflatten(1, (a, b, d))
    reached = ~rows.isfinite().all(2, keepdim=True).expand(batch, a, b, d)
    assert torch.equal(~y.isfinite(), reached)
