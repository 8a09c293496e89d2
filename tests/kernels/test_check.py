"""The comparison with float64 that a kernel must pass before it may be chosen."""

import pytest
import torch

from ksopt.kernels import cpu
from ksopt.kernels.check import Check


def multiply(x, weight):
    return cpu.run(x, weight, False)


def test_a_right_result_passes_and_a_wrong_one_does_not():
    x, weight = torch.randn(300, 512), torch.randn(2, 16, 16, 16)
    check = Check(x, weight, batch_last=False)
    y = multiply(x, weight)
    assert check(y.clone()) is None
    for row in (0, -1):
        wrong = y.clone()
        wrong[row, 3] += 1
        assert "its result is wrong (relative error" in str(check(wrong.clone()))
        wrong[row, 3] = float("nan")
        assert "wrong" in str(check(wrong))
    assert "wrong" in str(check(torch.zeros_like(y)))


def test_the_other_layout_and_several_batch_dimensions():
    x, weight = torch.randn(300, 512), torch.randn(2, 16, 16, 16)
    y = multiply(x, weight)
    last = Check(x.T.contiguous(), weight, batch_last=True)
    assert last(y.T.contiguous()) is None
    assert "wrong" in str(last(-y.T.contiguous()))
    several = Check(x.view(3, 100, 512), weight, batch_last=False)
    assert several(y.view(3, 100, -1)) is None


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_operands_that_say_nothing(value):
    x, weight = torch.full((5, 8), value), torch.randn(1, 2, 2, 4)
    check = Check(x, weight, batch_last=False)
    assert check(multiply(x, weight)) is None


def test_products_that_overflow_in_16_bit():
    x, weight = torch.full((5, 8), 6e4).half(), torch.full((1, 2, 2, 4), 6e4).half()
    check = Check(x, weight, batch_last=False)
    assert check(torch.full((5, 8), float("inf")).half()) is None


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_right_result_is_not_left_in_memory_for_a_way_that_writes_none(value):
    x, weight = torch.randn(300, 8), torch.full((1, 2, 2, 4), value)
    y = multiply(x, weight)
    assert Check(x, weight, batch_last=False)(y) is None
    assert y.isnan().all()
