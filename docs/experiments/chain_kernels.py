"""Chains of two 16-bit factors in one launch, checked and timed against the dense layer.

For each case and chain, the best predicted tiles are checked against float64 (fresh random
operands, outputs poisoned with NaN, odd numbers of rows), and timed in turns with the dense layer:
call by call, the cache emptied before each, or, with few rows, in CUDA graphs of calls with cold
weights and a warm x.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from ksopt.kernels.families.common import (
    chain_cost,
    chain_launcher,
    chain_mlp_cost,
    chain_mlp_launcher,
    chain_mlp_tile,
    chain_pack_launcher,
    chain_tile,
)
from ksopt.kernels.families.common.chain_launcher import ChainLauncher
from ksopt.kernels.families.common.chain_pack_launcher import chain_packer
from ksopt.kernels.families.common.chain_tile import Config, Epilogue, Shape
from ksopt.kernels.problem import DeviceSpec
from ksopt.measure import cuda_graphs
from ksopt.measure.accuracy import fault_against, fault_beyond, largest_error
from ksopt.measure.roofline import Roofline, measure_roofline
from ksopt.measure.timing import measure
from ksopt.patterns.chain import Chain
from tiles import compile_ahead

ROWS = 25_088
CHECKED_ROWS = (1, 63, 1000, 8_200)
FEW_ROWS = 8_192  # up to which the host takes longer to launch than some kernels take
_WORSE = 1.05  # times PyTorch's own error: the same roundings, in another order
_BY_LUCK = 0.0  # of hundreds of results not all are exact: PyTorch's error is the measure alone
_LARGEST_SHARE = 0.05  # of the largest result: more is not rounding


BIASED = Epilogue(bias=True)
GELU = Epilogue(activation="gelu", bias=True)
ADDED = Epilogue(bias=True, residual=True)


@dataclass(frozen=True)
class Case:
    """A dense layer, or several on one x, and the chains that may replace it."""

    name: str
    chains: tuple[str, ...]
    siblings: int = 1
    epilogue: Epilogue = BIASED

    @property
    def shapes(self) -> list[Shape]:
        return [Shape.of(Chain.parse(text), self.siblings) for text in self.chains]


CASES = (
    Case(
        "768",
        (
            "(1,192,96,4)*(4,96,192,1)",
            "(1,384,96,2)*(2,96,384,1)",
            "(1,96,96,8)*(8,96,96,1)",
            "(1,96,64,8)*(4,128,192,1)",
            "(1,768,96,1)*(1,96,768,1)",
        ),
    ),
    Case(
        "1024",
        (
            "(1,256,128,4)*(4,128,256,1)",
            "(1,512,128,2)*(2,128,512,1)",
            "(1,128,128,8)*(8,128,128,1)",
            "(1,1024,128,1)*(1,128,1024,1)",
        ),
    ),
    Case(
        "2048",
        (
            "(1,512,256,4)*(4,256,512,1)",
            "(1,1024,256,2)*(2,256,1024,1)",
            "(1,2048,256,1)*(1,256,2048,1)",
        ),
    ),
    Case("4096", ("(1,2048,512,2)*(2,512,2048,1)", "(1,4096,512,1)*(1,512,4096,1)")),
    Case(
        "qkv 384",
        (
            "(1,96,32,4)*(2,64,192,1)",
            "(1,96,64,4)*(8,32,48,1)",
            "(1,192,64,2)*(4,32,96,1)",
            "(1,48,16,8)*(2,64,192,1)",
        ),
        siblings=3,
    ),
    Case(
        "384-1536",
        ("(1,384,64,4)*(4,64,96,1)", "(1,768,64,2)*(4,32,96,1)", "(1,384,48,4)*(2,96,192,1)"),
        epilogue=GELU,
    ),
    Case(
        "1536-384",
        ("(1,96,64,4)*(4,64,384,1)", "(1,192,48,2)*(2,48,768,1)", "(1,96,32,4)*(2,64,768,1)"),
        epilogue=ADDED,
    ),
)

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda z: z,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
}


@dataclass(frozen=True)
class Operands:
    """The operands of one call; ``residual`` and the rows of x are not contiguous."""

    x: Tensor
    left: list[Tensor]
    right: list[Tensor]
    bias: Tensor
    residual: Tensor

    @classmethod
    def random(cls, s: Shape, rows: int, dtype: torch.dtype) -> Operands:
        def draw(*size: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*size, device="cuda") * scale).to(dtype)

        features = s.siblings * s.left.out_features
        left = [draw(*s.left.weight_shape, scale=s.left.c**-0.5) for _ in range(s.siblings)]
        right = [draw(*s.right.weight_shape, scale=s.right.c**-0.5) for _ in range(s.siblings)]
        x = draw(rows, s.right.in_features + 16)[:, : s.right.in_features]
        return cls(x, left, right, draw(features), draw(rows, features))

    @property
    def weights(self) -> list[Tensor]:
        return [weight for pair in zip(self.left, self.right, strict=True) for weight in pair]

    def to(self, dtype: torch.dtype) -> Operands:
        return Operands(
            *(
                self.x.to(dtype),
                [w.to(dtype) for w in self.left],
                [w.to(dtype) for w in self.right],
            ),
            *(self.bias.to(dtype), self.residual.to(dtype)),
        )


def by_pytorch(o: Operands, s: Shape, epilogue: Epilogue) -> Tensor:
    """The product by two einsums per chain, each rounded to the operands' type."""
    rows, outs = o.x.shape[0], []
    for left, right in zip(o.left, o.right, strict=True):
        z = torch.einsum("nac,abc->nab", o.x.reshape(rows, *right.shape[::2]), right[..., 0])
        z = _ACTIVATIONS[epilogue.middle](z).reshape(rows, s.left.c, s.left.d)
        outs.append(torch.einsum("ncd,bcd->nbd", z, left[0]).reshape(rows, -1))
    y = torch.cat(outs, -1)
    y = _ACTIVATIONS[epilogue.activation](y + o.bias if epilogue.bias else y)
    return y + o.residual if epilogue.residual else y


