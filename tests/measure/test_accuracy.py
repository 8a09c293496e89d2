"""The comparison with float64 that a product must pass before it is chosen or timed."""

import pytest
import torch

from ksopt.kernels.backends import cpu
from ksopt.measure.accuracy import (
    AccuracyCheck,
    allowed_error,
    checked_rows,
    checking,
    fault_against,
    fault_beyond,
    largest_error,
    relative_error,
)
from ksopt.reference import chain_reference, ks_reference


def multiply(x, weight):
    return cpu.run(x, weight, False)


def kernel_check(x, weight, layout="batch_first"):
    return AccuracyCheck(x, [weight], layout, rounded_once=True)


def test_a_right_result_passes_and_a_wrong_one_does_not():
    x, weight = torch.randn(300, 512), torch.randn(2, 16, 16, 16)
    check = kernel_check(x, weight)
    y = multiply(x, weight)
    assert check.judge(y.clone()) is None
    for row in (0, -1):
        wrong = y.clone()
        wrong[row, 3] += 1
        assert "its result is wrong (relative error" in str(check.judge(wrong.clone()))
        wrong[row, 3] = float("nan")
        assert "wrong" in str(check.judge(wrong))
    assert "wrong" in str(check.judge(torch.zeros_like(y)))


def test_the_other_layout_and_several_batch_dimensions():
    x, weight = torch.randn(300, 512), torch.randn(2, 16, 16, 16)
    y = multiply(x, weight)
    last = kernel_check(x.T.contiguous(), weight, "batch_last")
    assert last.judge(y.T.contiguous()) is None
    assert "wrong" in str(last.judge(-y.T.contiguous()))
    several = kernel_check(x.view(3, 100, 512), weight)
    assert several.judge(y.view(3, 100, -1)) is None


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_operands_that_say_nothing(value):
    x, weight = torch.full((5, 8), value), torch.randn(1, 2, 2, 4)
    check = kernel_check(x, weight)
    assert check.judge(multiply(x, weight)) is None


def test_products_that_overflow_in_16_bit():
    x, weight = torch.full((5, 8), 6e4).half(), torch.full((1, 2, 2, 4), 6e4).half()
    check = kernel_check(x, weight)
    assert check.judge(torch.full((5, 8), float("inf")).half()) is None


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_right_result_is_not_left_in_memory_for_a_way_that_writes_none(value):
    x, weight = torch.randn(300, 8), torch.full((1, 2, 2, 4), value)
    y = multiply(x, weight)
    assert kernel_check(x, weight).judge(y) is None
    assert y.isnan().all()


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
@pytest.mark.parametrize("batch_last", [False, True])
def test_a_wrong_candidate_is_detected_whatever_the_first_operands_are(value, batch_last):
    """Zeros and NaN would let every way pass, which then multiplies for good."""
    shape = (8, 300) if batch_last else (300, 8)
    x, weight = torch.full(shape, value), torch.randn(1, 2, 2, 4)
    check, own_x, own_weight = checking(x, weight, batch_last)
    assert own_x.shape == x.shape
    assert own_x.stride() == x.stride()
    y = cpu.run(own_x, own_weight, batch_last)
    assert "wrong" in str(check.judge(2 * y))
    assert check.judge(y) is None


def test_telling_operands_are_used():
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
    check = kernel_check(x, weight)
    in_fp32 = ks_reference(x.float(), weight.float()).to(dtype)
    for right in (in_fp32, partial_sums(x, weight, c, dtype)):
        assert check.judge(right) is None
    wrong = check.judge(partial_sums(x, weight, at_a_time, dtype))
    assert "rounded more than once" in str(wrong)


def test_a_right_result_that_overflows_in_some_places():
    x, weight = torch.randn(100, 8).half(), torch.randn(1, 2, 2, 4).half()
    x[3] = 6e4
    weight[0, 1] = 4
    check = kernel_check(x, weight)
    y = ks_reference(x.double(), weight.double()).half()
    assert y.isinf().any()
    assert check.judge(y) is None


def test_what_one_output_alone_has_wrong_is_detected_in_16_bit():
    """In the error of all outputs together it is lost: 1e-3 of them, and 1.6e-2 is allowed."""
    x, weight = torch.randn(300, 512).bfloat16(), torch.randn(2, 16, 16, 16).bfloat16()
    check = kernel_check(x, weight)
    wrong = multiply(x, weight)
    wrong[-1, 3] += 1
    errors = check.errors(wrong)
    assert errors.relative < check.allowed.relative
    assert "its result is wrong (largest error" in str(check.judge(wrong))


def test_chains_are_compared_with_pytorchs_product_of_their_factors():
    x, weights = torch.randn(40, 12), [torch.randn(1, 5, 4, 3), torch.randn(3, 4, 4, 1)]
    check = AccuracyCheck(x, weights, "batch_first")
    assert check.fault_of(lambda x: chain_reference(x, weights)) is None
    others = [weights[0], weights[1].roll(1, 0)]
    assert "error" in str(check.fault_of(lambda x: chain_reference(x, others)))


