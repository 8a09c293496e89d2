"""Checks and times random tiles of a kernel family.

The tables of docs/development are of such tiles. The cost models (``predicted_us`` of the families
in ksopt.kernels) are fitted to them and evaluated on them: for each pattern, how much slower the
fastest of its best few predicted tiles is than the fastest of all.
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
from typing import Any

import torch

from ksopt.bench import paper_patterns, random_subjects
from ksopt.errors import InvalidInputError, KsoptError
from ksopt.jit import arch, nvrtc
from ksopt.kernels.backends import cpu
from ksopt.kernels.candidate import Call
from ksopt.kernels.families.base import TemplateFamily, families, family_of
from ksopt.kernels.problem import DeviceSpec, Problem
from ksopt.measure import device as devices
from ksopt.measure.accuracy import AccuracyCheck
from ksopt.measure.roofline import Roofline, measure_roofline
from ksopt.measure.timing import measure
from ksopt.patterns.chain import Pattern
from ksopt.report import tables

# One or two of every d and block size in the paper, and one of short sums.
PATTERNS = (
    *("(4,64,64,16)", "(64,64,64,8)", "(1,64,64,64)", "(96,48,48,16)", "(1,48,192,48)"),
    *("(16,64,64,4)", "(16,128,128,4)", "(1,128,128,96)", "(1,192,192,16)", "(1,96,96,2)"),
    *("(1,96,96,3)", "(1,96,384,6)", "(1,128,128,12)", "(1,64,64,24)", "(4,384,96,4)"),
    *("(1,256,256,4)", "(1,256,256,32)", "(1,128,128,1)", "(1,16,8,64)"),
)
BEST_PREDICTED = (1, 3)


@dataclass(frozen=True)
class Row:
    """The measurement of one tile of one pattern, in microseconds; ``config`` is the family's."""

    pattern: Pattern
    rows: int
    config: Any
    floor_us: float
    bmm_us: float
    latency_us: float
    predicted_us: float


def names() -> list[str]:
    """The names of the timed families: those of one kernel with several tiles for many rows."""
    return [
        family.name
        for family in families()
        if isinstance(family, TemplateFamily)
        and not family.is_fallback
        and family.max_batch is None
    ]


def problem_of(family: TemplateFamily[Any], pattern: Pattern, dtype: str | None = None) -> Problem:
    """The problem that a family is timed on, in its layout and its first or another dtype."""
    dtype = next(iter(family.dtypes)) if dtype is None else dtype
    return Problem.of_factor(pattern, dtype, family.layout == "batch_last")


def random_problems(count: int, seed: int, fewest: int) -> list[tuple[Pattern, int]]:
    """The factors of the random chains of `ksopt bench kernels --patterns random:N`, with rows.

    Args:
        count: of chains.
        seed: as for ``--seed`` there.
        fewest: the least rows to include.
    """
    drawn = random_subjects.draw(count, seed)
    return [(factor, rows) for chain, rows in drawn for factor in chain if rows >= fewest]


def problem_with_rows(text: str) -> tuple[Pattern, int]:
    """A pattern and its rows.

    Example:
        >>> problem_with_rows("(1,2,3,4)@100")
        (Pattern(a=1, b=2, c=3, d=4), 100)
    """
    pattern, _, rows = text.partition("@")
    return Pattern.parse(pattern), int(rows or paper_patterns.BATCH)


def time_tiles(
    family: TemplateFamily[Any],
    problem: Problem,
    count: int,
    batch: int,
    roofline: Roofline,
    spec: DeviceSpec,
    each: str | None = None,
) -> list[Row]:
    """Check and time ``count`` random tiles of a family, and the best predicted ones.

    Args:
        family: of the tiles.
        problem: to compute.
        count: number of random tiles.
        batch: rows of x.
        roofline: of the device.
        spec: of the device.
        each: a field of the tiles: two tiles of each of its values are timed, too.

    Raises:
        KsoptError: a tile gives a wrong result.
    """
    pattern, last, device = problem.pattern, problem.batch_last, torch.device(roofline.device)
    configs = list(family.configs(problem, spec))
    predicted = {c: family.predicted_us(problem, c, batch, spec) for c in configs}
    configs.sort(key=predicted.__getitem__)
    drawn = random.Random(str(pattern)).sample(configs, min(count, len(configs)))
    of_each: dict[Any, list[Any]] = {}
    if each is not None:
        for config in configs:
            of_each.setdefault(getattr(config, each), []).append(config)
    leaders = [config for several in of_each.values() for config in several[:2]]
    tiles = list(dict.fromkeys([*configs[: max(BEST_PREDICTED)], *leaders, *drawn]))
    compile_ahead([source for tile in tiles for source in family.sources(problem, tile)])

    dtype = getattr(torch, problem.dtype)
    size = (pattern.in_features, batch) if last else (batch, pattern.in_features)
    x = torch.randn(size, device=device).to(dtype)
    weight = (torch.randn(pattern.weight_shape, device=device) / pattern.c**0.5).to(dtype)
    layout = "batch_last" if last else "batch_first"
    check = AccuracyCheck(x, [weight], layout)
    bmm = partial(cpu.multiply_by_bmm, x, weight, last)
    floor_us = roofline.floor_us(pattern.bytes(batch, problem.dtype), pattern.flops(batch))
    bmm_us = measure({"bmm": bmm}, device, max_seconds=0.05)["bmm"].median_us
    rows = []
    for tile in tiles:
        multiply = family.launcher(problem, tile, 0)
        launch = partial(multiply, x, weight)
        fault = check.fault_of(partial(_swapped, multiply, weight))
        if fault is not None:
            raise KsoptError(f"{pattern} {tile}: {fault}")
        us = measure({"tile": launch}, device, max_seconds=0.02)["tile"].median_us
        rows.append(Row(pattern, batch, tile, floor_us, bmm_us, us, predicted[tile]))
    return rows


