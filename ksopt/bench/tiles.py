"""``python -m ksopt.bench.tiles``: random lanes16 tiles, checked, timed and predicted.

What the cost model (``predicted_us`` of ksopt.kernels.lanes16) was fitted to, and how its ranking
is judged: for each pattern, how much slower the fastest of its best few predicted tiles is than the
fastest of all.
"""

from __future__ import annotations

import argparse
import csv
import random
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from ksopt import tables
from ksopt.bench import device as devices
from ksopt.bench import paper
from ksopt.bench.roofline import Roofline, measure_roofline
from ksopt.bench.timing import measure
from ksopt.errors import InvalidInputError, KsoptError
from ksopt.jit import arch, nvrtc
from ksopt.kernels import cpu, cuda, lanes16
from ksopt.kernels.families import FAMILIES, Machine, ranked_tiles
from ksopt.kernels.problem import Problem
from ksopt.pattern import Pattern
from ksopt.reference import ks_reference

# One or two of every d and size of block that the paper has.
PATTERNS = (
    *("(4,64,64,16)", "(64,64,64,8)", "(1,64,64,64)", "(96,48,48,16)", "(1,48,192,48)"),
    *("(16,64,64,4)", "(16,128,128,4)", "(1,128,128,96)", "(1,192,192,16)", "(1,96,96,2)"),
    *("(1,96,96,3)", "(1,96,384,6)", "(1,128,128,12)", "(1,64,64,24)", "(4,384,96,4)"),
    *("(1,256,256,4)", "(1,256,256,32)", "(1,128,128,1)"),
)
_FAMILY = next(family for family in FAMILIES if family.module is lanes16)
BEST_PREDICTED = (1, cuda.TILES)
_CHECKED_ROWS = 300
_ALLOWED_ERROR = 2.0  # times PyTorch's own: another order of summation rounds differently


@dataclass(frozen=True)
class Row:
    """One tile of one pattern; times in microseconds."""

    pattern: Pattern
    tile: lanes16.Config
    floor_us: float
    latency_us: float
    predicted_us: float


def time_tiles(pattern: Pattern, count: int, batch: int, roofline: Roofline) -> list[Row]:
    """Check and time ``count`` random tiles and the best predicted ones on a float16 product.

    Raises:
        KsoptError: a tile gives a wrong result.
    """
    problem = Problem(pattern, "float16", False)
    ranked = ranked_tiles(_FAMILY, problem, batch, Machine.of_device(0))
    drawn = random.Random(str(pattern)).sample(ranked, min(count, len(ranked)))
    tiles = list(dict.fromkeys([*ranked[: max(BEST_PREDICTED)], *drawn]))
    target = arch.of_device(0)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda tile: nvrtc.cubin(tile.source(), target), tiles))

    x = torch.randn(batch, pattern.in_features, device="cuda").half()
    weight = (torch.randn(pattern.weight_shape, device="cuda") / pattern.c**0.5).half()
    truth = ks_reference(x[-_CHECKED_ROWS:].double(), weight.double())
    allowed = _ALLOWED_ERROR * _error(cpu.multiply_by_bmm(x, weight, False), truth)
    floor_us = roofline.floor_us(pattern.bytes(batch, "float16"), pattern.flops(batch))
    rows = []
    for tile in tiles:
        launch = tile.launcher(0)
        torch.full((batch, pattern.out_features), float("nan"), device="cuda").half()
        error = _error(launch(x, weight), truth)
        if not error <= allowed:
            raise KsoptError(f"{pattern} {tile.config}: error {error:.2e}, allowed {allowed:.2e}")
        found = measure({"tile": partial(launch, x, weight)}, "cuda", max_seconds=0.02)["tile"]
        rows.append(Row(pattern, tile.config, floor_us, found.median_us, tile.predicted_us))
    return rows


def _error(y: torch.Tensor, truth: torch.Tensor) -> float:
    return float((y[-_CHECKED_ROWS:].double() - truth).norm() / truth.norm())


def _summary(rows_of: dict[Pattern, list[Row]]) -> tables.Table:
    lines = []
    for pattern, rows in rows_of.items():
        best = min(rows, key=lambda row: row.latency_us)
        ranked = sorted(rows, key=lambda row: row.predicted_us)
        regrets = [min(row.latency_us for row in ranked[:n]) for n in BEST_PREDICTED]
        lines.append(
            [
                str(pattern),
                f"{best.latency_us:,.1f}",
                f"{best.floor_us / best.latency_us:.2f}",
                *(f"{100 * (us / best.latency_us - 1):.0f} %" for us in regrets),
                f"{best.predicted_us / best.latency_us:.2f}",
            ]
        )
    heads = [f"best {n} predicted: slower by" for n in BEST_PREDICTED]
    columns = ["pattern", "fastest us", "efficiency", *heads, "predicted / measured"]
    return tables.of(columns, lines, "Tiles of the lanes16 family, fp16")


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the arguments, measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m ksopt.bench.tiles")
    parser.add_argument("--tiles", type=int, default=60, help="random tiles a pattern (60)")
    parser.add_argument("--batch", type=int, default=paper.BATCH)
    parser.add_argument("--out", type=Path, default=Path("ksopt-report-tiles.csv"))
    given = parser.parse_args(arguments)
    try:
        device = devices.resolve("cuda")
        roofline = measure_roofline(device, "float16")
        record = devices.record(device)
        patterns = [Pattern.parse(text) for text in PATTERNS]
        rows_of = {p: time_tiles(p, given.tiles, given.batch, roofline) for p in patterns}
    except KsoptError as error:
        print(f"python -m ksopt.bench.tiles: {error}", file=sys.stderr)
        return 2 if isinstance(error, InvalidInputError) else 1
    print(f"{record.name}, torch {record.torch}, commit {record.commit}, batch {given.batch}")
    tables.write(_summary(rows_of))
    with given.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        tile_heads = list(asdict(next(iter(rows_of.values()))[0].tile))
        writer.writerow(["pattern", *tile_heads, "floor_us", "latency_us", "predicted_us"])
        for rows in rows_of.values():
            for r in rows:
                times = [f"{us:.2f}" for us in (r.floor_us, r.latency_us, r.predicted_us)]
                writer.writerow([r.pattern, *asdict(r.tile).values(), *times])
    print(f"Every measurement: {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
