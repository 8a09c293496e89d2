"""Transposes around a batched product: its index logic and cost model, without a GPU."""

import pytest
import torch
from checks import H200, assert_close_to_float64

from ksopt.kernels.families.base import family_of
from ksopt.kernels.families.transpose_bmm import Config, PermutedProduct
from ksopt.kernels.problem import Problem
from ksopt.patterns.chain import Pattern

transpose_bmm = family_of("transpose_bmm")

PATTERNS = [Pattern(2, 16, 24, 4), Pattern(1, 8, 48, 16), Pattern(3, 32, 16, 3)]


def by_torch(a: int, length: int, d: int, to_planar: bool):
    """Stands in for a compiled transpose."""

    def transpose(x, weight, out=None):
        assert weight.dim() == 4, "the host launcher reads four strides"
        assert x.is_contiguous()
        assert x.data_ptr() % 16 == 0
        shape = (-1, a, length, d) if to_planar else (-1, a, d, length)
        y = x.view(shape).transpose(2, 3).contiguous().view(x.shape)
        return y if out is None else out.copy_(y)

    return transpose


def product(p: Pattern) -> PermutedProduct:
    problem = Problem.of_factor(p, "float32", batch_last=False)
    return PermutedProduct(problem, by_torch(p.a, p.c, p.d, True), by_torch(p.a, p.b, p.d, False))


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("batch", [0, 1, 7, 64])
def test_results(pattern, batch):
    x = torch.randn(batch, pattern.in_features)
    weight = torch.randn(pattern.weight_shape)
    y = product(pattern)(x, weight)
    assert_close_to_float64(y, x, weight, Problem.of_factor(pattern, "float32", False))


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("batch", [(0,), (7,), (2, 3)])
def test_the_last_transpose_writes_into_a_passed_result(pattern, batch):
    x, weight = torch.randn(*batch, pattern.in_features), torch.randn(pattern.weight_shape)
    out = torch.full((*batch, pattern.out_features), torch.nan)
    y = product(pattern)(x, weight, out)
    assert y.data_ptr() == out.data_ptr()
    assert torch.equal(out, product(pattern)(x, weight))


def test_rows_that_lie_apart_or_are_not_aligned_and_several_batch_dimensions():
    p = PATTERNS[0]
    weight = torch.randn(p.weight_shape).transpose(1, 2).contiguous().transpose(1, 2)
    apart = torch.randn(6, p.in_features + 8)[:, : p.in_features]
    shifted = torch.randn(6 * p.in_features + 1)[1:].view(6, p.in_features)
    for x in (apart, shifted):
        y = product(p)(x, weight)
        assert_close_to_float64(y, x, weight, Problem.of_factor(p, "float32", False))
        whole = product(p)(x.reshape(2, 3, -1), weight)
        assert torch.equal(whole.view(6, -1), y)


def test_operands_that_want_gradients():
    p = PATTERNS[0]
    weight = torch.randn(p.weight_shape, requires_grad=True)
    y = product(p)(torch.randn(3, p.in_features, requires_grad=True), weight)
    assert not y.requires_grad


def test_predicted_times_of_measured_patterns():
    # Batch 25,088, fp16, one H200: microseconds (docs/development).
    measured = {
        (4, 64, 64, 16): 326,
        (1, 128, 128, 96): 957,
        (1, 256, 256, 64): 1247,
        (1, 1024, 1024, 8): 982,
        (1, 1024, 1024, 16): 1953,
        (16, 256, 256, 4): 1253,
        (1, 256, 256, 4): 88,
        (1, 192, 768, 24): 877,
    }
    for shape, us in measured.items():
        case = Problem.of_factor(Pattern(*shape), "float16", batch_last=False)
        predicted = transpose_bmm.predicted_us(case, Config("float16"), 25_088, H200)
        assert predicted == pytest.approx(us, rel=0.12), shape
