"""What is to be computed, as the kernel families see it."""

from __future__ import annotations

from dataclasses import dataclass

from ksopt.patterns.chain import Pattern

SHARED_LIMIT = 227 * 1024
"""Dynamic shared memory of a block on sm_90, in bytes: the most that any tile may ask for."""


@dataclass(frozen=True)
class Problem:
    """One factor's product y = x K^T, whatever the batch.

    Attributes:
        pattern: support of K.
        dtype: torch's name of the element type of x, weight and y, such as ``float16``.
        batch_last: whether x is (N, batch) and y is (M, batch) instead of batch first.
        exact: for float32, whether to FP32 accuracy, not TF32's; True for all other types.
    """

    pattern: Pattern
    dtype: str
    batch_last: bool
    exact: bool = True


@dataclass(frozen=True)
class Geometry:
    """How a kernel is launched on any batch.

    Attributes:
        threads: threads a block.
        shared_bytes: dynamic shared memory a block, in bytes.
        rows_per_tile: batch rows that one tile covers.
        tiles_per_row_tile: tiles that together cover all output features of those rows.
        max_blocks: blocks of the largest launch; blocks loop over the tiles beyond.
        early: whether it may be launched before the kernel ahead of it ends (programmatic dependent
            launch, sm_90 and up): then it waits by itself before it reads or writes anything. The
            Python launcher, which is slower than such a launch saves, takes no notice.
    """

    threads: int
    shared_bytes: int
    rows_per_tile: int
    tiles_per_row_tile: int
    max_blocks: int
    early: bool = False
