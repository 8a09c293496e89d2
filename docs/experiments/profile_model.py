"""The GPU time of a whole model's forward pass, or training step, by kernel.

    python docs/experiments/profile_model.py vit --chain "(1,out/2,mid/6,2)*(2,mid/6,in/2,1)"

Prints, for the dense model under Inductor and the sparse one under ksopt, the kernels with the
longest total in one replay of a CUDA graph, by torch.profiler, and their sum. ``--train`` profiles
a forward and a backward pass; ``--mode default`` records no graph, and times a step without one.
``--recorded`` records all of a step, the optimizer's too, in one graph, as a training loop of few
rows may do: then a step costs the host one launch.
``--autocast`` computes in a dtype with weights of ``--dtype``, as in mixed-precision training. The
time of a step, in the title, is by the host's clock over ten in a row: what a training loop waits
for, host included, where ksopt.measure times the device alone.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import pstats
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ksopt.bench.models.build import Built, build, size_of
from ksopt.bench.models.measuring import loss
from ksopt.jit import host

_WAYS = {"dense": "inductor", "ks": "ksopt", "linear": "ksopt"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--chain", default="half")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--autocast", choices=("bfloat16", "float16"), help="dtype to compute in")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--length", type=int, help="tokens of a sequence")
    parser.add_argument("--kernels", type=int, default=14, help="how many of them are shown")
    parser.add_argument("--train", action="store_true", help="forward and backward pass")
    parser.add_argument("--mode", default="reduce-overhead", help="of torch.compile")
    parser.add_argument("--recorded", action="store_true", help="the whole step in one graph")
    parser.add_argument("--host", type=int, default=0, help="functions of the host's profile, too")
    parser.add_argument("--ways", nargs="+", default=list(_WAYS), choices=_WAYS)
    options = parser.parse_args()
    host.load()  # which would be built while the first step is timed
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = size_of(options.model, layers=options.layers, batch=options.batch, length=options.length)
    built = build(size, getattr(torch, options.dtype), device, rule=options.chain)
    autocast = torch.autocast(
        device.type, getattr(torch, options.autocast or "bfloat16"), bool(options.autocast)
    )
    for twin in options.ways:
        torch._dynamo.reset()
        backend = _WAYS[twin]
        model = built.twin(twin).train(options.train)
        mode = "default" if options.recorded else options.mode
        run = torch.compile(model, backend=backend, mode=mode)
        forward = autocast(partial(run, built.inputs))
        step = partial(_step, forward, model, built) if options.train else forward
        with contextlib.nullcontext() if options.train else torch.inference_mode():
            began = time.perf_counter()
            for at in range(4):
                torch.compiler.cudagraph_mark_step_begin()
                step()
                if at == 0:
                    print(f"{twin}: the first took {time.perf_counter() - began:.1f} s", flush=True)
            if options.recorded:
                step = _recorded(step, model)
            took = _step_us(step)
            with profile(activities=[ProfilerActivity.CUDA]) as profiled:
                torch.compiler.cudagraph_mark_step_begin()
                step()
                torch.cuda.synchronize()
            if options.host:
                show_host(step, options.host)
        show(f"{twin} by {backend}, {took:.0f} us", profiled, options.kernels)


def _step(forward: Callable[[], Any], model: torch.nn.Module, built: Built) -> None:
    model.zero_grad()
    loss(forward(), built.targets).backward()


def _recorded(step: Callable[[], object], model: torch.nn.Module) -> Callable[[], object]:
    """A replay of a step and, behind it, of an optimizer's, if there are gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def whole() -> None:
        step()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            whole()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        whole()
    return graph.replay


def _step_us(step: Callable[[], object], times: int = 10) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(times):
        torch.compiler.cudagraph_mark_step_begin()
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / times * 1e6


def show_host(step: Callable[[], object], most: int, times: int = 10) -> None:
    """Print Python's time by function over ``times`` steps, autograd's thread included."""
    profiler = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):
        profiler.enable()
        for _ in range(times):
            torch.compiler.cudagraph_mark_step_begin()
            step()
        profiler.disable()
    torch.cuda.synchronize()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(most)


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
