"""What an eager call costs the host, without waiting for the device.

    python tests/gpu/host_time.py

Prints microseconds a call, the least of 20 rounds of 500: of ksopt's operator, its layer, and of
torch's own for comparison. The device's work is small, so that it never holds the host up.
"""

import math
import time
from collections.abc import Callable

import torch

from ksopt.kernels import cuda
from ksopt.nn import KSLinear

ROUNDS, CALLS = 20, 500


def host_us(call: Callable[[], object]) -> float:
    call()
    best = math.inf
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        best = min(best, (time.perf_counter() - began) / CALLS * 1e6)
    return best


@torch.no_grad()
def main() -> None:
    for dtype in (torch.float16, torch.float32):
        x = torch.randn(16, 4096, device="cuda", dtype=dtype)
        weight = torch.randn(8, 512, 512, 1, device="cuda", dtype=dtype)
        dense = torch.randn(4096, 4096, device="cuda", dtype=dtype)
        layer = KSLinear(4096, 4096, "(8,512,512,1)", device="cuda", dtype=dtype)
        bare = KSLinear(4096, 4096, "(8,512,512,1)", bias=False, device="cuda", dtype=dtype)
        linear = torch.nn.Linear(4096, 4096, device="cuda", dtype=dtype)
        ks_mm = torch.ops.ksopt.ks_mm.default
        torch_linear = torch.nn.functional.linear
        calls: dict[str, Callable[[], object]] = {
            "ks_mm": lambda f=ks_mm, x=x, w=weight: f(x, w),
            "KSLinear without bias": lambda f=bare, x=x: f(x),
            "KSLinear": lambda f=layer, x=x: f(x),
            "torch.empty": lambda x=x: torch.empty(16, 4096, device="cuda", dtype=x.dtype),
            "torch's linear": lambda f=torch_linear, x=x, w=dense: f(x, w),
            "nn.Linear": lambda f=linear, x=x: f(x),
        }
        chosen = cuda.choice_for(x, weight, False).name
        print(f"{str(dtype).removeprefix('torch.')}, (8,512,512,1), 16 rows, chosen: {chosen}")
        for name, call in calls.items():
            print(f"  {name}: {host_us(call):.1f} us")


if __name__ == "__main__":
    main()
