"""The gradients of a chain's weights and bias: in one launch, a launch per factor, and dense.

    python docs/experiments/weight_gradients.py --chains [--tiles 2] [--dtype bfloat16]

Every kernel is checked against float64 first, on results that hold NaN, for rows up to 8,200 and
for the timed rows. Times, in us: "cold", one call alone with an empty L2 cache; "graph", of
consecutive calls in a CUDA graph. "one launch per factor" is ksopt's earlier implementation: its
kernel, or torch.bmm, for each weight, and a sum of rows where the first kernel does not compute it.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ksopt.kernels import chain_gradients, weight_gradients
from ksopt.kernels.families import chain_grads_launcher as launcher
from ksopt.kernels.families import chain_grads_wgmma16 as kernels
from ksopt.kernels.families.chain_grads_wgmma16 import Chain, Config, Launch, Tile
from ksopt.kernels.families.weight_grad import WeightGradient
from ksopt.kernels.problem import DeviceSpec
from ksopt.measure import timing
from ksopt.ops.weight_gradient import weight_grad_decomposed
from ksopt.patterns import chain as patterns

# Rows, inputs, outputs, chain: the layers of a ViT-S/16 and of GPT-2 medium.
LAYERS = (
    (25_216, 384, 1536, "(1,768,64,2)*(2,64,192,1)"),
    (25_216, 1536, 384, "(1,192,64,2)*(2,64,768,1)"),
    (25_216, 384, 384, "(1,192,64,2)*(2,64,192,1)"),
    (4096, 1024, 1024, "(1,512,128,2)*(2,128,512,1)"),
    (4096, 1024, 4096, "(1,2048,128,2)*(2,128,512,1)"),
    (4096, 4096, 1024, "(1,512,128,2)*(2,128,2048,1)"),
)
CHECKED: tuple[tuple[str, Config, tuple[int, int]], ...] = (
    ("(1,20,40,2)*(2,40,40,1)", Config(1, 1, Tile(1, 1), Tile(1, 1)), (3, 1)),
    ("(2,16,24,3)*(6,24,40,1)", Config(2, 3, Tile(2, 2), Tile(1, 1)), (1, 1)),
    ("(1,136,72,2)*(2,72,264,1)", Config(2, 8, Tile(2, 4), Tile(1, 4)), (1, 2)),
    ("(1,5,9,8)*(3,24,8,1)", Config(4, 4, Tile(1, 2), Tile(4, 1)), (1, 1)),
)
CALLS = 20  # of a graph


def operands(chain: Chain, rows: int, dtype: torch.dtype) -> launcher.FourRows:
    """Random grad, between, grad_between and x."""
    left, right = chain

    def draw(features: int) -> Tensor:
        return torch.randn(rows, features, device="cuda").to(dtype)

    of_y, between = draw(left.out_features), draw(left.in_features)
    return of_y, between, draw(right.out_features), draw(right.in_features)


def check(kernel: launcher.ChainGradients, rows_of_operands: launcher.FourRows) -> float:
    """The largest error relative to the largest element, of both weights and the bias.

    Raises:
        AssertionError: the error exceeds rounding, or a second call has another result.
    """
    grad, between, grad_between, x = rows_of_operands
    runs = []
    for _ in range(2):
        left, right = (x.new_full(p.weight_shape, torch.nan) for p in kernel.chain)
        bias = x.new_full((grad.shape[-1],), torch.nan)
        elements = sum(launcher.share_elements(kernel.chain, kernel.launch, True))
        shares = x.new_full((elements,), torch.nan, dtype=torch.float32) if elements else None
        kernel.write(rows_of_operands, (left, right, bias), shares)
        runs.append((left, right, bias))
    left_p, right_p = kernel.chain
    truth = (
        weight_grad_decomposed(grad.double(), between.double(), left_p.a, left_p.d, False),
        weight_grad_decomposed(grad_between.double(), x.double(), right_p.a, right_p.d, False),
        grad.double().sum(0),
    )
    worst = 0.0
    for one, again, right_one in zip(*runs, truth, strict=True):
        assert torch.equal(one, again), f"{kernel.chain}: not the same at every call"
        error = float((one.double() - right_one).abs().max() / right_one.abs().max())
        assert error <= 2**-8, f"{kernel.chain}, {x.shape[0]} rows: {error}"
        worst = max(worst, error)
    return worst


def one_launch_per_factor(
    chain: Chain, rows_of_operands: launcher.FourRows, spec: DeviceSpec
) -> Callable[[], object]:
    """ksopt's earlier implementation: the launches that `weight_gradients` selects."""
    grad, between, grad_between, x = rows_of_operands
    dtype, rows = str(x.dtype).removeprefix("torch."), x.shape[0]
    calls: list[Callable[[], object]] = []
    has_bias = False
    for p, dy, z in ((chain[0], grad, between), (chain[1], grad_between, x)):
        if weight_gradients.is_faster(p, dtype, rows, spec):
            launch, with_bias = weight_gradients.best(p, dtype, rows, spec), dy is grad
            assert launch is not None
            kernel = WeightGradient(p, dtype, launch, 0, with_bias)
            calls.append(functools.partial(kernel, dy, z))
            has_bias = has_bias or with_bias
        else:
            calls.append(functools.partial(weight_grad_decomposed, dy, z, p.a, p.d, False))
    if not has_bias:
        calls.append(lambda: grad.sum(0))
    return lambda: [call() for call in calls]