def test_the_allowed_error_is_twice_pytorchs_or_rounding():
    assert allowed_error(1e-3, 1e-6) == 2e-3
    assert allowed_error(0.8e-6, 1e-6) == pytest.approx(2e-6)
    assert allowed_error(0.1e-6, 1e-6) == pytest.approx(1.2e-6)
    assert not 1.0 <= allowed_error(float("nan"), 1e-6)
    assert allowed_error(1e-3, 1e-6, 4.0) == 4e-3


def test_a_result_is_judged_by_a_multiple_of_pytorchs_error():
    truth = torch.tensor([3.0, 4.0]).double()
    theirs, ours = truth + torch.tensor([0.0, 0.05]), truth + torch.tensor([0.15, 0.0])
    text = "relative error 3.0e-02, allowed 2.0e-02"
    assert fault_against(ours, theirs, truth, 1e-6) == text
    assert fault_against(ours, theirs, truth, 1e-6, 4.0) is None
    assert fault_against(truth * float("nan"), theirs, truth, 1e-6, 4.0) is not None


def test_an_error_beyond_the_allowed_one_is_a_fault():
    assert fault_beyond(0.08, 0.08) is None
    assert fault_beyond(0.1, 0.08, "{error:g} > {allowed:g}") == "0.1 > 0.08"
    zero, one = torch.zeros(2).double(), torch.ones(2).double()
    for error in (relative_error, largest_error):
        assert error(zero, zero) == 0
        assert error(one, zero) == float("inf")
        assert error(zero, one) == 1


def test_operands_that_tell_nothing_let_no_benchmarked_way_pass():
    x, weight = torch.zeros(5, 8), torch.randn(1, 2, 2, 4)
    check = AccuracyCheck(x, [weight], "batch_first")
    assert not check.is_conclusive
    assert "to compare with" in str(check.fault_of(lambda x: ks_reference(x, weight)))


@pytest.mark.parametrize("batch", [1, 7, 64, 129, 1000, 25_088])
def test_checked_rows_are_in_the_batch_and_on_every_place_of_a_tile(batch: int) -> None:
    rows = checked_rows(batch)
    assert rows == sorted(set(rows))
    assert rows[0] == 0
    assert rows[-1] == batch - 1
    assert len(rows) <= 300
    assert len({row % 128 for row in rows}) == min(batch, 128)


@pytest.mark.parametrize("layout", ["batch_first", "batch_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounding_passes_and_less_does_not(layout: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(2, 8, 16, 3, dtype=dtype)
    x = torch.randn(200, 96).to(dtype)
    x = x.T.contiguous() if layout == "batch_last" else x
    check = AccuracyCheck(x, [weight], layout)

    def right(x: torch.Tensor) -> torch.Tensor:
        return ks_reference(x.double(), weight.double(), layout).to(dtype)

    def rounded_too_early(x: torch.Tensor) -> torch.Tensor:
        coarse = (x * 256).round() / 256 if dtype == torch.float32 else (x * 8).round() / 8
        return right(coarse)

    def one_row_is_wrong(x: torch.Tensor) -> torch.Tensor:
        y = right(x)
        (y[:, 65] if layout == "batch_last" else y[65]).mul_(2)
        return y

    assert check.fault_of(right) is None
    assert "error" in str(check.fault_of(rounded_too_early))
    assert ("error" in str(check.fault_of(one_row_is_wrong))) == (65 in checked_rows(200))
    assert "the result is" in str(check.fault_of(lambda x: right(x).double()))


def test_what_is_not_written_is_detected_even_between_the_checked_rows() -> None:
    weight, x = torch.randn(1, 4, 4, 2), torch.randn(5000, 8)
    (unchecked, *_) = sorted(set(range(5000)) - set(checked_rows(5000)))

    def skips_a_row(x: torch.Tensor) -> torch.Tensor:
        y = ks_reference(x, weight)
        y[unchecked] = float("nan")
        return y

    check = AccuracyCheck(x, [weight], "batch_first")
    assert "NaN" in str(check.fault_of(skips_a_row))


def test_memory_that_a_candidate_receives_holds_nan() -> None:
    weight, x = torch.randn(1, 64, 64, 1), torch.randn(64, 64)
    check = AccuracyCheck(x, [weight], "batch_first")
    seen = []

    def spy(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.new_empty(64, 64).isnan().any().item())
        return ks_reference(x, weight)

    # Which block the allocator hands out is its own business, so one of a few.
    for _ in range(5):
        check.fault_of(spy)
    assert any(seen)


def test_a_benchmarked_way_may_add_in_any_order():
    x, weight = torch.randn(300, 768), torch.randn(1, 192, 768, 1)
    right = x.double() @ weight.double().view(192, 768).T
    another_order = (right * (1 + 5e-7 * torch.randn(right.shape).double())).float()
    tf32 = (right * (1 + 3e-4 * torch.randn(right.shape).double())).float()
    way = AccuracyCheck(x, [weight], "batch_first")
    assert way.fault(way.errors(another_order)) is None
    assert "relative error" in str(way.fault(way.errors(tf32)))
    kernel = AccuracyCheck(x, [weight], "batch_first", rounded_once=True)
    assert kernel.allowed.relative < way.allowed.relative
