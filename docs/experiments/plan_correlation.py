"""Rank correlation of the planner's predicted times with measured ones, of whole layers.

    python docs/experiments/plan_correlation.py
    python docs/experiments/plan_correlation.py docs/data/crossover-h200.csv --gpu H200

Reads the layers y = gelu(x W^T + bias) that a crossover map has measured for inference (by default
docs/data/crossover-h100.csv, of an H100), and predicts each by its plan: one launch, or several and
PyTorch's operations behind them. No cost model was fitted to these layers. Needs no GPU.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from ksopt.bench.reproduction.statistics import rank_correlation
from ksopt.kernels.gpus import GPUS
from ksopt.kernels.planner import plan_of
from ksopt.kernels.problem import Epilogue, Problem
from ksopt.kernels.registry import best_predicted
from ksopt.measure.measurement import quantile
from ksopt.patterns.chain import Chain

MEASURED = Path(__file__).parents[1] / "data" / "crossover-h100.csv"
BEHIND = Epilogue(bias=True, activation="gelu_tanh")
KINDS = {"float32": ("float32", True), "tf32": ("float32", False), "bfloat16": ("bfloat16", True)}
"""Precision -> dtype, and whether products are exact."""

Case = tuple[str, bool, float, float]
"""Precision, whether one launch is planned, microseconds predicted and measured."""


def cases(file: Path, gpu: str = "H100") -> list[Case]:
    """The measured layers of a map of a GPU."""
    spec = GPUS[gpu]
    several: list[Case] = []
    with file.open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            if row["status"] != "measured" or row["pass"] != "inference":
                continue
            dtype, exact = KINDS[row["precision"]]
            problem = Problem(Chain.parse(row["chain"]), dtype, False, exact, BEHIND)
            rows = int(row["rows"])
            plan = plan_of(problem, rows, spec=spec)
            us = best_predicted(problem, rows, spec)[0].with_epilogue_us(rows, spec)
            several.append((row["precision"], plan.is_whole, us, float(row["ks_us"])))
    return several


def summary(several: list[Case]) -> str:
    """Spearman's coefficient, and measured over predicted time, of all and of each precision.

    Example:
        >>> print(summary([("tf32", True, 1.0, 2.0), ("tf32", False, 2.0, 3.0)]))
        tf32: 2 layers, Spearman -; measured over predicted 1.75 (1.50 to 2.00)
        one launch: 1 layer, Spearman -; measured over predicted 2.00 (2.00 to 2.00)
        several: 1 layer, Spearman -; measured over predicted 1.50 (1.50 to 1.50)
        all: 2 layers, Spearman -; measured over predicted 1.75 (1.50 to 2.00)
    """
    groups = {kind: [one for one in several if one[0] == kind] for kind in KINDS}
    groups |= {"one launch": [one for one in several if one[1]]}
    groups |= {"several": [one for one in several if not one[1]], "all": several}
    lines = []
    for name, those in groups.items():
        if not those:
            continue
        rank = rank_correlation([(predicted, measured) for *_, predicted, measured in those])
        ratios = sorted(measured / predicted for *_, predicted, measured in those)
        lines.append(
            f"{name}: {len(those)} layer{'s' if len(those) > 1 else ''}, "
            f"Spearman {'-' if rank is None else format(rank, '.2f')}; measured over predicted "
            f"{quantile(ratios, 0.5):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("file", nargs="?", type=Path, default=MEASURED)
    parser.add_argument("--gpu", default="H100", choices=tuple(GPUS))
    args = parser.parse_args()
    print(summary(cases(args.file, args.gpu)))