def call(launcher: ChainLauncher, o: Operands, packed: Tensor, out: Tensor) -> Tensor:
    e = launcher.epilogue
    return launcher(
        o.x, packed, o.bias if e.bias else None, o.residual if e.residual else None, out
    )


def fault_of(launcher: ChainLauncher, s: Shape, o: Operands, packed: Tensor) -> str | None:
    """The fault of a kernel's result; None if it is correct."""
    e = launcher.epilogue
    truth = by_pytorch(o.to(torch.float64), s, e)
    apart = o.x.new_full((o.x.shape[0] + 2, truth.shape[1] + 8), float("nan"))
    y = call(launcher, o, packed, apart[1:-1, :-8])
    if not (apart[0].isnan().all() and apart[-1].isnan().all() and apart[:, -8:].isnan().all()):
        return "it writes beside y"
    fault = fault_against(y, by_pytorch(o, s, e), truth, _BY_LUCK, _WORSE) or fault_beyond(
        largest_error(y, truth), _LARGEST_SHARE, "largest error {error:.1e}, allowed {allowed:.1e}"
    )
    if fault is not None:
        return fault
    again = torch.full_like(y, float("nan"))
    return None if torch.equal(call(launcher, o, packed, again), y) else "it gives another result"


def tiles_of(
    s: Shape, batch: int, spec: DeviceSpec, count: int, epilogue: Epilogue
) -> list[Config]:
    """The best predicted tiles, at most three of which differ only in their slots.

    For few rows they include the best of each cluster size.
    """
    ranked = chain_cost.best(s, batch, spec, epilogue, 10_000)
    of_size = {tile.cluster: tile for tile in reversed(ranked)}
    chosen = list(of_size.values()) if batch <= FEW_ROWS else []
    for tile in ranked:
        shares = (tile.groups, tile.blocks, tile.nk, tile.cluster)
        alike = [t for t in chosen if (t.groups, t.blocks, t.nk, t.cluster) == shares]
        if len(chosen) >= count:
            break
        if len(alike) < 3 and tile not in chosen:
            chosen.append(tile)
    return chosen


@dataclass(frozen=True)
class Row:
    case: str
    rows: int
    dtype: str
    chain: str
    tile: str
    us: float
    predicted_us: float
    dense_us: float
    floor_us: float


