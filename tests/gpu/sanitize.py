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
from ksopt.kernels.families import (
    batch_last_mma16,
    batch_last_mma_tf32x3,
    batch_last_wgmma16,
    batch_last_wgmma_tf32x3,
    decode_fma,
    decode_mma16,
    mma16,
    mma_tf32x3,
    naive,
    wgmma16,
    wgmma16_streamed,
    wgmma_tf32x3,
)
from ksopt.kernels.problem import Problem
from ksopt.patterns.chain import Pattern

ROWS = 37
FAMILIES = (
    *(mma16, wgmma16, wgmma16_streamed, mma_tf32x3, wgmma_tf32x3),
    *(batch_last_mma16, batch_last_wgmma16, batch_last_mma_tf32x3, batch_last_wgmma_tf32x3),
    *(decode_mma16, decode_fma),
)
HOPPER_ALONE = (
    *(wgmma16, wgmma16_streamed, wgmma_tf32x3),
    *(batch_last_wgmma16, batch_last_wgmma_tf32x3),
)


def smallest(count: int) -> list[Pattern]:
    """The smallest patterns of the sample, one of each d before a second of any."""
    ordered = sorted(stratified_sample(100, seed=0), key=lambda p: p.nnz)
    by_d: dict[int, list[Pattern]] = {}
    for pattern in ordered:
        by_d.setdefault(pattern.d, []).append(pattern)
    turns = itertools.zip_longest(*(by_d[d] for d in sorted(by_d)))
    return [pattern for turn in turns for pattern in turn if pattern is not None][:count]


def main() -> None:
    families = {module.__name__.rpartition(".")[2]: module for module in FAMILIES}
    unknown = set(sys.argv[1:]) - set(families)
    if unknown:
        sys.exit(f"{', '.join(sorted(unknown))}: not one of {', '.join(families)}")
    asked = [module for name, module in families.items() if name in (sys.argv[1:] or families)]
    ran = 0
    hopper = torch.cuda.get_device_capability(0) == (9, 0)
    dtypes = ("float32", "float16", "bfloat16")
    for pattern, dtype, last in itertools.product(smallest(10), dtypes, (False, True)):
        problem = Problem(pattern, dtype, last)
        x = torch.randn(ROWS, pattern.in_features, device="cuda").to(getattr(torch, dtype))
        x = x.T.contiguous() if last else x
        weight = torch.randn(pattern.weight_shape, device="cuda").to(x.dtype)
        launchers = [naive.launcher(problem, 0)]
        for module in asked:
            if module.supports(problem) is None and (hopper or module not in HOPPER_ALONE):
                tiles = list(module.configs(problem, 132))
                chosen = {tiles[len(tiles) // 3], tiles[-1]}
                launchers += [module.launcher(problem, tile, 0) for tile in chosen]
        for launch in launchers:
            y = launch(x, weight)
            torch.cuda.synchronize()
            assert not torch.isnan(y).any(), (pattern, dtype, last)
            ran += 1
    print(f"ran {ran} kernels on 10 patterns")


if __name__ == "__main__":
    main()
