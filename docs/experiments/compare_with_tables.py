"""Compares ksopt's times in a benchmark with the tables of docs/data.

    python docs/experiments/compare_with_tables.py FOLDER float16-batch_first

FOLDER is the output of this command, for the dtype and layout of the table:

    ksopt bench kernels --patterns sample:60 --seed 1 --batch 25088 --out FOLDER

A file of that form may take its place, such as products-float16.csv of ``ksopt bench paper``.
"""

from __future__ import annotations

import csv
import statistics
import sys
from pathlib import Path

DATA = Path(__file__).parents[1] / "data"


def times_us(file: Path, layout: str) -> dict[str, float]:
    """The median time of ksopt's operator in a layout, by chain."""
    with file.open(encoding="utf-8", newline="") as lines:
        return {
            row["chain"]: float(row["median_us"])
            for row in csv.DictReader(lines)
            if row["way"] == "ksopt" and row["layout"] == layout and row["median_us"]
        }


def main(folder: str, table: str) -> None:
    """Print the ratios of new times to old."""
    layout = table.split("-")[1]
    file = Path(folder)
    new = times_us(file / "bench.csv" if file.is_dir() else file, layout)
    old = times_us(DATA / f"kernels-{table}.csv", layout)
    ratios = sorted((us / old[chain], chain) for chain, us in new.items() if chain in old)
    values = [ratio for ratio, _ in ratios]
    print(f"{table}: {len(values)} patterns, median {statistics.median(values):.3f}")
    print(
        f"faster by 5 %: {sum(v < 0.95 for v in values)}, slower: {sum(v > 1.05 for v in values)}"
    )
    print("slowest:", *(f"{chain} {ratio:.2f}" for ratio, chain in ratios[-3:]))


if __name__ == "__main__":
    main(*sys.argv[1:])
