"""The floor of a product's time: the least that the device's memory and arithmetic allow.

floor = max(bytes / bandwidth, flops / rate). The ceilings are measured in the process that uses
them: bandwidth by a large copy from device to device, rate by a large square GEMM of the dtype.

Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model for
multicore architectures", 2009.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from ksopt.errors import InvalidInputError
from ksopt.measure import timing
from ksopt.patterns.chain import Chain, Pattern
from ksopt.precision import fp32_products

_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "tf32": torch.float32,
    "float64": torch.float64,
}
_COPY_BYTES = {"cuda": 2**31, "cpu": 2**27}
# 8192 cubed fills a GPU. On a CPU it would take half a minute, so the side starts small there, and
# on a device of an unknown speed, and doubles while a product stays below a quarter of a second.
_CUDA_SIDE = 8192
_CPU_SIDES = (256, 512, 1024, 2048, 4096)
_CPU_LONGEST_US = 250_000.0


@dataclass(frozen=True)
class Roofline:
    """The measured ceilings of a device for one dtype.

    Args:
        device: torch's name of the device.
        dtype: The dtype of the GEMM.
        bandwidth: Bytes per second, read and written, of a large copy.
        rate: Floating-point operations per second of the GEMM.
        copy_bytes: Bytes that the copy moved, read and written.
        gemm_side: Side of the square matrices of the GEMM.
        rate_from: The measurement behind the rate: "float32 GEMM", "TF32 GEMM / 3", ...
    """

    device: str
    dtype: str
    bandwidth: float
    rate: float
    copy_bytes: int
    gemm_side: int
    rate_from: str

    def floor_us(self, bytes_moved: int, flops: int) -> float:
        """The least microseconds in which this device can move the bytes and do the flops.

        Example:
            >>> Roofline("cpu", "float32", 1e10, 1e11, 0, 0, "").floor_us(10**6, 10**6)
            100.0
        """
        return 1e6 * max(bytes_moved / self.bandwidth, flops / self.rate)

    def chain_floor_us(self, chain: Chain, batch: int) -> float:
        """The sum of the factors' floors: no run of the chain factor by factor is faster.

        A kernel that runs the whole chain in one pass moves fewer bytes and may beat it.
        """
        return sum(self.factor_floor_us(pattern, batch) for pattern in chain)

    def factor_floor_us(self, pattern: Pattern, batch: int) -> float:
        """The floor of one factor's product."""
        return self.floor_us(pattern.bytes(batch, self.dtype), pattern.flops(batch))

    def efficiency(self, bytes_moved: int, flops: int, latency_us: float) -> float:
        """Floor over measured time. Above 1 where a CPU's caches hold the bytes of the floor.

        Example:
            >>> Roofline("cpu", "float32", 1e10, 1e11, 0, 0, "").efficiency(10**6, 10**6, 200.0)
            0.5
        """
        return self.floor_us(bytes_moved, flops) / latency_us


@functools.cache
def measure_roofline(device: torch.device, dtype: str) -> Roofline:
    """Measure the ceilings, once per process for each device and dtype.

    Takes about a second on a GPU and two on a CPU.

    Args:
        device: Where it is measured.
        dtype: "float32", "tf32" (float32 whose products are TF32's), "float16", "bfloat16" or
            "float64".

    Returns:
        The ceilings. For float32 on CUDA the rate is the larger of the FP32 GEMM's and a third of
        the TF32 GEMM's, because three TF32 products give FP32 accuracy.

    Raises:
        InvalidInputError: Another dtype, or a device that is neither.
    """
    if dtype not in _DTYPES:
        raise InvalidInputError(f"dtype {dtype!r}: a roofline is for {', '.join(_DTYPES)}")
    kind = _DTYPES[dtype]
    copied, bandwidth = _bandwidth(device)
    if device.type != "cuda":
        side, rate = _rate_by_sides(device, kind)
        return Roofline(str(device), dtype, bandwidth, rate, copied, side, f"{dtype} GEMM")
    with fp32_products("tf32" if dtype == "tf32" else "ieee"):
        rates = {f"{dtype} GEMM": _gemm_rate(device, kind, _CUDA_SIDE)}
    if dtype == "float32":
        with fp32_products("tf32"):
            rates["TF32 GEMM / 3"] = _gemm_rate(device, kind, _CUDA_SIDE) / 3
    best = max(rates, key=lambda name: rates[name])
    return Roofline(str(device), dtype, bandwidth, rates[best], copied, _CUDA_SIDE, best)


def _bandwidth(device: torch.device) -> tuple[int, float]:
    """Bytes moved by a copy, and bytes per second."""
    half = _COPY_BYTES.get(device.type, _COPY_BYTES["cpu"]) // 2
    if device.type == "cuda":
        half = min(half, torch.cuda.get_device_properties(device).total_memory // 16)
    source = torch.ones(half, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    times = timing.measure({"copy": lambda: target.copy_(source)}, device, max_seconds=0.3)
    return 2 * half, 2 * half / times["copy"].median_us * 1e6


def _gemm_rate(device: torch.device, dtype: torch.dtype, side: int) -> float:
    left = torch.randn(side, side, device=device).to(dtype)
    right = torch.randn(side, side, device=device).to(dtype)
    out = torch.empty_like(left)
    times = timing.measure(
        {"gemm": lambda: torch.mm(left, right, out=out)},
        device,
        max_seconds=0.3,
        min_repeats=5,
        warmup_calls=2,
    )
    return 2 * side**3 / times["gemm"].median_us * 1e6


def _rate_by_sides(device: torch.device, dtype: torch.dtype) -> tuple[int, float]:
    """The side with the best rate, and the rate: small sides first, for a device may be slow."""
    best = (0, 0.0)
    for side in _CPU_SIDES:
        rate = _gemm_rate(device, dtype, side)
        best = max(best, (side, rate), key=lambda one: one[1])
        if 8 * 2 * side**3 / rate * 1e6 > _CPU_LONGEST_US:  # the next one takes eight times as long
            break
    return best
