"""The host's time of a call, without waiting for the device, broken down by part.

    python docs/experiments/host_time.py [cpu|cuda]
    python docs/experiments/host_time.py [cpu|cuda] --steps   # eager training steps, with a profile

Prints microseconds per call, the least of 10 rounds of 500. First come the products and layers that
compiled graphs call, by the host library's own kernels and by Python's above its tables. Then come
whole layers of two factors with bias and GELU, eager and compiled, inference and a training step,
beside `nn.Linear` with GELU, and a training step of many layers. Last, on CUDA, for each layout and
dtype: ksopt's operator and layer, their parts, and torch's own products of the same size. The
device's work is small, so that it never delays the host; on a CPU the work is part of the time. It
has a clock of its own because ksopt.measure times the device, or waits for it.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn import functional as F
from torch.profiler import profile, supported_activities

from ksopt import ops
from ksopt.jit import host
from ksopt.kernels import weight_table
from ksopt.kernels.backends import cuda
from ksopt.kernels.launcher import HostLauncher, Launcher, _Arguments, _strides
from ksopt.kernels.packing_launcher import PreparingLauncher
from ksopt.nn import KSLinear
from ksopt.patterns.chain import Chain, Pattern

ROUNDS, CALLS = 10, 500
ROWS = 16
LARGE, SMALL = Pattern(8, 512, 512, 1), Pattern(4, 128, 128, 4)
CASES = [
    (LARGE, torch.float16, False),
    (LARGE, torch.bfloat16, False),
    (LARGE, torch.float32, False),
    (LARGE, torch.float16, True),
    (LARGE, torch.float32, True),
    (SMALL, torch.float16, True),
    (SMALL, torch.float32, False),
]
LAYERS = [
    ("(1,16,8,2)*(2,8,16,1)", torch.float32),
    ("(1,192,48,2)*(2,48,192,1)", torch.float32),
    ("(1,192,48,2)*(2,48,192,1)", torch.bfloat16),
]
PROFILED, MOST_OPERATORS = 20, 25  # steps, and lines of a profile
MANY, MANY_TEXT = 12, "(1,8,8,8)*(8,8,8,1)"
Calls = Iterator[tuple[str, Callable[[], object]]]


def host_us(call: Callable[[], object]) -> float:
    return host_us_in_turns([call])[0]


def host_us_in_turns(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Of each call; the rounds take turns, because a host's speed changes within a run."""
    for call in calls:
        for _ in range(5):
            call()
    best = [math.inf] * len(calls)
    for _ in range(ROUNDS):
        for at, call in enumerate(calls):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(CALLS):
                call()
            best[at] = min(best[at], (time.perf_counter() - began) / CALLS * 1e6)
    return best


def of_torch(p: Pattern, x: Tensor, last: bool) -> Calls:
    """torch's products of equal rows, inputs and outputs."""
    rows = x.T.contiguous() if last else x
    dense = torch.randn(p.out_features, p.in_features, device="cuda", dtype=x.dtype)
    linear = torch.nn.Linear(p.in_features, p.out_features, device="cuda", dtype=x.dtype)
    blocks = torch.randn(p.a * p.d, ROWS, p.c, device="cuda", dtype=x.dtype)
    matrices = torch.randn(p.a * p.d, p.c, p.b, device="cuda", dtype=x.dtype)
    yield "F.linear", lambda: F.linear(rows, dense)
    yield "nn.Linear", lambda: linear(rows)
    yield "torch.bmm, its operands in order", lambda: torch.bmm(blocks, matrices)


def of_ksopt(p: Pattern, x: Tensor, weight: Tensor, last: bool) -> Calls:
    """The parts of a call, from the smallest to the whole."""
    layout = "batch_last" if last else "batch_first"
    sizes = (p.in_features, p.out_features, str(p))
    layers = [
        KSLinear(*sizes, bias=bias, layout=layout, device="cuda", dtype=x.dtype)
        for bias in (False, True)
    ]
    y_shape = (p.out_features, ROWS) if last else (ROWS, p.out_features)
    yield "torch.empty of y", lambda: torch.empty(y_shape, device="cuda", dtype=x.dtype)
    yield from of_the_kernel(x, weight, last)
    yield "finding what is prepared", lambda: weight_table.of(weight)
    yield "what the host library knows", lambda: cuda.run_known(x, weight, last)
    yield "ks_mm_inner, which compiled graphs call", lambda: ops.ks_mm_inner(x, weight, last)
    out = torch.empty(y_shape, device="cuda", dtype=x.dtype)
    yield (
        "ks_mm_inner.out, which they call with planned memory",
        lambda: ops.ks_mm_inner_out(x, weight, None, last, out=out),
    )
    yield "ks_mm", lambda: ops.ks_mm(x, weight, last)
    yield "ks_mm past the dispatcher", lambda: ops.multiply(x, weight, last)
    yield "KSLinear without bias", lambda: layers[0](x)
    yield "KSLinear", lambda: layers[1](x)


