"""Times of ksopt's operator and of PyTorch's ways, for one factor at a time.

Each way is checked against the float64 reference first, on a few rows of the same input; one that
is wrong gets no time. All right ones are then timed in turns.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ksopt import ops, tables
from ksopt.baselines import BASELINES, Product
from ksopt.bench.roofline import Roofline
from ksopt.bench.timing import Measurement, measure
from ksopt.pattern import Pattern
from ksopt.reference import is_batch_last, ks_reference

OURS = "ksopt"
# Rounding makes the last bits of any two right ways differ: twice PyTorch's error is still right.
_ALLOWED_ERROR = 2.0
_CHECKED_ROWS = 8
# Ways that write the zeros out are not tried where that takes more elements than this.
_MOST_ELEMENTS = 2**26


@dataclass(frozen=True)
class Row:
    """One way to compute one product. ``latency`` is None where ``reason`` says why."""

    pattern: Pattern
    way: str
    floor_us: float
    latency: Measurement | None
    reason: str = ""

    @property
    def efficiency(self) -> float | None:
        """Roofline floor over measured time."""
        return None if self.latency is None else self.floor_us / self.latency.median_us


def compare(
    pattern: Pattern, batch: int, dtype: torch.dtype, layout: str, roofline: Roofline
) -> list[Row]:
    """Check and time every way to multiply ``batch`` random rows by a random factor."""
    device = torch.device(roofline.device)
    batch_last = is_batch_last(layout)
    size = (pattern.in_features, batch) if batch_last else (batch, pattern.in_features)
    x = torch.randn(size, device=device).to(dtype)
    weight = (torch.randn(pattern.weight_shape, device=device) / pattern.c**0.5).to(dtype)

    few = x[..., :_CHECKED_ROWS] if batch_last else x[:_CHECKED_ROWS]
    truth = ks_reference(few.double(), weight.double(), layout)

    def error(y: Tensor) -> float:
        return (y.double() - truth).abs().max().item()

    floor_us = roofline.floor_us(pattern.bytes(batch, dtype), pattern.flops(batch))
    allowed = _ALLOWED_ERROR * error(BASELINES["bmm"].bind(weight, layout)(few))
    ways = {OURS: lambda given: ops.ks_mm(given, weight, batch_last)}
    reasons = {}
    product = Product(pattern, dtype, device.type, batch_last)
    for name, baseline in BASELINES.items():
        support = baseline.supports(product)
        written = {"dense": pattern.a**2, "expand": pattern.a}.get(name, 0)
        if not support.ok:
            reasons[name] = support.reason
        elif written * pattern.b * pattern.c * pattern.d**2 > _MOST_ELEMENTS:
            reasons[name] = "too many zeros to write out"
        else:
            ways[name] = baseline.bind(weight, layout)
    for name in list(ways):
        found = error(ways[name](few))
        if not found <= allowed:
            reasons[name] = f"wrong: error {found:.2g}, allowed {allowed:.2g}"
            del ways[name]
    times = measure({name: partial(way, x) for name, way in ways.items()}, device)
    timed = [Row(pattern, name, floor_us, latency) for name, latency in times.items()]
    return timed + [Row(pattern, name, floor_us, None, why) for name, why in reasons.items()]


def summary(rows_of: Mapping[Pattern, list[Row]]) -> tables.Table:
    """One line a pattern: ksopt beside the fastest of PyTorch's ways."""
    lines = []
    for pattern, rows in rows_of.items():
        latency = {row.way: row.latency for row in rows if row.latency is not None}
        ours = latency.pop(OURS, None)
        best = min(latency, key=lambda way: latency[way].median_us)
        theirs = latency[best].median_us
        lines.append(
            (
                str(pattern),
                f"{pattern.rho:.4f}",
                f"{rows[0].floor_us:.1f}",
                "wrong" if ours is None else f"{ours.median_us:.1f}",
                "" if ours is None else f"{rows[0].floor_us / ours.median_us:.2f}",
                best,
                f"{theirs:.1f}",
                "" if ours is None else f"{theirs / ours.median_us:.2f}",
            )
        )
    heads = ("pattern", ">rho", ">floor us", ">ksopt us", ">efficiency", "PyTorch's best")
    return tables.of((*heads, ">us", ">times faster"), lines)


def write(folder: Path, rows: list[Row], setting: Mapping[str, object]) -> None:
    """Write bench.csv, one line a way, and setting.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "setting.json").write_text(json.dumps(dict(setting), indent=2), encoding="utf-8")
    with (folder / "bench.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(
            ("pattern", "way", "median_us", "p20_us", "p80_us", "floor_us", "efficiency", "reason")
        )
        for row in rows:
            took = row.latency
            times = (took.median_us, took.p20_us, took.p80_us) if took else ("", "", "")
            shown = (row.floor_us, "" if row.efficiency is None else row.efficiency, row.reason)
            writer.writerow((row.pattern, row.way, *times, *shown))
