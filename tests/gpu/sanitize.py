"""Runs every kernel family once on ten patterns, for compute-sanitizer.

    compute-sanitizer --tool memcheck --report-api-errors no python tests/gpu/sanitize.py
    compute-sanitizer --tool racecheck python tests/gpu/sanitize.py mma16 wgmma16

Names of families: only those, and the general kernel.

The patterns are the smallest of the tests' sample, one of each d in turn, and the batch is small
and odd: every tail is met, and the tools' slowness does not matter. (Errors of driver calls are
left out because cuda-bindings asks the driver for functions that it may not have.)
"""

import itertools
import sys

import torch

from ksopt.bench.paper import stratified_sample
from ksopt.kernels.families import naive
from ksopt.kernels.families.base import TemplateFamily, families
from ksopt.kernels.problem import DeviceSpec, Problem
from ksopt.patterns.chain import Pattern

ROWS = 37


def smallest(count: int) -> list[Pattern]:
    """The smallest patterns of the sample, one of each d before a second of any."""
    ordered = sorted(stratified_sample(100, seed=0), key=lambda p: p.nnz)
    by_d: dict[int, list[Pattern]] = {}
    for pattern in ordered:
        by_d.setdefault(pattern.d, []).append(pattern)
    turns = itertools.zip_longest(*(by_d[d] for d in sorted(by_d)))
    return [pattern for turn in turns for pattern in turn if pattern is not None][:count]


def main() -> None:
    every = {
        family.name: family
        for family in families()
        if isinstance(family, TemplateFamily) and not family.is_fallback
    }
    unknown = set(sys.argv[1:]) - set(every)
    if unknown:
        sys.exit(f"{', '.join(sorted(unknown))}: not one of {', '.join(every)}")
    chosen = [family for name, family in every.items() if name in (sys.argv[1:] or every)]
    ran = 0
    device = DeviceSpec.of_device(0)
    dtypes = ("float32", "float16", "bfloat16")
    for pattern, dtype, last in itertools.product(smallest(10), dtypes, (False, True)):
        # Exact products of short sums are left to PyTorch: there the kernels compute in TF32.
        exact = dtype != "float32" or pattern.c >= 32
        problem = Problem.of_factor(pattern, dtype, last, exact)
        x = torch.randn(ROWS, pattern.in_features, device="cuda").to(getattr(torch, dtype))
        x = x.T.contiguous() if last else x
        weight = torch.randn(pattern.weight_shape, device="cuda").to(x.dtype)
        launchers = [naive.launcher(problem, 0)]
        for family in chosen:
            if family.unsupported_reason(problem, device) is None:
                tiles = list(family.configs(problem, device))
                two = {tiles[len(tiles) // 3], tiles[-1]}
                launchers += [family.launcher(problem, tile, 0) for tile in two]
        for launch in launchers:
            y = launch(x, weight)
            torch.cuda.synchronize()
            assert not torch.isnan(y).any(), (pattern, dtype, last)
            ran += 1
    print(f"ran {ran} kernels on 10 patterns")


if __name__ == "__main__":
    main()
