"""The roofline: its arithmetic, and ceilings that this machine can reach."""

import pytest
import torch

from ksopt import precision
from ksopt.errors import InvalidInputError
from ksopt.measure import roofline
from ksopt.measure.roofline import Roofline, measure_roofline
from ksopt.patterns.chain import Chain

CPU = torch.device("cpu")


def roofline_of(bandwidth: float, rate: float) -> Roofline:
    return Roofline("cpu", "float32", bandwidth, rate, 0, 0, "")


def test_the_floor_is_the_larger_of_two_times() -> None:
    roof = roofline_of(bandwidth=1e9, rate=1e12)
    assert roof.floor_us(bytes_moved=2_000, flops=10) == pytest.approx(2.0)
    assert roof.floor_us(bytes_moved=10, flops=3_000_000) == pytest.approx(3.0)
    assert roof.efficiency(2_000, 10, latency_us=8.0) == pytest.approx(0.25)


def test_a_chains_floor_adds_its_factors() -> None:
    roof, chain = roofline_of(1e9, 1e9), Chain.monarch(384, 1536, p=4)
    expected = sum(
        max(pattern.bytes(10, "float32") / 1e9, pattern.flops(10) / 1e9) for pattern in chain
    )
    assert roof.chain_floor_us(chain, 10) == pytest.approx(1e6 * expected)


def test_the_ceilings_are_measured_once() -> None:
    first = measure_roofline(CPU, "float32")
    assert first.bandwidth > 1e8
    assert first.rate > 1e8
    assert first.gemm_side in roofline._CPU_SIDES
    assert measure_roofline(CPU, "float32") is first


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="dtype 'int8'"):
        measure_roofline(CPU, "int8")


@pytest.mark.parametrize("users_own", ["none", "ieee", "tf32"])
def test_the_users_precision_is_left_alone(users_own: str) -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = users_own
    try:
        with precision.fp32_products("tf32"):
            assert matmul.fp32_precision == "tf32"
        assert matmul.fp32_precision == users_own
    finally:
        matmul.fp32_precision = before


@pytest.mark.gpu
def test_fp32_takes_the_better_way() -> None:
    roof = measure_roofline(torch.device("cuda:0"), "float32")
    assert roof.rate_from in ("float32 GEMM", "TF32 GEMM / 3")
    assert roof.bandwidth > 1e11