def dense_ways(x: Tensor, features: int, e: Epilogue, compiled: Sequence[str]) -> dict[str, Way]:
    """The dense layer, eager and compiled."""
    weight = torch.randn(features, x.shape[1], device="cuda").to(x.dtype)
    bias = torch.randn(features, device="cuda").to(x.dtype)
    residual = torch.randn(x.shape[0], features, device="cuda").to(x.dtype)

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        y = _ACTIVATIONS[e.activation](functional.linear(x, weight, bias))
        return y + residual if e.residual else y

    ways = {"dense eager": Way(layer, x, weight)}
    for mode in compiled:
        ways[f"dense {mode}"] = Way(torch.compile(layer, mode=mode, dynamic=False), x, weight)
    return ways


@dataclass(frozen=True)
class Way:
    """A function of x and a weight to be timed."""

    function: Callable[[Tensor, Tensor], Tensor]
    x: Tensor
    weight: Tensor

    def __call__(self) -> Tensor:
        return self.function(self.x, self.weight)

    def in_graph(self) -> tuple[Callable[[], object], int]:
        """A graph of calls with copies of the weight, and their number."""
        size = self.weight.numel() * self.weight.element_size()
        count = cuda_graphs.copies(size, self.weight.device)

        def call(x: Tensor, weight: Tensor) -> Tensor:
            return self.function(x, weight)

        weights = [self.weight.clone() for _ in range(count)]
        calls = [partial(call, weight=weight) for weight in weights]
        return cuda_graphs.Replay(calls, self.x), count


def times_us(ways: Mapping[str, Way], rows: int, seconds: float) -> dict[str, float]:
    """The median time of a call, by way."""
    if rows > FEW_ROWS:
        results = measure(ways, "cuda", max_seconds=seconds, warmup_calls=2)
        return {name: result.median_us for name, result in results.items()}
    graphs = {name: way.in_graph() for name, way in ways.items()}
    replays = {name: replay for name, (replay, _) in graphs.items()}
    results = measure(replays, "cuda", max_seconds=40 * seconds, warmup_calls=2)
    return {name: result.median_us / graphs[name][1] for name, result in results.items()}


def time_case(
    case: Case,
    rows: int,
    dtype: torch.dtype,
    roofline: Roofline,
    spec: DeviceSpec,
    args: argparse.Namespace,
) -> Iterator[Row]:
    """Check and time one case."""
    name = str(dtype).removeprefix("torch.")
    todo = [
        (s, tile)
        for s in case.shapes
        for tile in tiles_of(s, rows, spec, args.tiles, case.epilogue)
    ]
    sources = [chain_launcher.source(s, tile, case.epilogue, name) for s, tile in todo]
    sources += {chain_pack_launcher.source(s, tile) for s, tile in todo}
    began = time.perf_counter()
    compile_ahead(sources)
    print(f"# {case.name}: compiled {len(todo)} in {time.perf_counter() - began:.1f} s", flush=True)
    calls: dict[str, Way] = {}
    of_call: dict[str, tuple[Shape, Config]] = {}
    for s, tile in todo:
        launcher = ChainLauncher(s, tile, case.epilogue, name, 0)
        pack = chain_packer(s, tile, 0)
        wrong = None
        for checked in CHECKED_ROWS[: 3 if args.check else None]:
            o = Operands.random(s, checked, dtype)
            wrong = wrong or fault_of(launcher, s, o, pack(o.weights))
        label = f"{s} {chain_tile.fields(tile)}"
        if wrong is not None:
            print(f"WRONG {case.name} {label}: {wrong}", flush=True)
            continue
        o = Operands.random(s, rows, dtype)
        x, packed = o.x.contiguous(), pack(o.weights)
        y = torch.empty(rows, s.siblings * s.left.out_features, device="cuda", dtype=dtype)
        bias = o.bias if case.epilogue.bias else None
        residual = o.residual if case.epilogue.residual else None
        layer = partial(launcher, bias=bias, residual=residual, out=y)
        calls[label] = Way(layer, x, packed)
        of_call[label] = (s, tile)
    if args.check:
        print(f"# {case.name}: {len(calls)} of {len(todo)} tiles are right")
        return
    s = case.shapes[0]
    x = torch.randn(rows, s.right.in_features, device="cuda").to(dtype)
    features = s.siblings * s.left.out_features
    ways = dense_ways(x, features, case.epilogue, args.compiled)
    seconds = 0.012 * (len(calls) + len(ways)) * max(1.0, s.right.in_features / 1024)
    results = times_us({**ways, **calls}, rows, seconds)
    dense_us = min(results[way] for way in ways)
    for way in ways:
        print(f"# {case.name}, {rows} rows, {way}: {results[way]:.1f} us", flush=True)
    for label, (s, tile) in of_call.items():
        residual_bytes = 2 * rows * features if case.epilogue.residual else 0
        floor = roofline.floor_us(s.bytes(rows) + residual_bytes, s.flops(rows))
        predicted = chain_cost.predicted_us(s, tile, rows, spec, case.epilogue)
        fields = " ".join(map(str, chain_tile.fields(tile)))
        us = results[label]
        yield Row(case.name, rows, name, str(s), fields, us, predicted, dense_us, floor)


