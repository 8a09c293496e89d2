"""The layout of consecutive values of j in the 16-byte chunks that kernels load."""

from __future__ import annotations

import functools
from dataclasses import dataclass


@dataclass(frozen=True)
class LaneLayout:
    """The layout of d consecutive j in chunks: ``LaneLayout`` of csrc/cuda, with the same names.

    Attributes:
        j: values of j that a thread holds at a time.
        run: chunks that hold whole values of l, of j values each.
        run_l: values of l in a run.
        length: values of l that a thread takes at a time.
        steps: tensor-core steps for that many.
    """

    j: int
    run: int
    run_l: int
    length: int
    steps: int

    @property
    def unit(self) -> int:
        """Values of l that a warp takes at a time."""
        return 4 * self.length

    @property
    def chunks(self) -> int:
        """16-byte loads of a thread for one row and unit."""
        return self.length // self.run_l * self.run


@functools.cache  # called for every tile that is considered
def lane_layout(d: int, elements: int = 8) -> LaneLayout:
    """The layout for ``d`` where a chunk holds ``elements`` values.

    Args:
        d: 1, 2, 3, 4, 6, 12 or a multiple of 8 for 8 elements; 1, 2, 3, 6 or a multiple of 4 for 4.
        elements: 8 for 16-bit values, 4 for fp32.

    Example:
        >>> lane_layout(4)
        LaneLayout(j=4, run=1, run_l=2, length=4, steps=1)
    """
    wide = d % elements == 0
    j = elements if wide else d
    run = 3 if not wide and d % 3 == 0 else 1
    run_l = run * elements // j
    least = elements // 2  # values of l of a thread in one tensor-core step
    length = max(least, run_l)
    return LaneLayout(j, run, run_l, length, length // least)
