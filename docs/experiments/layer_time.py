"""Times of layers and MLPs, `KSLinear` beside `nn.Linear`, for docs/development/chains.md.

    python docs/experiments/layer_time.py            # one layer with its bias; q, k, v of one input
    python docs/experiments/layer_time.py --features 4096   # of those, layers of so many features
    python docs/experiments/layer_time.py --features 1024 --rows 16 256     # of so many rows
    python docs/experiments/layer_time.py --graphs --features 1024 4096 --rows 1 16 256
    python docs/experiments/layer_time.py --siblings        # of those, q, k, v
    python docs/experiments/layer_time.py --mlps     # two layers, GELU between, residual; compiled
    python docs/experiments/layer_time.py --wide     # 4,096 rows of wider ones, and of SwiGLU
    python docs/experiments/layer_time.py --gates    # silu(a(x)) * b(x), one launch and others
    python docs/experiments/layer_time.py --casts    # layers whose result is returned in float32

With `--graphs` layers run in CUDA graphs, and each call reads other weights from memory.
With `--kernels` it also prints the kernels of a chain's call, by torch's profiler.
With `--max-autotune` layers are compared with dense ones by that mode, too: half a minute each.

The L2 cache is emptied before each sample; ways take turns, medians of 30. Kernels are chosen by
measuring first.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

import ksopt
from ksopt import ops
from ksopt.compile.backend import collected
from ksopt.kernels import plan_autotuner, planner
from ksopt.kernels.by_layers import ByLayers
from ksopt.kernels.operands import random_operands
from ksopt.kernels.problem import Epilogue, Problem, SecondLayer
from ksopt.measure import cuda_graphs, timing
from ksopt.measure.interleaved import BUDGET_S
from ksopt.patterns.chain import Chain

ROWS = 25_088
LAYERS = (
    (768, 768, "(1,384,96,2)*(2,96,384,1)"),
    (1024, 1024, "(1,512,128,2)*(2,128,512,1)"),
    (2048, 2048, "(1,1024,256,2)*(2,256,1024,1)"),
    (2048, 2048, "(1,2048,256,1)*(1,256,2048,1)"),
    (4096, 4096, "(1,2048,512,2)*(2,512,2048,1)"),
    (4096, 4096, "(1,4096,512,1)*(1,512,4096,1)"),
    (384, 1536, "(1,768,64,2)*(4,32,96,1)"),
    (1536, 384, "(1,192,48,2)*(2,48,768,1)"),
    (384, 384, "(1,192,48,2)*(2,48,192,1)"),
)
SIBLINGS = ("(1,192,64,2)*(4,32,96,1)", "(1,192,48,2)*(2,48,192,1)")
MLPS = (
    ("(1,384,64,4)*(2,128,192,1)", "(1,96,64,4)*(4,64,384,1)"),
    ("(1,768,64,2)*(2,64,192,1)", "(1,192,48,2)*(2,48,768,1)"),
    ("(1,384,32,4)*(2,64,192,1)", "(1,96,32,4)*(4,32,384,1)"),
)
WIDE_ROWS = 4_096
# n -> m -> n, GELU between, residual: up, down; SwiGLU: gate and up, down. Each with a quarter and
# a sixth of the weights.
WIDE = (
    (False, "(1,2048,192,2)*(2,192,512,1)", "(1,512,192,2)*(2,192,2048,1)"),
    (False, "(1,2048,128,2)*(2,128,512,1)", "(1,512,128,2)*(2,128,2048,1)"),
    (True, "(1,5504,704,2)*(2,704,2048,1)", "(1,2048,704,2)*(2,704,5504,1)"),
    (True, "(1,5504,512,2)*(2,512,2048,1)", "(1,2048,512,2)*(2,512,5504,1)"),
)
GATES = (
    "(1,512,96,4)*(4,96,192,1)",
    "(1,1024,128,2)*(2,128,256,1)",
    "(1,1408,128,2)*(2,128,512,1)",
)
CAST_ROWS = (16, 4_096, 25_088)
_SAMPLES = 30


def medians_us(calls: Sequence[Callable[[], object]], device: str = "cuda") -> list[float]:
    """The median microseconds of each call with none of its operands in the L2 cache."""
    named = {str(at): call for at, call in enumerate(calls)}
    results = timing.measure(named, device, min_repeats=_SAMPLES, max_repeats=_SAMPLES)
    if any(result.is_host_late for result in results.values()):
        print("# the host was late: times of the next line hold a part of its")
    return [result.median_us for result in results.values()]


def print_kernels(call: Callable[[], object]) -> None:
    """Print the kernels of a call, none of whose operands are in the L2 cache, and their times."""
    flush = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    of_device = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[of_device], acc_events=True) as profile:
        for _ in range(_SAMPLES):
            flush.zero_()
            call()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and event.device_time > 0:
            times.setdefault(event.name, []).append(event.device_time)
    for name, several in times.items():
        median = statistics.median(several)
        print(f"#   {len(several) / _SAMPLES:.0f} x {median:.1f} us {name[:90]}", flush=True)


def ways_of_dense(layer: nn.Module, x: Tensor, autotunes: bool) -> list[Callable[[], object]]:
    """A dense layer: eager, compiled by Inductor, and with max-autotune if requested."""
    modes = (None, "max-autotune-no-cudagraphs")[: 2 if autotunes else 1]
    compiled = [partial(torch.compile(layer, dynamic=False, mode=mode), x) for mode in modes]
    return [partial(layer, x), *compiled]


class Apart(nn.Module):
    """Layers that read the same input."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [layer(x) for layer in self.layers]


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(functional.gelu(self.up(x)))
        return y