MLPS = (
    ("(1,384,32,4)*(2,64,192,1)", "(1,96,32,4)*(4,32,384,1)"),
    ("(1,384,48,4)*(2,96,192,1)", "(1,96,48,4)*(4,48,384,1)"),
    ("(1,768,64,2)*(2,64,192,1)", "(1,192,48,2)*(2,48,768,1)"),
    ("(1,384,64,4)*(2,128,192,1)", "(1,96,64,4)*(4,64,384,1)"),
)


ADDED_BEHIND_GELU = Epilogue(middle="gelu", bias=True, residual=True)


def mlp_tiles(
    first: Shape, second: Shape, rows: int, spec: DeviceSpec, count: int
) -> list[chain_mlp_tile.Config]:
    """The tiles with the least predicted times, one of each size of both chains' chunks."""
    best: dict[tuple[int, ...], tuple[float, chain_mlp_tile.Config]] = {}
    for tile in chain_mlp_tile.configs(first, second, spec):
        us = chain_mlp_cost.predicted_us(first, second, tile, rows, spec, ADDED_BEHIND_GELU)
        known = best.get(key := (tile.groups, tile.nk, tile.last_nk))
        if known is None or us < known[0]:
            best[key] = us, tile
    return [tile for _, tile in sorted(best.values(), key=lambda one: one[0])[:count]]


def mlp_calls(
    texts: tuple[str, str], dtype: torch.dtype, spec: DeviceSpec, args: argparse.Namespace
) -> dict[str, Callable[[], Tensor]]:
    """Check the tiles of two chains with GELU between and a residual, and return their calls."""
    first, second = (Shape.of(Chain.parse(text)) for text in texts)
    name, epilogue = str(dtype).removeprefix("torch."), ADDED_BEHIND_GELU
    tiles = mlp_tiles(first, second, args.rows[0], spec, args.tiles)
    sources = [chain_mlp_launcher.source(first, second, t, epilogue, name) for t in tiles]
    sources += {chain_mlp_launcher.pack_source(first, second, tile) for tile in tiles}
    compile_ahead(sources)
    calls: dict[str, Callable[[], Tensor]] = {}
    for tile in tiles:
        launcher = chain_mlp_launcher.MlpLauncher(first, second, tile, epilogue, name, 0)
        pack = chain_mlp_launcher.mlp_packer(first, second, tile, 0)
        wrong = None
        for rows in (*CHECKED_ROWS, args.rows[0]):
            o, last = Operands.random(first, rows, dtype), Operands.random(second, rows, dtype)
            o = Operands(o.x.contiguous(), o.left, o.right, o.bias, last.residual)
            packed = pack([o.left[0], o.right[0], last.left[0], last.right[0]])
            y = torch.full(
                (rows, second.left.out_features), float("nan"), device="cuda", dtype=dtype
            )
            call = partial(launcher, o.x, packed, o.bias, last.bias, last.residual, y)
            if rows != args.rows[0]:
                call()
                results = []
                for kind in (torch.float64, dtype):
                    h = by_pytorch(o.to(kind), first, GELU)
                    results.append(by_pytorch(replace(last.to(kind), x=h), second, ADDED))
                truth, theirs = results
                wrong = wrong or fault_against(y, theirs, truth, _BY_LUCK, _WORSE)
        us = chain_mlp_cost.predicted_us(first, second, tile, args.rows[0], spec, epilogue)
        label = f"mlp {texts[0]} {texts[1]} | {astuple(tile)} | {us:.1f} predicted"
        if wrong is not None:
            print(f"WRONG {label}: {wrong}", flush=True)
        else:
            calls[label] = call
    return calls


