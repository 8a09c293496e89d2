"""Runs products and layers repeatedly, for a profiler or for the spread of their times.

    python docs/experiments/profile_products.py float32 "(1,768,768,96)" --seconds 2
    python docs/experiments/profile_products.py bfloat16 "(1,1024,256,2)*(2,256,1024,1)" --calls 4
    ncu --clock-control none --section SpeedOfLight --launch-skip 20 --launch-count 6 \\
        python docs/experiments/profile_products.py float16 "(1,768,192,48)" --calls 4

A chain may have its number of rows behind it, ``(1,5,720,5)@238``, in the place of ``--batch``. One
factor is a product by ``ks_mm``; a chain of several is a `KSLinear` with its bias, in
inference. Prints, for each, the kernels that were chosen, the spread of the times one after
another with caches as they are, and the device's clock, power and reasons for slowing down during
them, by nvidia-smi.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ksopt import KSLinear, ops
from ksopt.kernels import planner
from ksopt.kernels.backends import cuda
from ksopt.kernels.problem import Epilogue, Problem
from ksopt.measure import device_types
from ksopt.measure.benchmark_entry import BenchmarkEntry
from ksopt.measure.interleaved import Rules, race, warm_up_calls
from ksopt.measure.measurement import quantile
from ksopt.patterns.chain import Chain, Pattern

Call = Callable[[], object]
_QUERIED = "clocks.sm,power.draw,clocks_event_reasons.active"
_MOST_CALLS = 1_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dtype")
    parser.add_argument("chains", nargs="+")
    parser.add_argument("--batch", type=int, default=25_088)
    parser.add_argument("--layout", default="batch_first", choices=("batch_first", "batch_last"))
    parser.add_argument("--calls", type=int, default=0, help="so many, without looking at times")
    parser.add_argument("--seconds", type=float, default=2.0)
    args = parser.parse_args()
    for text in args.chains:
        chain, _, rows = text.partition("@")
        one(Chain.parse(chain), int(rows or args.batch), args)
        torch.cuda.empty_cache()


def one(chain: Chain, rows: int, args: argparse.Namespace) -> None:
    last = args.layout == "batch_last"
    shape = (chain.in_features, rows) if last else (rows, chain.in_features)
    x = torch.randn(shape, device="cuda", dtype=getattr(torch, args.dtype))
    call, chosen = product(chain[0], x, last) if len(chain) == 1 else layer(chain, x, last)
    call()  # chooses
    way = chosen()
    torch.cuda.synchronize()
    if args.calls:
        for _ in range(args.calls):
            call()
        torch.cuda.synchronize()
        print(f"{args.dtype} {args.layout} {chain}, {rows} rows: {way}", flush=True)
        return
    query = ["nvidia-smi", "-i", str(torch.cuda.current_device()), "-lms", "100"]
    query += [f"--query-gpu={_QUERIED}", "--format=csv,noheader,nounits"]
    with subprocess.Popen(query, stdout=subprocess.PIPE, text=True) as smi:
        times = samples_us(call, args.seconds)
        smi.terminate()
        assert smi.stdout is not None
        seen = [line.strip().split(", ") for line in smi.stdout if line.count(",") == 2]
    spread = ", ".join(f"{quantile(sorted(times), share):.0f}" for share in (0, 0.1, 0.5, 0.9, 1))
    clocks, watts = ([float(row[place]) for row in seen] for place in (0, 1))
    print(
        f"{args.dtype} {args.layout} {chain}, {rows} rows: {way}\n"
        f"  {len(times)} calls, us: least, p10, median, p90, most {spread}; the first ten "
        f"{[round(us) for us in times[:10]]}\n"
        f"  MHz {min(clocks):.0f} to {max(clocks):.0f}, W {min(watts):.0f} to {max(watts):.0f}, "
        f"reasons {sorted({row[2] for row in seen})}",
        flush=True,
    )


def product(pattern: Pattern, x: Tensor, last: bool) -> tuple[Call, Callable[[], str]]:
    """A product by one factor, and the kernel and tile that it takes."""
    weight = torch.randn(pattern.weight_shape, device=x.device, dtype=x.dtype) * pattern.c**-0.5
    return (
        partial(ops.ks_mm, x, weight, last),
        lambda: str(cuda.choice_for(x, weight, last).candidate.label),
    )


def layer(chain: Chain, x: Tensor, last: bool) -> tuple[Call, Callable[[], str]]:
    """A layer with its bias, in inference, and the kernels that it takes."""
    layout = "batch_last" if last else "batch_first"
    module = KSLinear(chain.in_features, chain.out_features, chain, layout=layout)
    module = module.to(x.device, x.dtype)
    dtype = str(x.dtype).removeprefix("torch.")
    problem = Problem(chain, dtype, last, epilogue=Epilogue(bias=True))
    rows = x.shape[1 if last else 0]

    def call() -> object:
        with torch.inference_mode():
            return module(x)

    return call, lambda: ", ".join(planner.plan_of(problem, rows, device=x.device).ways)


def samples_us(call: Call, seconds: float, device: str = "cuda") -> tuple[float, ...]:
    """Microseconds of consecutive calls: those of a race with no rival."""
    timer = device_types.timer_of(torch.device(device), cold=False)
    rules = Rules(warm_up=warm_up_calls(1), budget_s=seconds, most_rounds=_MOST_CALLS)
    (result,) = race([BenchmarkEntry("call", call)], timer, rules)
    return result.samples_us


if __name__ == "__main__":
    main()