def of_operators(device: str) -> Calls:
    """The products that compiled graphs call, by a small weight, and a layer of two of them."""
    x, weight = torch.randn(ROWS, 64, device=device), torch.randn(8, 8, 8, 1, device=device)
    out = torch.empty(ROWS, 64, device=device)
    for op in (ops.ks_mm_inner, ops.ks_mm_frozen, ops.ks_mm_repacked):
        yield str(op), lambda op=op: op(x, weight)
    for op in (ops.ks_mm_inner_out, ops.ks_mm_repacked_out):
        yield str(op), lambda op=op: op(x, weight, out=out)
    layer = ([weight, torch.randn_like(weight)], torch.randn(64, device=device), None, "gelu")
    yield str(ops.ks_chain_inner), lambda: ops.ks_chain_inner(x, *layer)
    yield str(ops.ks_chain_out), lambda: ops.ks_chain_out(x, *layer, out=out)


@torch.no_grad()
def print_operators(device: str) -> None:
    if host.load() is not None:
        return
    for served, whose in ((False, "Python's kernels"), (True, "the host library's kernels")):
        torch.ops.ksopt_host.serve_products(served)
        print(f"float32, (8,8,8,1), {ROWS} rows, {device}, {whose}")
        for what, call in of_operators(device):
            print(f"  {what}: {host_us(call):.1f} us", flush=True)


class LaunchConfig(ctypes.Structure):
    """The driver's CUlaunchConfig, without attributes."""

    _fields_ = [
        ("blocks", ctypes.c_uint * 3),
        ("threads", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    ]


def of_the_kernel(x: Tensor, weight: Tensor, last: bool) -> Calls:
    """The chosen kernel: the driver's launch by itself, and the host library's launch."""
    call = cuda.choice_for(x, weight, last).call
    if isinstance(call, PreparingLauncher):
        weight, call = call.pack(weight), call.multiply
    if not isinstance(call, HostLauncher):
        return
    driver = ctypes.CDLL("libcuda.so.1")
    config, keep = launch_of(call, x, weight, last)
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(keep))
    version, function = ctypes.c_int(), ctypes.c_void_p()
    yield "ctypes itself", lambda: driver.cuDriverGetVersion(ctypes.byref(version))
    assert driver.cuKernelGetFunction(ctypes.byref(function), ctypes.c_void_p(call.kernel)) == 0
    for name, handle in {"kernel": ctypes.c_void_p(call.kernel), "function": function}.items():

        def launch(handle: ctypes.c_void_p = handle) -> None:
            assert driver.cuLaunchKernelEx(ctypes.byref(config), handle, parameters, None) == 0

        yield f"cuLaunchKernelEx of a CU{name}, by ctypes", launch
    yield "the host library's launch", lambda: call(x, weight)


