"""Where a whole model's forward pass spends its time on the GPU, kernel by kernel.

    python docs/experiments/profile_model.py vit --chain "(1,out/2,mid/6,2)*(2,mid/6,in/2,1)"

For the dense model under Inductor and the sparse one under ksopt: the kernels with the longest
total, as torch.profiler saw them in one replay of a CUDA graph, and their sum.
"""

from __future__ import annotations

import argparse
from collections import Counter

import torch
from torch.profiler import ProfilerActivity, profile

from ksopt.bench.models.build import build, size_of

_WAYS = (("dense", "inductor"), ("ks", "ksopt"), ("linear", "ksopt"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--chain", default="half")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--kernels", type=int, default=14, help="how many of them are shown")
    options = parser.parse_args()
    device = torch.device("cuda")
    size = size_of(options.model, layers=options.layers, batch=options.batch)
    built = build(size, getattr(torch, options.dtype), device, rule=options.chain)
    for twin, backend in _WAYS:
        torch._dynamo.reset()
        run = torch.compile(built.twin(twin), backend=backend, mode="reduce-overhead")
        with torch.inference_mode():
            for _ in range(4):
                run(built.inputs)
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as profiled:
                run(built.inputs)
                torch.cuda.synchronize()
        show(f"{twin} by {backend}", profiled, options.kernels)


def show(title: str, profiled: profile, most: int) -> None:
    times: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in profiled.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name] += event.device_time
            calls[event.name] += 1
    print(f"{title}: {sum(times.values()):.0f} us in {sum(calls.values())} launches")
    for name, us in times.most_common(most):
        print(f"{us:9.1f} us {calls[name]:5d} x {us / calls[name]:8.1f}  {name[:110]}")


if __name__ == "__main__":
    main()
