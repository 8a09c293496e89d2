"""Runs every kernel family once on ten patterns, for compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/gpu/sanitize.py
    compute-sanitizer --tool racecheck python tests/gpu/sanitize.py

The batch is small and odd, so that every tail is met and the tools' slowness does not matter.
"""

import itertools

import torch

from ksopt.bench.paper import stratified_sample
from ksopt.kernels import general, lanes16
from ksopt.kernels.problem import Problem

ROWS = 77


def main() -> None:
    ran = 0
    dtypes = ("float32", "float16", "bfloat16")
    for pattern, dtype, last in itertools.product(
        stratified_sample(10, seed=1), dtypes, (False, True)
    ):
        problem = Problem(pattern, dtype, last)
        x = torch.randn(ROWS, pattern.in_features, device="cuda").to(getattr(torch, dtype))
        x = x.T.contiguous() if last else x
        weight = torch.randn(pattern.weight_shape, device="cuda").to(x.dtype)
        launchers = [general.launcher(problem, 0)]
        if lanes16.supports(problem) is None:
            tiles = list(lanes16.configs(problem, 132))
            chosen = {tiles[0], tiles[len(tiles) // 2], tiles[-1]}
            launchers += [lanes16.launcher(problem, tile, 0) for tile in chosen]
        for launch in launchers:
            y = launch(x, weight)
            torch.cuda.synchronize()
            assert not torch.isnan(y).any(), (pattern, dtype, last)
            ran += 1
    print(f"ran {ran} kernels on 10 patterns")


if __name__ == "__main__":
    main()
