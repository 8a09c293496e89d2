"""What a batched product costs the host in Python and through the host library, without a GPU.

    python tests/jit/batched_time.py

Prints microseconds a call, the least of 7 rounds, of tiny products on the CPU with a driver that is
played: of the operators that compiled graphs call, of ks_mm, and past torch's dispatcher.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import played_driver
import torch

from ksopt import ops
from ksopt.kernels import cuda, dispatch, packed
from ksopt.kernels.decision import Choice, Decision, _preparing
from ksopt.kernels.pytorch_ways import multiplier
from ksopt.kernels.ways import Way
from ksopt.pattern import Pattern

ROUNDS, CALLS = 7, 430
PATTERNS = (Pattern(8, 4, 4, 1), Pattern(1, 4, 4, 8))


def least_us(call: Callable[[], object]) -> float:
    """Microseconds of a call."""
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        best = min(best, (time.perf_counter() - began) / CALLS * 1e6)
    return best


def nothing_known(*_: object) -> None:
    """In the place of the library."""


def measure(pattern: Pattern, by_library: bool) -> None:
    """Print a line for one pattern."""
    cuda.forget()
    packed.refresh()
    cuda._launch_known = cuda._launch_prepared = None
    x, weight = torch.randn(8, pattern.in_features), torch.randn(pattern.weight_shape)
    out = torch.empty(8, pattern.out_features)
    found = cuda.situation_of(x, weight, False)
    kept, changing = (
        Choice(
            Way("bmm", found.problem, 1.0),
            _preparing(multiplier("bmm", found.problem), weight_is),
            "model",
        )
        for weight_is in ("kept", "fresh")
    )
    cuda.remember(found, x.get_device(), Decision(kept, changing))
    dispatch.run_known = cuda.run_known if by_library else nothing_known
    dispatch.run_known_changing = cuda.run_known_changing if by_library else nothing_known
    calls = {
        "ks_mm_inner.out": lambda: ops.ks_mm_inner_out(x, weight, out=out),
        "ks_mm_changing.out": lambda: ops.ks_mm_changing_out(x, weight, out=out),
        "ks_mm": lambda: ops.ks_mm(x, weight),
        "past the dispatcher": lambda: ops.multiply(x, weight),
    }
    times = ", ".join(f"{name} {least_us(call):.1f}" for name, call in calls.items())
    print(f"{pattern} {'library' if by_library else 'Python'}: {times}", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    torch.ops.ksopt_host = played_driver.library(Path(tempfile.mkdtemp())).ops
    packed.is_capturing = lambda _: False
    dispatch.run = cuda.run
    with torch.no_grad():
        for pattern in PATTERNS:
            for by_library in (False, True):
                measure(pattern, by_library)


if __name__ == "__main__":
    main()
