"""The host's time of a training step in torch.compile's graphs, by phase and by number of tensors.

    python docs/experiments/step_host_time.py --layers 4 --length 64

Of the dense model, the one of `KSLinear`, and the same with all parameters of a layer in one.
Prints, in microseconds, how long the host takes for a forward and a backward pass and for setting
gradients to None while the device has nothing else to do, then the time of whole steps in a row and
the sum of their kernels. It has a clock of its own because ksopt.measure times the device.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from ksopt import KSLinear, ks_linear
from ksopt.bench.models.build import Built, build, size_of
from ksopt.bench.models.measuring import loss
from ksopt.conversion.layers import set_module
from ksopt.jit import host

CHAIN = "(1,out/2,mid/6,2)*(2,mid/6,in/2,1)"
STEPS = 200
T = TypeVar("T")


class Joined(nn.Module):
    """A layer of a chain whose factors and bias are one parameter."""

    def __init__(self, layer: KSLinear) -> None:
        super().__init__()
        parts = [*layer.weights, *([] if layer.bias is None else [layer.bias])]
        self.shapes = [part.shape for part in layer.weights]
        self.sizes = [part.numel() for part in parts]
        self.all = nn.Parameter(torch.cat([part.detach().flatten() for part in parts]))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.all.split(self.sizes)
        weights = [part.view(shape) for part, shape in zip(parts, self.shapes, strict=False)]
        return ks_linear(x, weights, parts[-1] if len(parts) > len(weights) else None)


def joined(model: nn.Module) -> nn.Module:
    """The model with `Joined` in place of `KSLinear`."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, KSLinear):
            set_module(model, name, Joined(layer))
    return model


def row_of(title: str, model: nn.Module, backend: str, built: Built) -> str:
    """A line of the table."""
    torch._dynamo.reset()
    run = torch.compile(model, backend=backend, mode="reduce-overhead")
    parameters = list(model.parameters())
    result: list[Tensor] = []

    def forward() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        result[:] = [run(built.inputs)]

    def clear() -> None:
        for parameter in parameters:
            parameter.grad = None

    def step() -> None:
        clear()
        forward()
        loss(result[0], built.targets).backward()

    for _ in range(5):
        step()
    phases: dict[str, list[float]] = {"forward": [], "loss": [], "backward": [], "clearing": []}

    def timed(phase: str, call: Callable[[], T]) -> T:
        torch.cuda.synchronize()
        began = time.perf_counter()
        value = call()
        phases[phase].append(time.perf_counter() - began)
        return value

    for _ in range(STEPS):
        timed("forward", forward)
        value = timed("loss", lambda: loss(result[0], built.targets))
        timed("backward", value.backward)
        timed("clearing", clear)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    whole = (time.perf_counter() - began) / STEPS * 1e6
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    of_device = torch.autograd.DeviceType.CUDA
    kernels = [one for one in profiled.events() if one.device_type == of_device]
    busy = sum(one.device_time for one in kernels)
    medians = [f"{statistics.median(times) * 1e6:.0f}" for times in phases.values()]
    cells = [title, str(len(parameters)), *medians, f"{whole:.0f}", f"{busy:.0f}"]
    return f"| {' | '.join([*cells, str(len(kernels))])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gpt2-124m")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    options = parser.parse_args()
    host.load()  # which would be built while the first step is timed
    size = size_of(options.model, layers=options.layers, batch=1, length=options.length)
    print(
        "| model | parameters | forward | loss | backward | clearing | step | kernels | launches |"
    )
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for title, twin, change, backend in (
        ("dense", "dense", None, "inductor"),
        ("KSLinear", "linear", None, "ksopt"),
        ("KSLinear, one parameter a layer", "linear", joined, "ksopt"),
    ):
        built = build(size, torch.bfloat16, torch.device("cuda"), rule=CHAIN)
        model = built.twin(twin).train()
        model = model if change is None else change(model)
        print(row_of(title, model.cuda().bfloat16(), backend, built), flush=True)


if __name__ == "__main__":
    main()
