"""``python -m ksopt.bench``: time ksopt's operator and PyTorch's ways on the paper's patterns.

The summary goes to stdout, one line a pattern, losses included; every measurement goes to a CSV
file, beside a record of the device.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from ksopt import tables
from ksopt.bench import device as devices
from ksopt.bench import paper, products
from ksopt.bench.roofline import measure_roofline
from ksopt.errors import InvalidInputError, KsoptError


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the arguments, measure, print, write."""
    parser = argparse.ArgumentParser(
        prog="python -m ksopt.bench", description=__doc__.splitlines()[0].split(": ")[1]
    )
    parser.add_argument("--patterns", type=int, help="how many of the 627 (CPU 6, GPU 100)")
    parser.add_argument("--batch", type=int, help=f"rows (CPU 256, GPU {paper.BATCH})")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--layout", default="batch_first", choices=("batch_first", "batch_last"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0, help="of the sample and the inputs (0)")
    parser.add_argument("--out", type=Path, default=Path("ksopt-report-bench"))
    given = parser.parse_args(arguments)
    try:
        device = devices.resolve(given.device)
        gpu = device.type == "cuda"
        batch = given.batch or (paper.BATCH if gpu else 256)
        sample = paper.stratified_sample(given.patterns or (100 if gpu else 6), given.seed)
        torch.manual_seed(given.seed)
        roofline = measure_roofline(device, given.dtype)
        record = devices.record(device)
        print(f"{record.name}, {given.dtype}, {given.layout}, batch {batch}\n")
        dtype = getattr(torch, given.dtype)
        rows_of = {p: products.compare(p, batch, dtype, given.layout, roofline) for p in sample}
    except KsoptError as error:
        print(f"python -m ksopt.bench: {error}", file=sys.stderr)
        return 2 if isinstance(error, InvalidInputError) else 1
    tables.write(products.summary(rows_of))
    setting = {"device": asdict(record), "roofline": asdict(roofline), "batch": batch}
    rows = [row for rows in rows_of.values() for row in rows]
    products.write(given.out, rows, setting | {"layout": given.layout, "seed": given.seed})
    print(f"\nEvery measurement: {given.out / 'bench.csv'}")
    return 0 if all(row.latency or not row.reason.startswith("wrong") for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