def distinct(chain: Chain, rows: int, spec: DeviceSpec) -> Iterator[Launch]:
    """The launches, best predicted first, one for each config."""
    launches = [
        one
        for config in kernels.configs(chain)
        for one in kernels.launches_of(config, chain, rows, spec)
    ]
    seen = set()
    for one in sorted(launches, key=lambda it: kernels.predicted_us(it, chain, rows, spec)):
        if one.config not in seen:
            seen.add(one.config)
            yield one


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """`CALLS` calls captured as one graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return graph.replay


def main(options: argparse.Namespace) -> None:
    """Check small kernels of all kinds, then check and time those of each layer."""
    began = time.monotonic()
    torch.manual_seed(0)
    spec, dtype = DeviceSpec.of_device(0), getattr(torch, options.dtype)
    for text, config, shares in CHECKED:
        left, right = patterns.Chain.parse(text)
        for rows in (1, 63, 777, 8200):
            launch = kernels.launch_of(config, rows, shares)
            kernel = launcher.ChainGradients((left, right), options.dtype, launch, 0, True)
            check(kernel, operands((left, right), rows, dtype))
    print(f"small chains are right ({time.monotonic() - began:.0f} s)", flush=True)
    for rows, n, m, text in LAYERS:
        left, right = patterns.Chain.parse(text)
        _compare((left, right), rows, (n, m), options, spec)
    print(f"{time.monotonic() - began:.0f} s")


def _compare(
    chain: Chain, rows: int, dense: tuple[int, int], options: argparse.Namespace, spec: DeviceSpec
) -> None:
    dtype: torch.dtype = getattr(torch, options.dtype)
    rows_of_operands = operands(chain, rows, dtype)
    dense_x, dense_grad = (torch.randn(rows, n, device="cuda").to(dtype) for n in dense)
    ways: dict[str, Callable[[], object]] = {
        "dense": lambda: (dense_grad.T @ dense_x, dense_grad.sum(0)),
        "one launch per factor": one_launch_per_factor(chain, rows_of_operands, spec),
    }
    by_factors = chain_gradients.by_factors_us(chain, options.dtype, rows, spec, True)
    notes = {"one launch per factor": f"predicted {by_factors:.1f}"}
    for _, launch in zip(range(options.tiles), distinct(chain, rows, spec), strict=False):
        config = launch.config
        tiles = ", ".join(f"{tile.m}x{tile.n}" for tile in (config.left, config.right))
        name = f"{tiles} /{config.cluster} x {launch.shares}"
        kernel = launcher.ChainGradients(chain, options.dtype, launch, 0, True)
        error = max(check(kernel, operands(chain, few, dtype)) for few in (1, 777, rows))
        ways[name] = functools.partial(kernel, *rows_of_operands)
        guess = kernels.predicted_us(launch, chain, rows, spec)
        notes[name] = f"{error:.0e}, predicted {guess:.1f}"
    cold = timing.measure(ways, "cuda", max_seconds=0.5, precision=0.02)
    graphs = {name: captured(way) for name, way in ways.items()}
    warm = timing.measure(graphs, "cuda", max_seconds=0.5, precision=0.02, cold=False)
    print(f"{dense[0]} -> {dense[1]}, {rows} rows, {chain[0]}*{chain[1]}:")
    for name in ways:
        note = f" ({notes[name]})" if name in notes else ""
        print(
            f"  {name}: cold {cold[name].median_us:.1f}, "
            f"graph {warm[name].median_us / CALLS:.2f}{note}",
            flush=True,
        )
