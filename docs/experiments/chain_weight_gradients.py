"""The gradients of chains' weights and biases: in one launch, a launch per factor, and dense.

    python docs/experiments/weight_gradients.py --chains [--tiles 2] [--dtype bfloat16]

Every kernel is checked against float64 first, on results that hold NaN, for rows up to 8,200 and
for the timed rows. Times, in us: "cold", one call alone with an empty L2 cache; "graph", of
consecutive calls in a CUDA graph. "one launch per factor" is ksopt's earlier implementation: its
kernel, or torch.bmm, for each weight, and a sum of rows where the first kernel does not compute it.
Layers of several siblings, chains of the same patterns on one x, are timed in one launch, in one
launch per sibling, and dense as one layer of all outputs.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ksopt.kernels import chain_gradients, weight_gradients
from ksopt.kernels.families import chain_grads_wgmma16 as launcher
from ksopt.kernels.families.common import chain_grads_tile as kernels
from ksopt.kernels.families.common.chain_grads_tile import Chain, Config, Launch, Tile
from ksopt.kernels.families.common.weight_grad import WeightGradient
from ksopt.kernels.problem import DeviceSpec
from ksopt.measure import timing
from ksopt.measure.accuracy import largest_error
from ksopt.ops.weight_gradient import weight_grad_decomposed
from ksopt.patterns import chain as patterns

# Rows, inputs, outputs, chain, siblings: the layers of a ViT-S/16 and of GPT-2 medium.
LAYERS = (
    (25_216, 384, 1536, "(1,768,64,2)*(2,64,192,1)", 1),
    (25_216, 1536, 384, "(1,192,64,2)*(2,64,768,1)", 1),
    (25_216, 384, 384, "(1,192,64,2)*(2,64,192,1)", 1),
    (25_216, 384, 384, "(1,192,64,2)*(2,64,192,1)", 3),
    (4096, 1024, 1024, "(1,512,128,2)*(2,128,512,1)", 1),
    (4096, 1024, 1024, "(1,512,128,2)*(2,128,512,1)", 3),
    (4096, 1024, 4096, "(1,2048,128,2)*(2,128,512,1)", 1),
    (4096, 4096, 1024, "(1,512,128,2)*(2,128,2048,1)", 1),
)
CHECKED: tuple[tuple[str, Config, tuple[int, int]], ...] = (
    ("(1,20,40,2)*(2,40,40,1)", Config(1, 1, Tile(1, 1), Tile(1, 1)), (3, 1)),
    ("(2,16,24,3)*(6,24,40,1)", Config(2, 3, Tile(2, 2), Tile(1, 1)), (1, 1)),
    ("(1,136,72,2)*(2,72,264,1)", Config(2, 8, Tile(2, 4), Tile(1, 4)), (1, 2)),
    ("(1,5,9,8)*(3,24,8,1)", Config(4, 4, Tile(1, 2), Tile(4, 1)), (1, 1)),
)
CALLS = 20  # of a graph
# By theory, not beside PyTorch's error: sums in float32 are rounded once to 16 bit, which is 2**-9
# of them at most, and tensor cores lose less before. With few rows PyTorch is exact by luck.
_ROUNDED_ONCE = 2**-8


def operands(chain: Chain, rows: int, dtype: torch.dtype, siblings: int = 1) -> list[Tensor]:
    """Random: grad of each sibling, between of each, grad_between of each, and x."""
    left, right = chain
    features = (left.out_features, left.in_features, right.out_features)
    widths = [one for one in features for _ in range(siblings)] + [right.in_features]
    return [torch.randn(rows, one, device="cuda").to(dtype) for one in widths]


def each(inputs: Sequence[Tensor]) -> list[list[Tensor]]:
    """grad, between, grad_between and x of each sibling."""
    siblings = len(inputs) // 3
    return [[*inputs[at:-1:siblings], inputs[-1]] for at in range(siblings)]


def check(kernel: launcher.ChainGradients, inputs: Sequence[Tensor]) -> float:
    """The largest error relative to the largest element, of all weights and biases.

    Raises:
        AssertionError: the error exceeds rounding, or a second call has another result.
    """
    x, siblings = inputs[-1], kernel.launch.siblings
    left_p, right_p = kernel.chain
    runs = []
    for _ in range(2):
        shapes: list[tuple[int, ...]] = [left_p.weight_shape, right_p.weight_shape] * siblings
        shapes += [(left_p.out_features,)] * siblings
        results = [x.new_full(shape, torch.nan) for shape in shapes]
        elements = siblings * sum(launcher.share_elements(kernel.chain, kernel.launch, True))
        shares = x.new_full((elements,), torch.nan, dtype=torch.float32) if elements else None
        kernel.write(inputs, results, shares)
        runs.append(results)
    truth, biases = [], []
    for its in each(inputs):
        grad, between, grad_between, _ = (one.double() for one in its)
        truth += [
            weight_grad_decomposed(grad, between, left_p.a, left_p.d, False),
            weight_grad_decomposed(grad_between, x.double(), right_p.a, right_p.d, False),
        ]
        biases.append(grad.sum(0))
    worst = 0.0
    for one, again, right_one in zip(*runs, [*truth, *biases], strict=True):
        assert torch.equal(one, again), f"{kernel.chain}: not the same at every call"
        error = largest_error(one, right_one)
        assert error <= _ROUNDED_ONCE, f"{kernel.chain}, {x.shape[0]} rows: {error}"
        worst = max(worst, error)
    return worst


def one_launch_per_factor(
    chain: Chain, inputs: Sequence[Tensor], spec: DeviceSpec
) -> Callable[[], object]:
    """ksopt's earlier implementation: the launches that `weight_gradients` selects."""
    dtype, rows = str(inputs[-1].dtype).removeprefix("torch."), inputs[-1].shape[0]
    calls: list[Callable[[], object]] = []
    for grad, between, grad_between, x in each(inputs):
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
            calls.append(functools.partial(grad.sum, 0))
    return lambda: [call() for call in calls]


