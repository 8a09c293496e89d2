"""Tiles of `chain_mma`, checked and timed beside other implementations of the same chains.

    python docs/experiments/chain_tiles.py --random 40 --seed 1 --dtypes bfloat16,float32
    python docs/experiments/chain_tiles.py --chains "(1,128,128,8)*(8,128,128,1)" --rows 256,25088

The others are: a launch per factor, each the best predicted; the best predicted tiles of
`chain_wgmma16`; and PyTorch's dense layer. The cost model of `chain_mma` is fitted to these tiles
and evaluated on them.
"""

from __future__ import annotations

import argparse
import csv
import random
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ksopt import precision, settings
from ksopt.bench import random_subjects
from ksopt.epilogue import add_epilogue_
from ksopt.kernels import registry
from ksopt.kernels.by_factors import ByFactors
from ksopt.kernels.families.base import family_of
from ksopt.kernels.operands import random_operands
from ksopt.kernels.problem import DeviceSpec, Epilogue, Problem
from ksopt.measure import device as devices
from ksopt.measure.accuracy import AccuracyCheck, Around
from ksopt.measure.roofline import Roofline, measure_roofline
from ksopt.measure.timing import measure
from ksopt.patterns.chain import Chain
from ksopt.reference import chain_to_dense
from tiles import compile_ahead

FAMILY = "chain_mma"
_BEST = 3  # best predicted tiles that are always timed
_MOST_DENSE = 2**27  # elements


def problems(args: argparse.Namespace) -> list[tuple[Problem, int]]:
    """The problems to time, each with its rows."""
    if args.random:
        drawn = [one for one in random_subjects.draw(args.random, args.seed) if len(one[0]) > 1]
    else:
        chains = [Chain.parse(text) for text in args.chains]
        drawn = [(chain, int(rows)) for chain in chains for rows in args.rows.split(",")]
    after = Epilogue(bias=args.bias, activation=args.activation, residual=args.residual)
    layouts = {"first": (False,), "last": (True,), "both": (False, True)}[args.layout]
    several = []
    for kind in args.dtypes.split(","):
        dtype = "float32" if kind == "tf32" else kind
        several += [
            (Problem(chain, dtype, last, kind != "tf32", after, args.siblings), rows)
            for chain, rows in drawn
            for last in layouts
            if rows >= args.fewest_rows
        ]
    return several


def time_all(
    problem: Problem, rows: int, count: int, spec: DeviceSpec, roofline: Roofline
) -> list[dict[str, Any]]:
    """The measurements of each way and tile."""
    family, device = family_of(FAMILY), torch.device("cuda", 0)
    if family.unsupported_reason(problem, spec) is not None:
        return []
    operands = random_operands(problem, rows, device)
    activation, siblings = problem.epilogue.activation, problem.siblings
    around = Around(operands.bias, activation, operands.residual, siblings)
    check = AccuracyCheck(
        operands.x, operands.weights, problem.layout, rounded_once=False, around=around
    )
    tiles = [one.tile for one in registry.ranked(family, problem, rows, spec)]
    drawn = random.Random(str(problem)).sample(tiles, min(count, len(tiles)))
    tiles = list(dict.fromkeys([*tiles[:_BEST], *drawn]))
    compile_ahead([text for tile in tiles for text in family.sources(problem, tile)])
    predicted = registry.best_predicted(problem, rows, spec)
    known = {one.name: one.predicted_us for one in reversed(predicted)}
    ways: dict[str, tuple[Callable[[], object], dict[str, Any], float]] = {}
    call = operands.arguments(problem)
    ways["factors"] = (partial(ByFactors(problem), *call), {}, known.get("factors", 0.0))
    others = registry.ranked(family_of("chain_wgmma16"), problem, rows, spec)[:2]
    ways |= {
        f"chain_wgmma16 {at}": (partial(one.build(0), *call), {}, one.predicted_us)
        for at, one in enumerate(others)
    }
    if problem.chain.in_features * problem.out_features <= _MOST_DENSE:
        ways["dense"] = (dense(problem, operands), {}, 0.0)
    for at, tile in enumerate(tiles):
        launch = family.launcher(problem, tile, 0)
        fault = check.fault_of(partial(_of, launch, call[1:]))
        if fault is not None:
            print(f"WRONG {problem} {rows} {tile}: {fault}", flush=True)
            continue
        us = family.predicted_us(problem, tile, rows, spec)
        ways[f"{FAMILY} {at}"] = (partial(launch, *call), asdict(tile), us)
    with torch.no_grad():
        times = measure({name: way[0] for name, way in ways.items()}, device, max_seconds=0.25)
    floor = floor_us(problem, rows, roofline)
    return [
        {
            "chain": str(problem.chain),
            "dtype": problem.dtype if problem.exact else "tf32",
            "layout": problem.layout,
            "rows": rows,
            "siblings": problem.siblings,
            "way": name,
            "us": round(times[name].median_us, 2),
            "predicted_us": round(us, 2),
            "floor_us": round(floor, 2),
            **tile,
        }
        for name, (_, tile, us) in ways.items()
    ]


