"""Condenses a benchmark of random patterns: data and table of docs/development/kernels.md.

    ksopt bench kernels --patterns random:200 --seed 20261125 --dtype bfloat16 --out FOLDER
    python docs/experiments/random_patterns.py FOLDER/bench.csv docs/data/random-SEED.csv
    python docs/experiments/random_patterns.py --table docs/data/random-SEED.csv
    python docs/experiments/random_patterns.py --bound 4000

The first line measures. The second stores, for each product, the time of ksopt's operator and of
the fastest of PyTorch's ways in the same layout, with those that multiply stored zeros separate.
The third prints the page's numbers of such a file. The last prints the efficiency of a perfect
kernel on that many random products, if memory's time came on top of a launch's.
"""

from __future__ import annotations

import csv
import statistics
import sys
from collections import defaultdict
from pathlib import Path

from ksopt.bench import random_subjects
from ksopt.kernels.problem import FEW_ROWS

ZEROS = ("dense", "expand")
_NO_RIVALS = ("ksopt", "bmm_paper_product")
MANY_ROWS = 4096
_SHORT_US = 3.0
_COPY_BYTES_US = 4.2e6
_LAUNCHES_US = (2.5, 4.2)
COLUMNS = (
    *("chain", "rows", "ksopt_us", "efficiency"),
    *("best_of_blocks", "best_of_blocks_us", "best_with_zeros", "best_with_zeros_us"),
)


def condensed(bench: Path) -> list[dict[str, str]]:
    """The rows of a bench.csv, condensed to one per product."""
    products: dict[tuple[str, str], list[dict[str, str]]] = defaultdict(list)
    with bench.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            products[row["chain"], row["batch"]].append(row)
    rows = []
    for (chain, batch), ways in products.items():
        own = next(one for one in ways if one["way"] == "ksopt" and one["median_us"])
        rivals = [
            (float(one["median_us"]), one["way"])
            for one in ways
            if one["layout"] == own["layout"] and one["median_us"] and one["way"] not in _NO_RIVALS
        ]
        best = []
        for group in (
            [one for one in rivals if one[1] not in ZEROS],
            [one for one in rivals if one[1] in ZEROS],
        ):
            us, way = min(group, default=(None, ""))
            best += [way, "" if us is None else f"{us:.2f}"]
        own_us, efficiency = float(own["median_us"]), float(own["efficiency"])
        values = (chain, batch, f"{own_us:.2f}", f"{efficiency:.4f}", *best)
        rows.append(dict(zip(COLUMNS, values, strict=True)))
    return rows


def slower(rows: list[dict[str, str]], columns: tuple[str, ...]) -> list[float]:
    """The ratios above 1.03 of ksopt's time to the least of some columns, largest first."""
    ratios = []
    for row in rows:
        times = [float(row[name]) for name in columns if row[name]]
        if times and float(row["ksopt_us"]) > 1.03 * min(times):
            ratios.append(float(row["ksopt_us"]) / min(times))
    return sorted(ratios, reverse=True)


def table(rows: list[dict[str, str]]) -> str:
    """The page's numbers."""
    large = sorted(float(row["efficiency"]) for row in rows if int(row["rows"]) >= MANY_ROWS)
    blocks = slower(rows, ("best_of_blocks_us",))
    every = slower(rows, ("best_of_blocks_us", "best_with_zeros_us"))
    few = slower(
        [row for row in rows if int(row["rows"]) <= FEW_ROWS],
        ("best_of_blocks_us", "best_with_zeros_us"),
    )
    floors = [
        float(row["ksopt_us"]) * float(row["efficiency"])
        for row in rows
        if int(row["rows"]) >= MANY_ROWS
    ]
    tenth, tenth_of_every = (sum(one > 1.1 for one in ratios) for ratios in (blocks, every))
    faster = statistics.median(
        float(row["best_of_blocks_us"]) / float(row["ksopt_us"])
        for row in rows
        if int(row["rows"]) >= MANY_ROWS and row["best_of_blocks_us"]
    )
    return (
        f"{len(large)} products of at least {MANY_ROWS} rows: median efficiency "
        f"{statistics.median(large):.2f}, 10th percentile {large[len(large) // 10]:.2f}, "
        f"median speedup over the blocks' ways {faster:.2f}\n"
        f"of {len(rows)} slower by more than 3 % than the blocks' ways: {len(blocks)}, by more "
        f"than 10 %: {tenth}, at most {max(blocks, default=1.0):.2f} times\n"
        f"than any way: {len(every)}, by more than 10 %: {tenth_of_every}, at most "
        f"{max(every, default=1.0):.2f} times; of these with at most {FEW_ROWS} rows: "
        f"{len(few)}\n"
        f"of the {len(large)}, memory takes less than {_SHORT_US:g} us of "
        f"{sum(us < _SHORT_US for us in floors)}"
    )


def bound(count: int, seed: int = 31415) -> str:
    """The efficiencies of kernels that read and write once, at an H200's copy bandwidth."""
    drawn = [one for one in random_subjects.draw(count, seed) if one[1] >= MANY_ROWS]
    lines = []
    for dtype, size in (("bf16", 2), ("fp32", 4)):
        floors = sorted(
            (rows * (chain.in_features + chain.out_features) + chain.nnz) * size / _COPY_BYTES_US
            for chain, rows in drawn
        )
        words = [
            f"{dtype}: {len(floors)} products, a tenth below {floors[len(floors) // 10]:.2f} us"
        ]
        for launch_us in _LAUNCHES_US:
            reached = [floor / (floor + launch_us) for floor in floors]
            words.append(
                f"launched in {launch_us} us: median {statistics.median(reached):.2f}, "
                f"10th percentile {reached[len(reached) // 10]:.2f}"
            )
        lines.append("; ".join(words))
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """Run one of the module's commands."""
    first, second = arguments
    if first == "--bound":
        print(bound(int(second)))
        return
    if first == "--table":
        with Path(second).open(encoding="utf-8", newline="") as lines:
            print(table(list(csv.DictReader(lines))))
        return
    rows = condensed(Path(first))
    with Path(second).open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(table(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
