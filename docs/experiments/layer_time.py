"""One layer with its bias, `KSLinear` beside `nn.Linear`: what docs/development/chains.md says.

    python docs/experiments/layer_time.py

The L2 cache is emptied before each sample; medians of 30. Kernels are chosen by measuring first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

import ksopt
from ksopt.kernels import planner
from ksopt.kernels.problem import Epilogue, Problem
from ksopt.patterns.chain import Chain

ROWS = 25_088
LAYERS = (
    (768, 768, "(1,384,96,2)*(2,96,384,1)"),
    (1024, 1024, "(1,512,128,2)*(2,128,512,1)"),
    (2048, 2048, "(1,1024,256,2)*(2,256,1024,1)"),
    (384, 1536, "(1,768,64,2)*(4,32,96,1)"),
    (1536, 384, "(1,192,48,2)*(2,48,768,1)"),
    (384, 384, "(1,192,48,2)*(2,48,192,1)"),
)
_SAMPLES = 30


def median_us(call: Callable[[], object]) -> float:
    """Median microseconds of a call, nothing of its operands in the L2 cache."""
    flushed = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    for _ in range(3):
        call()
    times = []
    for _ in range(_SAMPLES):
        flushed.zero_()
        torch.cuda._sleep(200_000)  # the host is ahead of the device then
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)[_SAMPLES // 2]


def main() -> None:
    """Print a line for each layer."""
    torch.manual_seed(0)
    for n, m, text in LAYERS:
        x = torch.randn(ROWS, n, device="cuda", dtype=torch.bfloat16)
        dense = torch.nn.Linear(n, m).cuda().bfloat16()
        plain, gelu = (
            ksopt.KSLinear(n, m, text, activation=after).cuda().bfloat16()
            for after in (None, "gelu")
        )
        with torch.inference_mode():
            layers = (dense, plain, torch.nn.Sequential(dense, torch.nn.GELU()), gelu)
            times = [median_us(partial(layer, x)) for layer in layers]
        problem = Problem(Chain.parse(text), "bfloat16", False, epilogue=Epilogue(bias=True))
        ways = ", ".join(planner.plan_of(problem, ROWS).ways)
        print(
            f"{n} -> {m} {text} by {ways}: {times[1]:.1f} of {times[0]:.1f} us "
            f"({times[1] / times[0]:.2f}); with GELU {times[3]:.1f} of {times[2]:.1f} us "
            f"({times[3] / times[2]:.2f})"
        )


if __name__ == "__main__":
    main()
