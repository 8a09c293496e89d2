"""Whether a way computes the right thing: nothing that fails here is timed.

A way's result is compared with the float64 reference on rows from the whole batch, and looked
through for NaN everywhere: before each call, memory of the size of the result is filled with NaN
and freed, so that the allocator hands it out again and what a kernel leaves unwritten shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ksopt.baselines import BASELINES
from ksopt.patterns.chain import Pattern
from ksopt.reference import chain_reference, is_batch_last

# Rounding makes the last bits of any two right ways differ: another order of summation gives up to
# twice PyTorch's error.
_ALLOWED_ERROR = 2.0
# Of the largest result: more is not rounding, even where PyTorch itself were that far off.
_LARGEST_SHARE = 0.02
# Rows at each end of the batch, where tails are, and rows spread between them.
_ENDS, _BETWEEN = 64, 128


class Gate:
    """The truth on some rows of one input, in one layout.

    Args:
        x: [batch, N] when batch_first, [N, batch] when batch_last.
        weights: of the chain's factors, left to right.
        layout: "batch_first" or "batch_last".
    """

    def __init__(self, x: Tensor, weights: Sequence[Tensor], layout: str) -> None:
        self._x = x
        self._batch_last = is_batch_last(layout)
        batch = x.shape[1 if self._batch_last else 0]
        self._rows = torch.tensor(checked_rows(batch), device=x.device)
        few = self._picked(x).contiguous()
        self._truth = chain_reference(few.double(), [weight.double() for weight in weights], layout)
        features = self._truth.shape[0 if self._batch_last else 1]
        self._elements = batch * features
        largest = self._truth.abs().max().item()
        y = few
        for weight in reversed(weights):
            y = BASELINES["bmm"].bind(weight, layout)(y)
        # Of few results PyTorch's may all be exact by luck, so no less than rounding is allowed: of
        # each factor's results, and of sums in the results' own precision as well.
        sums = math.sqrt(max(weight.shape[2] for weight in weights)) if x.itemsize >= 4 else 0.0
        rounding = torch.finfo(x.dtype).eps / 2 * largest * len(weights) * (1 + sums)
        theirs = self._error(y)
        if math.isnan(theirs):
            theirs = 0.0
        self.allowed = min(_ALLOWED_ERROR * max(theirs, rounding), _LARGEST_SHARE * largest)

    def fault(self, way: Callable[[Tensor], Tensor]) -> str:
        """What is wrong with a way's result, in words; empty if nothing is."""
        self._poison()
        y = way(self._x)
        wanted = list(self._truth.shape)
        wanted[1 if self._batch_last else 0] = self._x.shape[1 if self._batch_last else 0]
        if list(y.shape) != wanted or y.dtype != self._x.dtype:
            return f"the result is {list(y.shape)} of {y.dtype}, not {wanted} of {self._x.dtype}"
        error = self._error(self._picked(y))
        if not error <= self.allowed:
            return f"error {error:.2g}, allowed {self.allowed:.2g}"
        if torch.isnan(y.sum(dtype=torch.float32)).item():
            return "parts of the result are NaN: they were not written"
        return ""

    def _poison(self) -> None:
        """Fill memory that the way's result may be given with NaN."""
        x = self._x
        blocks = [x.new_empty(size) for size in (self._elements, self._elements, x.numel())]
        for block in blocks:
            block.fill_(math.nan)

    def _picked(self, tensor: Tensor) -> Tensor:
        return tensor.index_select(1 if self._batch_last else 0, self._rows)

    def _error(self, y: Tensor) -> float:
        return (y.double() - self._truth).abs().max().item()


def checked_rows(batch: int) -> list[int]:
    """The rows that are compared: both ends, and some between them at an odd distance.

    Odd, so that they fall on every place of a tile, whose height is a power of two.

    Example:
        >>> checked_rows(3)
        [0, 1, 2]
        >>> len(checked_rows(25_088))
        255
    """
    step = max(1, batch // _BETWEEN) | 1
    ends = [*range(min(_ENDS, batch)), *range(max(0, batch - _ENDS), batch)]
    return sorted({*ends, *range(0, batch, step)})


def written_elements(name: str, pattern: Pattern) -> int:
    """Elements of the weight of a way that writes zeros out; 0 for the others."""
    written = {"dense": pattern.a**2, "expand": pattern.a}.get(name, 0)
    return written * pattern.b * pattern.c * pattern.d**2