def time_mlps() -> None:
    """Print a line for each MLP: compiled, as an operator, each layer by its own plan, dense."""
    torch.manual_seed(0)
    for up, down in (map(Chain.parse, texts) for texts in MLPS):
        n, hidden = up.in_features, up.out_features
        x = torch.randn(ROWS, n, device="cuda", dtype=torch.bfloat16)
        dense = Block(nn.Linear(n, hidden), nn.Linear(hidden, n)).cuda().bfloat16()
        first, last = ksopt.KSLinear(n, hidden, up), ksopt.KSLinear(hidden, n, down)
        block = Block(first, last).cuda().bfloat16()
        second = SecondLayer(down, Epilogue(True, "none", True))
        after = Epilogue(True, "gelu")
        problem = Problem(up, "bfloat16", False, epilogue=after, second=second)
        weights = (list(first.weights), list(last.weights))
        operands = (x, *weights, first.bias, last.bias, x, "gelu")
        apart = (x, (*first.weights, *last.weights), first.bias, last.bias, x)
        with torch.no_grad(), collected() as reports:
            ways: tuple[Callable[[], object], ...] = (
                partial(torch.compile(dense, dynamic=False), x),
                partial(dense, x),
                partial(torch.compile(block, dynamic=False, backend="ksopt"), x),
                partial(ops.ks_mlp, *operands),
                partial(ByLayers(problem), *apart),
            )
            times = medians_us(ways)
        taken = sum(report.passes["mlps_in_one_launch"] for report in reports)
        dense_us = min(times[:2])
        plan = ", ".join(planner.plan_of(problem, ROWS).ways)
        print(
            f"{n} -> {hidden} -> {n} {up} {down}: compiled {times[2]:.1f} us, {taken} MLPs in one "
            f"launch; ks_mlp by {plan} {times[3]:.1f}; two layers {times[4]:.1f}; dense "
            f"{times[0]:.1f} compiled, {times[1]:.1f} eager; share "
            f"{min(times[2:4]) / dense_us:.2f}"
        )


