"""Whether a way computes the right thing, asked before it may be chosen."""

from __future__ import annotations

import torch
from torch import Tensor

from ksopt import precision
from ksopt.baselines import BASELINES
from ksopt.reference import ks_reference

_ENDS = 64  # rows at either end of the batch: the first tiles, and the last, which may be partial
_ALLOWED_ERROR = 2.0  # times PyTorch's own: another order of summation rounds differently
_TF32_ROUNDING = 2.0**-11  # allowed where TF32 is, though cuBLAS may have been more exact
# Sums of 16-bit products are kept in fp32 and rounded once. What tensor cores lose of them, in
# shares of sum |x||w|: a few units in fp32's last place for each 8 terms. 16-bit partial sums lose
# hundreds of times as much, and hide behind the last rounding in the error of all outputs together.
_UNIT, _TERMS = 2.0**-22, 8


class Check:
    """Compares results with float64, on rows of both ends of the batch.

    Operands whose product is nothing but zeros, or not finite in float64 or in PyTorch's own
    computation, say nothing about a way: then every result passes (see `checking`).

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
        self._sums: Tensor | None = None
        if x.dtype.itemsize < 4:
            self._sums = ks_reference(few.double().abs(), weight.double().abs(), layout)
        self._allowed = self._allowed_beyond = float("inf")
        if 0 < float(self._size) < float("inf"):  # false for NaN
            pytorch = BASELINES["bmm"].bind(weight, layout)(few)
            tf32 = x.is_cuda and x.dtype == torch.float32 and not precision.is_exact()
            least = _TF32_ROUNDING if tf32 else torch.finfo(x.dtype).eps
            theirs = self._error(pytorch)
            if theirs < float("inf"):  # otherwise PyTorch's own overflows or is NaN too
                self._allowed = _ALLOWED_ERROR * max(theirs, least)
                least = _UNIT * (weight.shape[2] / _TERMS + _TERMS)
                self._allowed_beyond = max(_ALLOWED_ERROR * self._beyond(pytorch), least)

    @property
    def tells(self) -> bool:
        """Whether the operands say anything about a way."""
        return self._allowed < float("inf")

    def _rows(self, tensor: Tensor) -> Tensor:
        if self._last:
            flat = tensor.reshape(tensor.shape[0], -1)
            return torch.cat([flat[:, :_ENDS], flat[:, -_ENDS:]], 1)
        flat = tensor.reshape(-1, tensor.shape[-1])
        return torch.cat([flat[:_ENDS], flat[-_ENDS:]])

    def _error(self, y: Tensor) -> float:
        return float((y.double() - self._truth).norm() / self._size)

    def _beyond(self, y: Tensor) -> float:
        """The largest error beyond one rounding to 16 bit, in shares of sum |x||w|."""
        if self._sums is None:
            return 0.0
        kind = torch.finfo(y.dtype)
        # Beyond the largest number is infinity, which is right there.
        truth = self._truth.clamp(-kind.max, kind.max)
        rounding = kind.eps / 2 * (1 + kind.eps) * truth.abs() + kind.smallest_normal * kind.eps
        beyond = (y.double().clamp(-kind.max, kind.max) - truth).abs() - rounding
        return float((beyond.clamp(min=0) / self._sums.clamp(min=kind.smallest_normal)).max())

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
        if not error <= self._allowed:  # true for NaN
            return f"its result is wrong (relative error {error:.1e}, allowed {self._allowed:.1e})"
        beyond = self._beyond(rows)
        if beyond <= self._allowed_beyond:
            return None
        return (
            f"its sums are rounded more than once (by {beyond:.1e} of sum |x||w|, allowed "
            f"{self._allowed_beyond:.1e})"
        )


def checking(x: Tensor, weight: Tensor, batch_last: bool) -> tuple[Check, Tensor, Tensor]:
    """A check that tells right from wrong, and the operands that it is for.

    They are those given, or random ones that lie in memory as these do: what is chosen now, on NaN
    or zeros, multiplies ordinary numbers later.

    Args:
        x, weight, batch_last: as for `Check`.
    """
    check = Check(x, weight, batch_last)
    if not check.tells:
        x, weight = _random_like(x), _random_like(weight)
        check = Check(x, weight, batch_last)
    return check, x, weight


def _random_like(tensor: Tensor) -> Tensor:
    """Random numbers in new memory, with the strides and the alignment to 16 bytes of a tensor."""
    size = tensor.element_size()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    reach = 1 + sum((length - 1) * stride for length, stride in steps)
    offset = tensor.data_ptr() % 16 // size
    memory = torch.randn(reach + offset, device=tensor.device).to(tensor.dtype)
    return memory.as_strided(tensor.shape, tensor.stride(), offset)
