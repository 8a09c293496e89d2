"""The comparison with float64 that a kernel must pass before it may be chosen."""

import pytest
import torch

from ksopt.kernels.backends import cpu
from ksopt.measure.accuracy import Check, checking
from ksopt.reference import ks_reference


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


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
@pytest.mark.parametrize("batch_last", [False, True])
def test_a_wrong_way_is_told_whatever_the_first_operands_are(value, batch_last):
    """Zeros and NaN would let every way pass, which then multiplies for good."""
    shape = (8, 300) if batch_last else (300, 8)
    x, weight = torch.full(shape, value), torch.randn(1, 2, 2, 4)
    check, own_x, own_weight = checking(x, weight, batch_last)
    assert own_x.shape == x.shape
    assert own_x.stride() == x.stride()
    y = cpu.run(own_x, own_weight, batch_last)
    assert "wrong" in str(check(2 * y))
    assert check(y) is None


def test_operands_that_say_something_are_kept():
    x, weight = torch.randn(300, 8), torch.randn(1, 2, 2, 4)
    _, own_x, own_weight = checking(x, weight, False)
    assert own_x is x
    assert own_weight is weight


def test_random_operands_lie_as_the_first_did():
    memory = torch.zeros(40, 33, dtype=torch.float16)
    for x in (memory[3:, 1:9], memory[:1, 5:13].expand(7, 8), memory[::3, 3:19:2]):
        _, own, _ = checking(x, torch.randn(1, 2, 2, 4).half(), False)
        assert (own.shape, own.stride()) == (x.shape, x.stride())
        assert own.data_ptr() % 16 == x.data_ptr() % 16
        assert own.dtype == x.dtype


def partial_sums(x, weight, at_a_time, dtype):
    """As cuBLAS may do it: every few terms the sum is rounded to 16 bit."""
    n, (a, b, c, d) = len(x), weight.shape
    terms = x.view(n, a, 1, c, d).float() * weight[None].float()
    sums = torch.zeros(n, a, b, d)
    for first in range(0, c, at_a_time):
        sums = (sums + terms[:, :, :, first : first + at_a_time].sum(3)).to(dtype).float()
    return sums.reshape(n, -1).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("shape", "at_a_time"), [((3, 32, 5, 1), 3), ((1, 17, 192, 12), 96), ((8, 5, 512, 1), 256)]
)
def test_sums_in_16_bit_are_refused_and_those_in_fp32_are_not(shape, at_a_time, dtype):
    """The shapes in which ways with such sums were taken, with errors up to 3e-3 of sum |x||w|."""
    a, _, c, d = shape
    x, weight = torch.randn(130, a * c * d).to(dtype), torch.randn(shape).to(dtype)
    check = Check(x, weight, batch_last=False)
    in_fp32 = ks_reference(x.float(), weight.float()).to(dtype)
    for right in (in_fp32, partial_sums(x, weight, c, dtype)):
        assert check(right) is None
    wrong = check(partial_sums(x, weight, at_a_time, dtype))
    assert "rounded more than once" in str(wrong)


def test_a_right_result_that_overflows_in_some_places():
    x, weight = torch.randn(100, 8).half(), torch.randn(1, 2, 2, 4).half()
    x[3] = 6e4
    weight[0, 1] = 4
    check = Check(x, weight, batch_last=False)
    y = ks_reference(x.double(), weight.double()).half()
    assert y.isinf().any()
    assert check(y) is None