class SwiGlu(nn.Module):
    """A SwiGLU block: the product of two layers, one with SiLU, and a layer after it."""

    def __init__(self, gate: nn.Module, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.gate, self.up, self.down = gate, up, down

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return y


def time_wide(autotunes: bool) -> None:
    """Print a line for each of `WIDE`, compiled; dense ones by max-autotune, too, if requested."""
    dense_us: dict[tuple[bool, int, int], list[float]] = {}
    for is_gated, *texts in WIDE:
        up, down = map(Chain.parse, texts)
        n, m = up.in_features, up.out_features
        x = torch.randn(WIDE_ROWS, n, device="cuda", dtype=torch.bfloat16)
        kind, ups = (SwiGlu, 2) if is_gated else (Block, 1)
        dense = kind(*(nn.Linear(n, m) for _ in range(ups)), nn.Linear(m, n)).cuda().bfloat16()
        firsts = (ksopt.KSLinear(n, m, up) for _ in range(ups))
        sparse = kind(*firsts, ksopt.KSLinear(m, n, down)).cuda().bfloat16()
        with torch.no_grad(), collected() as reports:
            if (is_gated, n, m) not in dense_us:
                modes = (None, "max-autotune-no-cudagraphs")[: 2 if autotunes else 1]
                several = [torch.compile(dense, dynamic=False, mode=mode) for mode in modes]
                dense_us[is_gated, n, m] = medians_us([partial(one, x) for one in several])
            compiled = torch.compile(sparse, dynamic=False, backend="ksopt")
            (us,) = medians_us([partial(compiled, x)])
        share = sum(chain.nnz * count for chain, count in ((up, ups), (down, 1)))
        share /= (ups + 1) * n * m
        usual, *tuned = dense_us[is_gated, n, m]
        passes = {name: count for name, count in reports[-1].passes.items() if count}
        print(
            f"{'SwiGLU' if is_gated else 'MLP'} {n} -> {m} -> {n} {up} {down}, {share:.0%} of the "
            f"weights: {us:.1f} us; dense {usual:.1f}"
            f"{''.join(f', max-autotune {one:.1f}' for one in tuned)}; share "
            f"{us / min([usual, *tuned]):.2f}; {passes}",
            flush=True,
        )


def time_gates() -> None:
    """Print a line for each of `GATES`: the fastest time of each way that raced, and dense."""
    for text in GATES:
        for rows in (WIDE_ROWS, ROWS):
            chain = Chain.parse(text)
            after = Epilogue(activation="silu_gate")
            problem = Problem(chain, "bfloat16", False, epilogue=after, siblings=2)
            operands = random_operands(problem, rows, torch.device("cuda"))
            a, b = (nn.Linear(chain.in_features, chain.out_features) for _ in range(2))
            dense = SwiGlu(a, b, nn.Identity()).cuda().bfloat16()
            compiled = torch.compile(dense, dynamic=False)
            with torch.no_grad():
                record = plan_autotuner.tune(operands, problem, BUDGET_S)
                (dense_us,) = medians_us([partial(compiled, operands.x)])
            assert record is not None
            best: dict[str, float] = {}
            for one in record.timed:
                if one.weight != "repacked":
                    best[one.way] = min(one.median_us, best.get(one.way, one.median_us))
            ways = ", ".join(f"{way} {us:.1f} us" for way, us in best.items())
            print(f"{text} twice, {rows} rows: {ways}; dense {dense_us:.1f}", flush=True)


class InFloat32(nn.Module):
    """A layer whose result is returned in float32."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x).float()
        return y


def time_casts() -> None:
    """Print a line for each of `LAYERS` and `CAST_ROWS`: cast by the layer's launch, or behind."""
    for (n, m, text), rows in itertools.product(LAYERS, CAST_ROWS):
        x = torch.randn(rows, n, device="cuda", dtype=torch.bfloat16)
        dense = InFloat32(nn.Linear(n, m)).cuda().bfloat16()
        sparse = InFloat32(ksopt.KSLinear(n, m, text)).cuda().bfloat16()
        with torch.no_grad(), collected() as reports:
            compiled = torch.compile(sparse, dynamic=False, backend="ksopt")
            ways = (
                partial(torch.compile(dense, dynamic=False), x),
                partial(compiled, x),
                partial(sparse, x),
                partial(sparse.layer, x),
            )
            dense_us, us, behind_us, bare_us = medians_us(ways)
        after = Epilogue(True, in_float32=True)
        plan = planner.plan_of(Problem(Chain.parse(text), "bfloat16", False, epilogue=after), rows)
        fused = reports[-1].passes["layers_in_one_launch"]
        print(
            f"{n} -> {m} {text}, {rows} rows: {us:.1f} us by {', '.join(plan.ways)} ({fused} with "
            f"its cast); cast behind {behind_us:.1f}; without a cast {bare_us:.1f}; dense "
            f"{dense_us:.1f}; share {us / dense_us:.2f}",
            flush=True,
        )


def time_siblings(autotunes: bool, lists_kernels: bool) -> None:
    """Print a line for q, k, v of one input, beside one dense layer, and beside three."""
    for text in SIBLINGS:
        chain = Chain.parse(text)
        sizes = (chain.in_features, chain.out_features)
        x = torch.randn(ROWS, sizes[0], device="cuda", dtype=torch.bfloat16)
        # Outside of inference_mode, whose parameters have no versions, and are never cached.
        stacked = ksopt.KSStacked([ksopt.KSLinear(*sizes, chain) for _ in range(3)])
        stacked = stacked.cuda().bfloat16()
        one = nn.Linear(sizes[0], 3 * sizes[1]).cuda().bfloat16()
        three = Apart([nn.Linear(*sizes) for _ in range(3)]).cuda().bfloat16()
        with torch.inference_mode():
            ways = (partial(stacked, x), partial(three, x))
            dense = ways_of_dense(one, x, autotunes)
            us, three_us, *one_us = medians_us([*ways, *dense])
            if lists_kernels:
                print_kernels(ways[0])
        times = ", ".join(f"{time:.1f}" for time in one_us)
        print(
            f"3 x {text}: {us:.1f} us; dense as one layer {times} (eager, compiled, if requested "
            f"max-autotune), as three {three_us:.1f}; share {us / min(one_us):.2f}",
            flush=True,
        )


def layers_of(features: Sequence[int]) -> list[tuple[int, int, str]]:
    """The layers of so many features; of none: all."""
    return [layer for layer in LAYERS if not features or layer[0] in features]


def plan_of(text: str, rows: int) -> str:
    """The launches of a layer with its bias, in words."""
    problem = Problem(Chain.parse(text), "bfloat16", False, epilogue=Epilogue(bias=True))
    plan = planner.plan_of(problem, rows)
    last = [f"with {name}" for name in plan.within.names]
    return " ".join([", ".join(plan.ways), *last, *(f"and {one}" for one in plan.behind.names)])


def time_layers(
    autotunes: bool,
    features: Sequence[int],
    numbers_of_rows: Sequence[int],
    lists_kernels: bool,
) -> None:
    """Print a line for each layer of so many features (of none: for all) and number of rows."""
    for (n, m, text), rows in itertools.product(layers_of(features), numbers_of_rows):
        x = torch.randn(rows, n, device="cuda", dtype=torch.bfloat16)
        dense = torch.nn.Linear(n, m).cuda().bfloat16()
        plain, gelu = (
            ksopt.KSLinear(n, m, text, activation=after).cuda().bfloat16()
            for after in (None, "gelu")
        )
        with torch.inference_mode():
            layers = (plain, torch.nn.Sequential(dense, torch.nn.GELU()), gelu)
            calls = [partial(layer, x) for layer in layers]
            times = medians_us([*calls, *ways_of_dense(dense, x, autotunes)])
            if lists_kernels:
                print_kernels(calls[0])
        plain_us, dense_gelu_us, gelu_us, *tuned = times
        dense_us = min(tuned)
        print(
            f"{n} -> {m} {text}, {rows} rows, by {plan_of(text, rows)}: "
            f"{plain_us:.1f} of {dense_us:.1f} us ({plain_us / dense_us:.2f}; dense "
            f"{', '.join(f'{us:.1f}' for us in tuned)}: eager, compiled, then max-autotune); with "
            f"GELU {gelu_us:.1f} of {dense_gelu_us:.1f} us "
            f"({gelu_us / dense_gelu_us:.2f})",
            flush=True,
        )


def time_in_graphs(
    autotunes: bool, features: Sequence[int], numbers_of_rows: Sequence[int]
) -> None:
    """Print a line for each layer as `time_layers` does, of calls in CUDA graphs."""
    device = torch.device("cuda")
    for (n, m, text), rows in itertools.product(layers_of(features), numbers_of_rows):
        x = torch.randn(rows, n, device=device, dtype=torch.bfloat16)
        of_dense, of_chain = (
            cuda_graphs.copies(2 * weights, device) for weights in (n * m, Chain.parse(text).nnz)
        )
        dense = [nn.Linear(n, m).cuda().bfloat16() for _ in range(of_dense)]
        ways: dict[str, list[Callable[[Tensor], object]]] = {"dense": [*dense]}
        if autotunes:
            tuned = torch.compile(
                functional.linear, dynamic=False, mode="max-autotune-no-cudagraphs"
            )
            ways["max-autotune"] = [
                partial(tuned, weight=one.weight, bias=one.bias) for one in dense
            ]
        ways["KSLinear"] = [ksopt.KSLinear(n, m, text).cuda().bfloat16() for _ in range(of_chain)]
        with torch.inference_mode(), ksopt.prepared_weights():
            graphs = [cuda_graphs.Replay(calls, x) for calls in ways.values()]
            times = medians_us(graphs)
        us = {name: time / len(ways[name]) for name, time in zip(ways, times, strict=True)}
        *of_rivals, ours = us.values()
        listed = ", ".join(f"{name} {time:.2f} us" for name, time in us.items())
        print(
            f"{n} -> {m} {text}, {rows} rows, by {plan_of(text, rows)}: {listed}; "
            f"share {ours / min(of_rivals):.2f}",
            flush=True,
        )


def main() -> None:
    """Read the arguments, and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    kinds = parser.add_mutually_exclusive_group()
    for kind in (time_mlps, time_gates, time_casts):
        name = kind.__name__.removeprefix("time_")
        kinds.add_argument(f"--{name}", dest="kind", action="store_const", const=kind)
    kinds.add_argument("--wide", action="store_true", help="4,096 rows of wider MLPs, and SwiGLU")
    kinds.add_argument("--siblings", action="store_true", help="q, k, v alone")
    kinds.add_argument("--features", type=int, nargs="+", default=[], help="layers of these alone")
    parser.add_argument("--rows", type=int, nargs="+", default=[ROWS], help=f"of layers ({ROWS})")
    parser.add_argument("--graphs", action="store_true", help="layers in CUDA graphs alone")
    parser.add_argument("--kernels", action="store_true", help="list a chain's kernels, too")
    parser.add_argument("--max-autotune", action="store_true", help="of dense layers, too")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch._dynamo.config.cache_size_limit = 64
    if arguments.kind is not None:
        arguments.kind()
        return
    if arguments.wide:
        time_wide(arguments.max_autotune)
        return
    if arguments.graphs:
        time_in_graphs(arguments.max_autotune, arguments.features, arguments.rows)
        return
    if not arguments.siblings:
        kernels = arguments.kernels
        time_layers(arguments.max_autotune, arguments.features, arguments.rows, kernels)
    if not arguments.features:
        time_siblings(arguments.max_autotune, arguments.kernels)


if __name__ == "__main__":
    main()