def distinct(chain: Chain, rows: int, spec: DeviceSpec, siblings: int) -> Iterator[Launch]:
    """The launches, best predicted first, one for each config."""
    launches = [
        one
        for config in kernels.configs(chain)
        for one in kernels.launches_of(config, chain, rows, spec, siblings)
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
        for rows, siblings in ((1, 1), (63, 3), (777, 2), (8200, 1), (8200, 4)):
            launch = kernels.launch_of(config, rows, shares, siblings)
            kernel = launcher.ChainGradients((left, right), options.dtype, launch, 0, True)
            check(kernel, operands((left, right), rows, dtype, siblings))
    print(f"small chains are right ({time.monotonic() - began:.0f} s)", flush=True)
    for rows, n, m, text, siblings in LAYERS:
        left, right = patterns.Chain.parse(text)
        _compare((left, right), siblings, rows, (n, m), options, spec)
    print(f"{time.monotonic() - began:.0f} s")


def one_launch_per_sibling(
    chain: Chain, inputs: Sequence[Tensor], dtype: str, spec: DeviceSpec
) -> Callable[[], object]:
    """The launch of one sibling, for each."""
    launch = next(distinct(chain, inputs[-1].shape[0], spec, 1))
    kernel = launcher.ChainGradients(chain, dtype, launch, 0, True)
    several = each(inputs)
    return lambda: [kernel(*one) for one in several]


def _compare(
    chain: Chain,
    siblings: int,
    rows: int,
    dense: tuple[int, int],
    options: argparse.Namespace,
    spec: DeviceSpec,
) -> None:
    dtype: torch.dtype = getattr(torch, options.dtype)
    inputs = operands(chain, rows, dtype, siblings)
    n, m = dense[0], dense[1] * siblings
    dense_x, dense_grad = (torch.randn(rows, one, device="cuda").to(dtype) for one in (n, m))
    ways: dict[str, Callable[[], object]] = {
        "dense": lambda: (dense_grad.T @ dense_x, dense_grad.sum(0)),
        "one launch per factor": one_launch_per_factor(chain, inputs, spec),
    }
    by_factors = chain_gradients.by_factors_us(chain, options.dtype, rows, spec, True)
    notes = {"one launch per factor": f"predicted {siblings * by_factors:.1f}"}
    if siblings > 1:
        each_alone = one_launch_per_sibling(chain, inputs, options.dtype, spec)
        ways["one launch per sibling"] = each_alone
    for _, launch in zip(range(options.tiles), distinct(chain, rows, spec, siblings), strict=False):
        config = launch.config
        tiles = ", ".join(f"{tile.m}x{tile.n}" for tile in (config.left, config.right))
        name = f"{tiles} /{config.cluster} x {launch.shares}"
        kernel = launcher.ChainGradients(chain, options.dtype, launch, 0, True)
        error = max(check(kernel, operands(chain, few, dtype, siblings)) for few in (1, 777, rows))
        ways[name] = functools.partial(kernel, *inputs)
        guess = kernels.predicted_us(launch, chain, rows, spec)
        notes[name] = f"{error:.0e}, predicted {guess:.1f}"
    cold = timing.measure(ways, "cuda", max_seconds=0.5, precision=0.02)
    graphs = {name: captured(way) for name, way in ways.items()}
    warm = timing.measure(graphs, "cuda", max_seconds=0.5, precision=0.02, cold=False)
    times = f"{siblings} x " if siblings > 1 else ""
    print(f"{times}{dense[0]} -> {dense[1]}, {rows} rows, {chain[0]}*{chain[1]}:")
    for name in ways:
        note = f" ({notes[name]})" if name in notes else ""
        print(
            f"  {name}: cold {cold[name].median_us:.1f}, "
            f"graph {warm[name].median_us / CALLS:.2f}{note}",
            flush=True,
        )
