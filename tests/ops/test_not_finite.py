"""NaN and infinities reach what they meet in the product's definition, and nothing else.

The reference is the definition, element by element in float64: y[n, i, k, j] is the sum over l of
x[n, i, l, j] * weight[i, k, l, j]. A way that multiplies stored zeros, or that lets blocks meet
which never met, makes NaN of them (zero times infinity is NaN).
"""

from __future__ import annotations

import math
import random

import pytest
import torch

from ksopt import ops
from ksopt.baselines import BASELINES
from ksopt.kernels.backends import cpu
from ksopt.kernels.families.common import pytorch_ops
from ksopt.kernels.problem import Problem
from ksopt.patterns.chain import Pattern

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
PLANTED = (math.nan, math.inf, -math.inf)


def by_definition(x, weight):
    """y [n, i, k, j] of x [n, i, l, j], without a single zero that is not the operands' own."""
    return (x[:, :, None].double() * weight[None].double()).sum(3)


def assert_alike(actual, truth, dtype, sums):
    """The same NaN, the same infinities, and near elsewhere; truth is in float64."""
    actual, most = actual.double(), torch.finfo(dtype).max
    truth = truth.where(truth.abs() <= most, truth * math.inf)
    assert torch.equal(actual.isnan(), truth.isnan())
    assert torch.equal(actual == math.inf, truth == math.inf)
    assert torch.equal(actual == -math.inf, truth == -math.inf)
    finite = truth.isfinite()
    # Sums of numbers from 0.5 to 1.5: each of the roundings is at most eps of the largest sum.
    most_wrong = 4 * torch.finfo(dtype).eps * 2.25 * sums
    assert torch.allclose(actual[finite], truth[finite], rtol=0, atol=most_wrong)


class Case:
    """A random problem; one or two numbers in one of its operands are not finite."""

    def __init__(self, seed):
        chance = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        self.dtype = DTYPES[seed % len(DTYPES)]
        self.batch_last = chance.random() < 0.4
        self.batch = chance.choice((1, 2, 7, 33))
        sizes = (1, 2, 3, 4), (1, 2, 3, 5, 8), (1, 2, 3, 5, 8), (1, 2, 3, 4, 6)
        self.pattern = p = Pattern(*map(chance.choice, sizes))
        self.operands = {
            "x": torch.rand(self.batch, p.a, p.c, p.d, generator=generator),
            "weight": torch.rand(*p.weight_shape, generator=generator),
            "grad": torch.rand(self.batch, p.a, p.b, p.d, generator=generator),
        }
        for name, operand in self.operands.items():
            signs = torch.rand(operand.shape, generator=generator) < 0.5
            self.operands[name] = ((operand + 0.5) * torch.where(signs, 1.0, -1.0)).to(self.dtype)
        self.hit = chance.choice(("x", "weight", "grad"))
        flat = self.operands[self.hit].view(-1)
        for _ in range(chance.choice((1, 1, 2))):
            flat[chance.randrange(len(flat))] = chance.choice(PLANTED)

    def laid_out(self, rows):
        """[n, i, l, j] as the operator takes it."""
        matrix = rows.flatten(1)
        return matrix.t().contiguous() if self.batch_last else matrix

    def as_rows(self, matrix, length):
        matrix = matrix.t() if self.batch_last else matrix
        return matrix.reshape(self.batch, self.pattern.a, length, self.pattern.d)


def test_the_reference_spreads_nothing():
    x = torch.ones(2, 2, 3, 2)
    x[1, 0, 2, 1] = math.inf
    y = by_definition(x, torch.ones(2, 4, 3, 2))
    hit = torch.zeros(2, 2, 4, 2, dtype=torch.bool)
    hit[1, 0, :, 1] = True
    assert torch.equal(y == math.inf, hit)
    assert not y.isnan().any()


@pytest.mark.parametrize("seed", range(80))
def test_operator_and_gradients(seed):
    cpu.forget()
    case = Case(seed)
    p = case.pattern
    x = case.laid_out(case.operands["x"]).requires_grad_()
    weight = case.operands["weight"].clone().requires_grad_()
    grad = case.operands["grad"]
    y = ops.ks_mm(x, weight, case.batch_last)
    y.backward(case.laid_out(grad))
    rows, values = case.operands["x"], case.operands["weight"]
    assert_alike(case.as_rows(y, p.b), by_definition(rows, values), case.dtype, p.c)
    back = by_definition(grad, values.transpose(1, 2))
    assert_alike(case.as_rows(x.grad, p.c), back, case.dtype, p.b)
    # [n, i, k, 1, j] * [n, i, 1, l, j]
    slopes = (grad[:, :, :, None].double() * rows[:, :, None].double()).sum(0)
    assert_alike(weight.grad, slopes, case.dtype, case.batch)


@pytest.mark.parametrize("seed", range(80))
def test_every_way_on_cpu(seed):
    case = Case(seed)
    if case.hit == "grad":
        case.operands["x"].view(-1)[seed % case.operands["x"].numel()] = math.nan
    p, x, weight = case.pattern, case.laid_out(case.operands["x"]), case.operands["weight"]
    truth = by_definition(case.operands["x"], weight)
    problem = Problem.of_factor(p, str(case.dtype).removeprefix("torch."), case.batch_last)
    shape = (p.out_features, case.batch) if case.batch_last else (case.batch, p.out_features)
    for name in pytorch_ops.names(problem, "cpu"):
        product = cpu._Product(p, BASELINES[name], case.batch_last)
        out = torch.full(shape, math.nan, dtype=case.dtype)
        for y in (
            product.multiply(x, weight),
            product.multiply(x, weight, out),
        ):
            assert_alike(case.as_rows(y, p.b), truth, case.dtype, p.c)


def test_sums_that_overflow_cost_time_and_no_results():
    # Each y is finite, their sum is not: the guard's sum says nothing about these.
    weight, x = torch.full((2, 3, 3, 2), 1e19), torch.full((64, 12), 1e19)
    product = cpu._Product(Pattern(2, 3, 3, 2), BASELINES["expand"], False)
    assert torch.equal(product.multiply(x, weight), torch.full((64, 12), 3e38))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pattern", [(3, 32, 5, 1), (1, 17, 192, 12), (8, 5, 512, 1), (2, 4, 4, 2)])
def test_no_way_on_cuda_multiplies_stored_zeros(pattern, dtype):
    # Where y may not be looked at (that would wait for the device), no such way is offered.
    names = pytorch_ops.names(Problem.of_factor(Pattern(*pattern), dtype, False), "cuda")
    assert not set(names) & {"expand", "dense"}
    assert "bmm" in names