def time_mlps(dtype: torch.dtype, spec: DeviceSpec, args: argparse.Namespace) -> None:
    """Time two chains in one launch against the dense MLP."""
    calls: dict[str, Callable[[], Tensor]] = {}
    for texts in MLPS:
        calls |= mlp_calls(texts, dtype, spec, args)
    x = torch.randn(args.rows[0], 384, device="cuda").to(dtype)
    weights = [torch.randn(n, m, device="cuda").to(dtype) for n, m in ((1536, 384), (384, 1536))]
    biases = [torch.randn(n, device="cuda").to(dtype) for n in (1536, 384)]
    residual = torch.randn_like(x)

    def mlp(x: Tensor) -> Tensor:
        h = functional.gelu(functional.linear(x, weights[0], biases[0]))
        return functional.linear(h, weights[1], biases[1]) + residual

    ways: dict[str, Callable[[], Tensor]] = {"dense eager": partial(mlp, x)}
    for mode in args.compiled:
        ways[f"dense {mode}"] = partial(torch.compile(mlp, mode=mode, dynamic=False), x)
    results = measure(
        {**ways, **calls}, "cuda", max_seconds=0.02 * len(calls) + 0.1, warmup_calls=2
    )
    dense_us = min(results[way].median_us for way in ways)
    for label, result in sorted(results.items(), key=lambda item: item[1].median_us):
        share = result.median_us / dense_us
        print(f"{label} | {result.median_us:.1f} | {share:.2f} of {dense_us:.1f}")


def profile(case: Case, tile: str, rows: int) -> None:
    """Launch one tile three times with a cold cache, for a profiler."""
    index, *fields = map(int, tile.split())
    s, config = case.shapes[index], Config(*fields)
    launcher = ChainLauncher(s, config, case.epilogue, "bfloat16", 0)
    o = Operands.random(s, rows, torch.bfloat16)
    packed = chain_packer(s, config, 0)(o.weights)
    y = torch.empty(rows, s.siblings * s.left.out_features, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        torch.empty(2**27, device="cuda").fill_(1.0)
        call(launcher, o, packed, y)
    torch.cuda.synchronize()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python docs/experiments/chain_kernels.py")
    parser.add_argument("--cases", nargs="*", default=[case.name for case in CASES])
    parser.add_argument("--tiles", type=int, default=6, help="of each chain (6)")
    parser.add_argument("--rows", type=int, nargs="+", default=[ROWS])
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16"])
    parser.add_argument("--compiled", nargs="*", default=[], help="modes of torch.compile")
    parser.add_argument("--best", type=int, default=3, help="tiles of each chain that are printed")
    parser.add_argument("--out", type=Path, default=Path("ksopt-report-chains.csv"))
    parser.add_argument("--check", action="store_true", help="time nothing")
    parser.add_argument("--mlp", action="store_true", help="two chains in one launch too")
    parser.add_argument("--profile", nargs=2, metavar=("CASE", "TILE"), action="append", default=[])
    args = parser.parse_args(arguments)
    for name, tile in args.profile:
        profile(next(case for case in CASES if case.name == name), tile, args.rows[0])
    if args.profile:
        return 0
    spec, device = DeviceSpec.of_device(0), torch.device("cuda")
    rows: list[Row] = []
    for dtype in args.dtypes:
        roofline = (
            Roofline("cuda", dtype, 1.0, 1.0, 0, 0, "")
            if args.check
            else measure_roofline(device, dtype)
        )
        print(f"# {roofline.bandwidth / 1e12:.2f} TB/s, {roofline.rate / 1e12:.0f} TFLOP/s")
        for case in CASES:
            if case.name in args.cases:
                for count in args.rows:
                    kind = getattr(torch, dtype)
                    rows += time_case(case, count, kind, roofline, spec, args)
        if args.mlp:
            time_mlps(getattr(torch, dtype), spec, args)
    with args.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(Row.__dataclass_fields__)
        for row in rows:
            writer.writerow(row.__dict__.values())
    print("case rows dtype chain | tile | us predicted | of dense | efficiency")
    groups: dict[tuple[str, int, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.case, row.rows, row.dtype, row.chain), []).append(row)
    for mine in groups.values():
        for r in sorted(mine, key=lambda r: r.us)[: args.best]:
            times = f"{r.us:.1f} {r.predicted_us:.1f} | {r.us / r.dense_us:.2f} of {r.dense_us:.1f}"
            print(
                f"{r.case} {r.rows} {r.dtype} {r.chain} | {r.tile} | {times} | "
                f"{r.floor_us / r.us:.2f}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