def floor_us(problem: Problem, rows: int, roofline: Roofline) -> float:
    """The roofline's time of moving x, y, the residual and the weights once."""
    size = 4 if problem.dtype == "float32" else 2
    features = problem.chain.in_features + problem.out_features * (
        2 if problem.epilogue.residual else 1
    )
    moved = (rows * features + problem.siblings * problem.chain.nnz) * size
    return roofline.floor_us(moved, problem.siblings * problem.chain.flops(rows))


def dense(problem: Problem, operands: Any) -> Callable[[], object]:
    """PyTorch's dense layer with the same result."""
    factors, weights = len(problem.chain), operands.weights
    chains = (weights[at : at + factors] for at in range(0, len(weights), factors))
    matrix = torch.cat([chain_to_dense(chain) for chain in chains])
    x, bias, last = operands.x, operands.bias, problem.batch_last

    def multiply() -> Tensor:
        y = matrix @ x if last else functional.linear(x, matrix, bias)
        left = bias if last else None
        return add_epilogue_(y, left, problem.epilogue.activation, operands.residual, last)

    return multiply


def _of(launch: Callable[..., Tensor], others: tuple[Any, ...], x: Tensor) -> Tensor:
    return launch(x, *others)


def summary(lines: list[dict[str, Any]]) -> str:
    """A line with the fastest tile, the best predicted ones, and the other implementations."""
    first = lines[0]
    own = [one for one in lines if one["way"].startswith(FAMILY)]
    if not own:
        return f"{first['chain']} {first['dtype']}: no tile"
    best = min(own, key=lambda one: one["us"])
    chosen = min(own[:_BEST], key=lambda one: one["us"])
    others = " ".join(
        f"{one['way']} {one['us']} ({one['predicted_us']})"
        for one in lines
        if not one["way"].startswith(FAMILY)
    )
    tile = "/".join(str(best[key]) for key in ("bm", "warps", "mt", "nt", "groups", "blocks"))
    return (
        f"{first['chain']} {first['dtype']} {first['layout']} {first['rows']}: {best['us']} "
        f"({best['predicted_us']}; {tile}), best predicted {chosen['us']} | {others} | "
        f"floor {first['floor_us']}"
    )


def main() -> int:
    """Read the arguments, measure, print, write."""
    parser = argparse.ArgumentParser(prog="python docs/experiments/chain_tiles.py")
    parser.add_argument("--chains", nargs="*", default=["(1,128,128,8)*(8,128,128,1)"])
    parser.add_argument("--rows", default="25088")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="of N random subjects")
    parser.add_argument("--seed", type=int, default=0, help="of these (0)")
    parser.add_argument("--fewest-rows", type=int, default=1)
    parser.add_argument("--dtypes", default="bfloat16", help="tf32 for float32 that is not exact")
    parser.add_argument("--layout", choices=("first", "last", "both"), default="first")
    parser.add_argument("--bias", action="store_true")
    parser.add_argument("--activation", default="none")
    parser.add_argument("--residual", action="store_true")
    parser.add_argument("--siblings", type=int, default=1, help="chains on one x (1)")
    parser.add_argument("--tiles", type=int, default=8, help="random tiles a chain (8)")
    parser.add_argument("--out", type=Path, default=Path("ksopt-report-chain-tiles.csv"))
    args = parser.parse_args()
    device = devices.resolve("cuda")
    record, spec = devices.record(device), DeviceSpec.of_device(0)
    print(f"{record.name}, torch {record.torch}, commit {record.commit}, {settings.tuning()}")
    rooflines: dict[str, Roofline] = {}
    lines: list[dict[str, Any]] = []
    for problem, rows in problems(args):
        if problem.dtype not in rooflines:
            rooflines[problem.dtype] = measure_roofline(device, problem.dtype)
        with precision.fp32_products("ieee" if problem.exact else "tf32"):
            measurements = time_all(problem, rows, args.tiles, spec, rooflines[problem.dtype])
        lines += measurements
        if measurements:
            print(summary(measurements), flush=True)
            write(args.out, lines)
    return 0


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    """Write every measurement as CSV."""
    fields = list(dict.fromkeys(key for one in lines for key in one))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        writer.writerows(lines)


if __name__ == "__main__":
    sys.exit(main())