def _swapped(multiply: Call, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return multiply(x, weight)


def compile_ahead(sources: list[str]) -> None:
    """Compile the sources with all threads, before they are loaded."""
    target = arch.of_device(0)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda source: nvrtc.cubin(source, target), sources))


def summary(family: str, rows_of: dict[Pattern, list[Row]]) -> tables.Table:
    """The fastest tile of each pattern, and the regret of the model's choices."""
    lines = []
    for pattern, rows in rows_of.items():
        best = min(rows, key=lambda row: row.latency_us)
        ranked = sorted(rows, key=lambda row: row.predicted_us)
        regrets = [min(row.latency_us for row in ranked[:n]) for n in BEST_PREDICTED]
        lines.append(
            [
                str(pattern),
                f"{best.floor_us:,.1f}",
                f"{best.bmm_us:,.1f}",
                f"{best.latency_us:,.1f}",
                f"{best.floor_us / best.latency_us:.2f}",
                f"{best.bmm_us / best.latency_us:.2f}",
                *(f"{100 * (us / best.latency_us - 1):.0f} %" for us in regrets),
            ]
        )
    heads = [f"best {n} predicted: slower by" for n in BEST_PREDICTED]
    columns = ["pattern", "floor us", "bmm us", "fastest us", "efficiency", "bmm / ours", *heads]
    return tables.of(columns, lines, f"Tiles of the family {family}")


def write(path: Path, rows_of: dict[Pattern, list[Row]]) -> None:
    """Write every measurement as CSV."""
    rows = [row for rows in rows_of.values() for row in rows]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        times = ["floor_us", "bmm_us", "latency_us", "predicted_us"]
        writer.writerow(["pattern", "batch", *asdict(rows[0].config), *times])
        for row in rows:
            cells = [f"{getattr(row, name):.2f}" for name in times]
            writer.writerow([row.pattern, row.rows, *asdict(row.config).values(), *cells])


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the arguments, measure, print, write."""
    parser = argparse.ArgumentParser(prog="python docs/experiments/tiles.py")
    parser.add_argument("family", choices=names())
    parser.add_argument("--tiles", type=int, default=60, help="random tiles a pattern (60)")
    parser.add_argument("--batch", type=int, default=paper_patterns.BATCH)
    parser.add_argument("--patterns", nargs="+", metavar="PATTERN@ROWS", help="these instead")
    parser.add_argument("--each", metavar="FIELD", help="two tiles of each value of FIELD, too")
    parser.add_argument(
        "--random", type=int, metavar="N", help="factors of N random chains instead"
    )
    parser.add_argument("--seed", type=int, default=0, help="of these (0)")
    parser.add_argument("--fewest-rows", type=int, default=600, help="of these (600)")
    parser.add_argument("--dtype", help="another of the family's element types than its first")
    parser.add_argument("--out", type=Path, default=Path("ksopt-report-tiles.csv"))
    args = parser.parse_args(arguments)
    family = family_of(args.family)
    try:
        device = devices.resolve("cuda")
        spec = DeviceSpec.of_device(torch.cuda.current_device())
        subjects = [(Pattern.parse(text), args.batch) for text in PATTERNS]
        if args.patterns:
            subjects = [problem_with_rows(text) for text in args.patterns]
        elif args.random is not None:
            subjects = random_problems(args.random, args.seed, args.fewest_rows)
        several = [(problem_of(family, pattern, args.dtype), rows) for pattern, rows in subjects]
        problems = {p: rows for p, rows in several if family.unsupported_reason(p, spec) is None}
        if not problems:
            raise InvalidInputError(f"{args.family} computes none of the {len(several)} products")
        roofline = measure_roofline(device, next(iter(problems)).dtype)
        record = devices.record(device)
        rows_of = {
            p.pattern: time_tiles(family, p, args.tiles, rows, roofline, spec, args.each)
            for p, rows in problems.items()
        }
    except KsoptError as error:
        print(f"python docs/experiments/tiles.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, InvalidInputError) else 1
    drawn = f"batch {args.batch}" if args.random is None else f"seed {args.seed}"
    print(f"{record.name}, torch {record.torch}, commit {record.commit}, {drawn}")
    tables.write(summary(args.family, rows_of))
    write(args.out, rows_of)
    print(f"Every measurement: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
