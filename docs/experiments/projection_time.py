"""The time to project a matrix onto two factors on the GPU, and the error.

    python docs/experiments/projection_time.py [SIDE]

For a SIDE x SIDE matrix (default 4096) and Monarch chains of few, medium and many blocks: seconds
of `ksopt.project` for a random matrix and for one that is a product of the chain, of the first run
and the least of three, with the relative errors. The error of a product of the chain should be
rounding only. ksopt's aim for 4096 x 4096 in float32 is less than 10 s on an H200.
"""

from __future__ import annotations

import sys

import torch

import ksopt
from ksopt import Chain
from ksopt.measure import device as devices
from ksopt.measure.timed_call import TimedCall
from ksopt.reference import chain_to_dense

RUNS = 3


def timed(matrix: torch.Tensor, chain: Chain) -> tuple[list[float], ksopt.Projection]:
    """The seconds of each run, and the last projection."""
    project = TimedCall(ksopt.project, matrix.device)
    seconds = []
    for _ in range(RUNS):
        projection = project(matrix, chain)
        seconds.append(project.us / 1e6)
    return seconds, projection


def main(side: int) -> None:
    """Print a line for each chain, dtype and matrix."""
    record = devices.record("cuda:0")
    print(f"{record.name}, torch {record.torch}, driver {record.driver}, ksopt {record.commit}")
    # Loads the library of the decompositions, which must not be timed.
    ksopt.project(torch.randn(64, 64, device="cuda"), Chain.monarch(64, 64, p=4))
    for dtype in (torch.float32, torch.bfloat16):
        for p in (2, round(side**0.5), side // 8):
            chain = Chain.monarch(side, side, p)
            random = torch.randn(side, side, device="cuda").to(dtype)
            weights = [torch.randn(one.weight_shape, device="cuda") for one in chain]
            product = chain_to_dense([one.to(dtype) for one in weights])
            for name, matrix in (("random", random), ("product", product)):
                seconds, projection = timed(matrix, chain)
                print(
                    f"{chain!s:36} {str(dtype).removeprefix('torch.'):9} {name:8} "
                    f"first {seconds[0]:6.2f} s, least {min(seconds):6.2f} s, "
                    f"relative error {projection.relative_error:.3g}, "
                    f"bound {projection.lower_bound:.3g}",
                    flush=True,
                )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4096)