def launch_of(
    call: Launcher, x: Tensor, weight: Tensor, last: bool
) -> tuple[LaunchConfig, _Arguments]:
    """The launch of csrc/host/kernel_table.hpp, into memory that stays allocated."""
    p, g = call.problem.pattern, call.geometry
    y = torch.empty(p.out_features * ROWS, device="cuda", dtype=x.dtype)
    arguments = _Arguments(
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        y=y.data_ptr(),
        batch=ROWS,
        x_batch_stride=1 if last else x.stride(0),
        x_feature_stride=x.stride(0) if last else 1,
        y_batch_stride=1 if last else p.out_features,
        y_feature_stride=ROWS if last else 1,
        weight_strides=_strides(weight),
    )
    arguments.holds = (x, weight, y)
    tiles = -(-ROWS // g.rows_per_tile) * g.tiles_per_row_tile
    config = LaunchConfig(
        blocks=(min(tiles, g.max_blocks), 1, 1),
        threads=(g.threads, 1, 1),
        shared_bytes=g.shared_bytes,
        stream=torch.cuda.current_stream().cuda_stream,
    )
    return config, arguments


def of_layers(text: str, dtype: torch.dtype, device: str) -> Calls:
    """Calls of a layer of two factors with bias and GELU, and of a dense one of its size."""
    chain = Chain.parse(text)
    sizes = (chain.in_features, chain.out_features)
    ours = KSLinear(*sizes, chain, activation="gelu", device=device, dtype=dtype)
    dense = torch.nn.Sequential(
        torch.nn.Linear(*sizes, device=device, dtype=dtype), torch.nn.GELU()
    )
    x = torch.randn(ROWS, chain.in_features, device=device).to(dtype)
    grad = torch.randn(ROWS, chain.out_features, device=device).to(dtype)
    for name, layer, backend in (("KSLinear", ours, "ksopt"), ("nn.Linear", dense, "inductor")):
        torch._dynamo.reset()
        compiled = torch.compile(layer, backend=backend)
        for how, call in (("eager", layer), ("compiled", compiled)):

            def infer(call: Callable[[Tensor], Tensor] = call) -> None:
                with torch.no_grad():
                    call(x)

            def train(call: Callable[[Tensor], Tensor] = call) -> None:
                call(x).backward(grad)

            def train_cast(call: Callable[[Tensor], Tensor] = call) -> None:
                with torch.autocast(device, torch.bfloat16):
                    y = call(x)
                y.backward(grad.bfloat16())

            yield f"{name}, {how}", infer
            yield f"{name}, {how}, forward and backward", train
            if dtype == torch.float32:
                yield f"{name}, {how}, forward and backward, autocast", train_cast


def print_layers(device: str) -> None:
    if device == "cpu":
        reason = host.load()
        print(f"{torch.get_num_threads()} threads, host library: {reason or 'loaded'}")
    for text, dtype in LAYERS:
        name = str(dtype).removeprefix("torch.")
        print(f"{name}, {text} with bias and GELU, {ROWS} rows, {device}")
        for what, call in of_layers(text, dtype, device):
            print(f"  {what}: {host_us(call):.1f} us", flush=True)


def steps_of(text: str, dtype: torch.dtype, device: str) -> Calls:
    """Eager training steps of a layer of two factors with bias and GELU, and of a dense one.

    In float32 under autocast, too.
    """
    for what, call in of_layers(text, dtype, device):
        if "eager, forward and backward" in what:
            yield what, call


def print_steps(device: str) -> None:
    """Print each eager step's time, its kernels, and the operators that take most of the host's.

    The profiler's own work is part of the operators' times, not of the step's.
    """
    print(f"{torch.get_num_threads()} threads, host library: {host.load() or 'loaded'}")
    for text, dtype in LAYERS:
        steps = list(steps_of(text, dtype, device))
        times = host_us_in_turns([call for _, call in steps])
        for (what, call), us in zip(steps, times, strict=True):
            name = str(dtype).removeprefix("torch.")
            print(f"{name}, {text}, {ROWS} rows, {device}: {what}: {us:.1f} us")
            with profile(activities=supported_activities()) as profiled:
                for _ in range(PROFILED):
                    call()
                if device == "cuda":
                    torch.cuda.synchronize()
            print_profile(profiled)


def print_profile(profiled: profile) -> None:
    of_device = [one for one in profiled.events() if one.device_type != DeviceType.CPU]
    print(f"  {len(of_device) / PROFILED:.1f} kernels and copies on the device per step")
    averages = [one for one in profiled.key_averages() if one.device_type == DeviceType.CPU]
    for one in sorted(averages, key=lambda one: -one.self_cpu_time_total)[:MOST_OPERATORS]:
        us = one.self_cpu_time_total / PROFILED
        print(f"  {us:6.1f} us, {one.count / PROFILED:4.1f} times per step: {one.key}", flush=True)


def print_many(device: str) -> None:
    """Print the time of a forward and a backward pass of many compiled layers in sequence."""
    x = torch.randn(ROWS, 64, device=device)
    layers = {
        "ksopt": lambda: KSLinear(64, 64, MANY_TEXT, device=device),
        "inductor": lambda: torch.nn.Linear(64, 64, device=device),
    }
    for backend, layer in layers.items():
        torch._dynamo.reset()
        model = torch.nn.Sequential(*(layer() for _ in range(MANY)))
        compiled = torch.compile(model, backend=backend)
        us = host_us(lambda compiled=compiled: compiled(x).sum().backward())
        name = type(model[0]).__name__
        print(f"{MANY} x {name} by {backend}, forward and backward: {us:.1f} us", flush=True)


@torch.no_grad()
def print_factors() -> None:
    for p, dtype, last in CASES:
        shape = (p.in_features, ROWS) if last else (ROWS, p.in_features)
        x = torch.randn(shape, device="cuda").to(dtype)
        weight = torch.randn(p.weight_shape, device="cuda").to(dtype)
        ops.ks_mm(x, weight, last)
        choice = cuda.choice_for(x, weight, last)
        known = cuda.run_known(x, weight, last) is not None
        layout = "batch_last" if last else "batch_first"
        name = str(dtype).removeprefix("torch.")
        print(f"{name}, {p}, {layout}, {ROWS} rows, chosen: {choice.name}, known: {known}")
        for calls in (of_ksopt(p, x, weight, last), of_torch(p, x, last)):
            for what, call in calls:
                print(f"  {what}: {host_us(call):.1f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("device", nargs="?", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--steps", action="store_true", help="eager training steps alone")
    args = parser.parse_args()
    device = args.device
    if args.steps:
        print_steps(device)
        return
    print_operators(device)
    print_layers(device)
    print_many(device)
    if device == "cuda":
        print_factors()


if __name__ == "__main__":
    main()
