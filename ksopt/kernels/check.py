"""Whether a way computes the right thing, asked before it may be chosen."""

from __future__ import annotations

import torch
from torch import Tensor

from ksopt.baselines import BASELINES
from ksopt.kernels import lanes32
from ksopt.reference import ks_reference

_ENDS = 64  # rows at either end of the batch: the first tiles, and the last, which may be partial
_ALLOWED_ERROR = 2.0  # times PyTorch's own: another order of summation rounds differently
_TF32_ROUNDING = 2.0**-11  # allowed where TF32 is, though cuBLAS may have been more exact


class Check:
    """Compares results with float64, on rows of both ends of the batch.

    Operands whose product is nothing but zeros, or not finite in float64 or in PyTorch's own
    computation, say nothing about a way: then every result passes.

    Args:
        x: (*batch, N), or (N, *batch) when batch_last.
        weight: (a, b, c, d).
        batch_last: the layout.
    """

    def __init__(self, x: Tensor, weight: Tensor, batch_last: bool) -> None:
        self._last = batch_last
        few = self._rows(x)
        layout = "batch_last" if batch_last else "batch_first"
        self._truth = ks_reference(few.double(), weight.double(), layout)
        self._size = self._truth.norm()
        self._allowed = float("inf")
        if 0 < float(self._size) < float("inf"):  # false for NaN
            pytorch = BASELINES["bmm"].bind(weight, layout)(few)
            tf32 = x.is_cuda and x.dtype == torch.float32 and not lanes32.precise()
            least = _TF32_ROUNDING if tf32 else torch.finfo(x.dtype).eps
            theirs = self._error(pytorch)
            if theirs < float("inf"):  # otherwise PyTorch's own overflows or is NaN too
                self._allowed = _ALLOWED_ERROR * max(theirs, least)

    def _rows(self, tensor: Tensor) -> Tensor:
        if self._last:
            flat = tensor.reshape(tensor.shape[0], -1)
            return torch.cat([flat[:, :_ENDS], flat[:, -_ENDS:]], 1)
        flat = tensor.reshape(-1, tensor.shape[-1])
        return torch.cat([flat[:_ENDS], flat[-_ENDS:]])

    def _error(self, y: Tensor) -> float:
        return float((y.double() - self._truth).norm() / self._size)

    def __call__(self, y: Tensor) -> str | None:
        """What is wrong with a result, in words; None if nothing is, or nothing can be said.

        Overwrites it: the next way's result is likely to get its memory, and must not be right
        there without being written.
        """
        rows = self._rows(y)
        y.fill_(float("nan"))
        if self._allowed == float("inf"):
            return None
        error = self._error(rows)
        if error <= self._allowed:  # false for NaN
            return None
        return f"its result is wrong (relative error {error:.1e}, allowed {self._allowed:.1e})"
