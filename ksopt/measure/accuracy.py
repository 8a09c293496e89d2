"""The accuracy check of products against float64 on some rows, before timing or choosing.

The truth is `chain_reference` in float64, and what is allowed is measured: PyTorch's own product in
the operands' dtype is compared with the same truth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ksopt import precision
from ksopt.baselines import BASELINES
from ksopt.epilogue import GATES, with_epilogue
from ksopt.reference import chain_reference, is_batch_last, ks_reference

# Rows at each end of the batch, where tails are: the first tiles, and the last, which may be
# partial. And rows spread between them.
_ENDS, _BETWEEN = 64, 128
_ALLOWED_ERROR = 2.0  # times PyTorch's own: another order of summation rounds differently
TF32_ROUNDING = 2.0**-11  # allowed where TF32 is, though cuBLAS may have been more exact
# Of the largest result: more is not rounding, even where PyTorch itself were that far off.
_LARGEST_SHARE = 0.02
# Sums of 16-bit products are computed in fp32 and rounded once. The loss of tensor cores, in
# shares of sum |x||w|: a few units in fp32's last place for each 8 terms. 16-bit partial sums lose
# hundreds of times as much, and hide behind the last rounding in the error of all outputs together.
_UNIT, _TERMS = 2.0**-22, 8
# Of so few numbers one that is nearly zero, a sum whose terms cancel, decides the error of all.
_FEW = 1024
_LARGEST = "largest error {error:.1e} of the largest result, allowed {allowed:.1e}"
_ROUNDED_TWICE = (
    "its sums are rounded more than once (by {error:.1e} of sum |x||w|, allowed {allowed:.1e})"
)


@dataclass(frozen=True)
class Errors:
    """The errors of a result against the float64 truth.

    Attributes:
        relative: norm of the difference over the norm of the truth.
        largest: largest difference over the largest number of the truth.
        beyond: largest difference beyond one rounding to 16 bit, in shares of sum |x||w|; 0 where
            that is not looked at.
    """

    relative: float
    largest: float
    beyond: float = 0.0


def relative_error(result: Tensor, truth: Tensor) -> float:
    """Norm of the difference from a float64 truth over the truth's norm; 0 without a difference."""
    difference = (result.double() - truth).norm()
    return float(difference / truth.norm()) if difference else 0.0


def largest_error(result: Tensor, truth: Tensor) -> float:
    """Largest difference from a float64 truth over its largest number; 0 without a difference."""
    difference = (result.double() - truth).abs().max()
    return float(difference / truth.abs().max()) if difference else 0.0


def allowed_error(pytorch: float, rounding: float, factor: float = _ALLOWED_ERROR) -> float:
    """The allowed relative error, where PyTorch's own error is known too.

    Of few results PyTorch's may all be exact by luck, so about rounding is allowed at least.

    Args:
        pytorch: PyTorch's relative error.
        rounding: the relative error of rounding to the results' precision.
        factor: how many times PyTorch's error is allowed.

    Example:
        >>> allowed_error(0.5, 0.01), allowed_error(0.0, 0.01)
        (1.0, 0.01)
    """
    return factor * min(pytorch + rounding / 2, max(pytorch, rounding))


def fault_beyond(
    error: float,
    allowed: float,
    text: str = "relative error {error:.1e}, allowed {allowed:.1e}",
) -> str | None:
    """The fault of a result with an error, in a text with fields as above; None if it is allowed.

    Example:
        >>> fault_beyond(math.nan, 0.5), fault_beyond(0.5, 0.5)
        ('relative error nan, allowed 5.0e-01', None)
    """
    return None if error <= allowed else text.format(error=error, allowed=allowed)


def fault_against(
    result: Tensor,
    pytorch: Tensor,
    truth: Tensor,
    rounding: float,
    factor: float = _ALLOWED_ERROR,
) -> str | None:
    """The fault of a result, compared with PyTorch's; None if there is none.

    Args:
        result: the judged one.
        pytorch: PyTorch's, in the same dtype.
        truth: the result in float64.
        rounding, factor: as for `allowed_error`.
    """
    allowed = allowed_error(relative_error(pytorch, truth), rounding, factor)
    return fault_beyond(relative_error(result, truth), allowed)


def cancellation(x: Tensor, weights: Sequence[Tensor], layout: str) -> float:
    """The ratio of the errors of a chain's product to those of ordinary sums.

    Rounding n terms leaves an error that grows with the norm of the terms, which a sum of random
    ones has, too. Where the terms cancel the sum is smaller, and its relative error larger: the
    norm of all terms over that of all sums, and at least 1.

    Args:
        x: (rows, N), or (N, rows) where the layout is "batch_last".
        weights: (a, b, c, d) of the chain's factors, left to right.
        layout: "batch_first" or "batch_last".

    Example:
        >>> x, ones = torch.tensor([[1.0, -0.9]]), torch.ones(1, 1, 2, 1)
        >>> round(cancellation(x, [ones], "batch_first"), 2)
        13.45
    """
    sums = chain_reference(x.double(), [weight.double() for weight in weights], layout)
    squares = [weight.double().square() for weight in weights]
    terms = chain_reference(x.double().square(), squares, layout)
    times = float(terms.sum().sqrt() / sums.norm())
    return max(1.0, times) if math.isfinite(times) else 1.0


@dataclass(frozen=True)
class PlainProduct:
    """A product as PyTorch computes it, whose result in float64 is the truth.

    Args:
        of: (x [rows, N], weights) -> y [rows, M].
        terms: How many products with each of the weights are added up to one number.
        rows_together: Rows that are multiplied as one tile, from the first on: they are compared
            together.
    """

    of: Callable[[Tensor, Sequence[Tensor]], Tensor]
    terms: Sequence[int]
    rows_together: int = 1


@dataclass(frozen=True)
class Ahead:
    """A layer whose result a chain reads.

    Attributes:
        factors: of its chain, whose weights stand before the other's.
        bias, activation: behind its product.
    """

    factors: int
    bias: Tensor | None = None
    activation: str = "none"


@dataclass(frozen=True)
class Around:
    """The operations around a chain's product.

    Attributes:
        bias, activation, residual: behind it, as `ksopt.epilogue.with_epilogue` does.
        siblings: chains that read one x, whose weights follow each other; their products stand side
            by side.
        ahead: what x meets first; None for nothing.
    """

    bias: Tensor | None = None
    activation: str = "none"
    residual: Tensor | None = None
    siblings: int = 1
    ahead: Ahead | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing but the product."""
        return self.steps == 0 and self.siblings == 1 and self.ahead is None

    @property
    def steps(self) -> int:
        """The number of operations beside the products, each of which may round."""
        several = [self.bias is not None, self.activation != "none", self.residual is not None]
        several += [self.activation in GATES]  # it multiplies, too
        if self.ahead is not None:
            several += [self.ahead.bias is not None, self.ahead.activation != "none"]
        return sum(several)


NOTHING_AROUND = Around()
"""A chain's product alone."""


class AccuracyCheck:
    """The float64 truth of a chain's product on some rows of an input, and the allowed errors.

    It is used in two ways, because operands differ: a kernel that is to be chosen is called on the
    user's, which may hold NaN themselves (`judge`, and `checking`); what is benchmarked is called
    on random ones, so that all of its result must have been written (`fault_of`).

    Args:
        x: (*batch, N), or (N, *batch) when batch_last.
        weights: (a, b, c, d) of the chain's factors, left to right.
        layout: "batch_first" or "batch_last".
        rounded_once: for kernels, of one factor: sums in 16 bit are a fault, and so is any error of
            more than twice PyTorch's. A kernel's sums are fp32 numbers. PyTorch's may be rounded
            in between, or added in another order, which makes no wrong rival.
        product: what else than a chain's product the result should be; its weights are ``weights``.
        around: what else is computed.
    """

    def __init__(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        layout: str,
        rounded_once: bool = False,
        product: PlainProduct | None = None,
        around: Around = NOTHING_AROUND,
    ) -> None:
        self._x = x
        self._last = is_batch_last(layout)
        batch = x.numel() // x.shape[0 if self._last else -1]
        together = 1 if product is None else product.rows_together
        self._rows = torch.tensor(checked_rows(batch, together), device=x.device)
        few = self._picked(x).contiguous()
        self._around = around

        def reference(few: Tensor, weights: Sequence[Tensor]) -> Tensor:
            return chain_reference(few, weights, layout)

        def pytorch(few: Tensor, weights: Sequence[Tensor]) -> Tensor:
            for weight in reversed(weights):
                few = BASELINES["bmm"].bind(weight, layout)(few)
            return few

        def plain(few: Tensor, weights: Sequence[Tensor]) -> Tensor:
            assert product is not None
            return product.of(few.T, weights).T if self._last else product.of(few, weights)

        truth, rival = (reference, pytorch) if product is None else (plain, plain)
        self._truth = self._whole(few.double(), [weight.double() for weight in weights], truth)
        self._cancelled = 1.0
        alone = product is None and around.siblings == 1 and around.ahead is None
        if alone and self._truth.numel() <= _FEW:
            self._cancelled = cancellation(few, weights, layout)
        self._features = self._truth.shape[0 if self._last else 1]
        self._elements = batch * self._features
        self._rounded_once = rounded_once
        self._sums: Tensor | None = None
        if rounded_once and x.dtype.itemsize < 4:
            (weight,) = weights
            self._sums = ks_reference(few.double().abs(), weight.double().abs(), layout)
        self.pytorch = self._errors(self._whole(few, weights, rival))
        terms = [weight.shape[2] for weight in weights] if product is None else product.terms
        self.allowed = self._allowed(terms)

    def _whole(
        self,
        few: Tensor,
        weights: Sequence[Tensor],
        multiply: Callable[[Tensor, Sequence[Tensor]], Tensor],
    ) -> Tensor:
        """The truth on the compared rows: the layer ahead, all siblings' products, the epilogue."""
        around, dtype = self._around, few.dtype
        if around.ahead is not None:
            first, weights = weights[: around.ahead.factors], weights[around.ahead.factors :]
            added = None if around.ahead.bias is None else around.ahead.bias.to(dtype)
            few = multiply(few, first)
            few = with_epilogue(few, added, around.ahead.activation, None, self._last)
        length = len(weights) // around.siblings
        parts = [multiply(few, weights[at : at + length]) for at in range(0, len(weights), length)]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, 0 if self._last else 1)
        bias = None if around.bias is None else around.bias.to(dtype)
        residual = None if around.residual is None else self._picked(around.residual).to(dtype)
        return with_epilogue(y, bias, around.activation, residual, self._last)

    def _allowed(self, terms: Sequence[int]) -> Errors:
        dtype, theirs = self._x.dtype, self.pytorch
        tf32 = self._x.is_cuda and dtype == torch.float32 and not precision.is_exact()
        eps = torch.finfo(dtype).eps
        # Of each factor's results, and of sums in the results' own precision as well.
        sums = math.sqrt(max(terms)) if dtype.itemsize >= 4 else 0.0
        rounding = max(eps / 2 * (1 + sums), TF32_ROUNDING if tf32 else 0.0)
        rounding *= len(terms) + self._around.steps
        rounding *= self._cancelled
        unit = (TF32_ROUNDING if tf32 else eps) * self._cancelled
        relative = allowed_error(theirs.relative, unit)
        # Of n numbers an error is known to one part in sqrt(2n), PyTorch's and the other one.
        relative *= 1 + 2 / math.sqrt(max(1, self._truth.numel()))
        if dtype == torch.float64:  # the truth is rounded as well, and PyTorch's may be its equal
            relative = _ALLOWED_ERROR * max(theirs.relative, eps)
        if not self._rounded_once:
            # Of all rows cuBLAS may add in another order than of the few that are compared: 5e-7
            # instead of 1.3e-7 of (1,192,768,1) in float32 on an H200.
            relative = max(relative, _ALLOWED_ERROR * rounding)
        return Errors(
            relative,
            min(_ALLOWED_ERROR * max(theirs.largest, rounding), _LARGEST_SHARE),
            max(_ALLOWED_ERROR * theirs.beyond, _UNIT * (max(terms) / _TERMS + _TERMS)),
        )

    @property
    def is_conclusive(self) -> bool:
        """Whether the operands can tell a right result from a wrong one.

        They do not where the truth is nothing but zeros, where it or PyTorch's own result is not
        finite, or where PyTorch is further off than rounding can be.
        """
        largest = float(self._truth.abs().max())
        return 0 < largest < math.inf and self.pytorch.largest <= _LARGEST_SHARE

    def errors(self, y: Tensor) -> Errors:
        """The errors of a result for all rows of x."""
        return self._errors(self._picked(y))

    def fault(self, errors: Errors, closely: bool = False) -> str | None:
        """The fault of a result with such errors, as text; None if there is none.

        Args:
            errors: of the result.
            closely: in 16 bit, whether to allow no more than twice PyTorch's relative error, as of
                a way that does not round where PyTorch's does: its error may be any number of times
                as large, where what PyTorch rounds is small.
        """
        most = self.allowed.relative
        if closely and self._x.dtype.itemsize < 4:
            twice = _ALLOWED_ERROR * self.pytorch.relative
            most = min(most, twice * (1 + 2 / math.sqrt(self._truth.numel())))
        if not self.is_conclusive:
            return "PyTorch's own result is zero, not finite or too far off to compare with"
        return fault_beyond(errors.relative, most) or fault_beyond(
            errors.largest, self.allowed.largest, _LARGEST
        )

    def judge(self, y: Tensor, closely: bool = False) -> str | None:
        """The fault of a kernel's result, as text; None if there is none, or none can be seen.

        Overwrites it: the next way's result is likely to get its memory, and must not be right
        there without being written. ``closely`` is as for `fault`.
        """
        rows = self._picked(y)
        y.fill_(math.nan)
        if not self.is_conclusive:
            return None
        errors = self._errors(rows)
        fault = self.fault(errors, closely)
        if fault is not None:
            return f"its result is wrong ({fault})"
        return fault_beyond(errors.beyond, self.allowed.beyond, _ROUNDED_TWICE)

    def fault_of(self, way: Callable[[Tensor], Tensor]) -> str | None:
        """The fault of an implementation's result for x, as text; None if there is none.

        The whole result is checked for NaN: before the call, memory of its size is filled with NaN
        and freed. The allocator returns that memory to the call, so elements that the call does not
        write are NaN.
        """
        self.poison()
        y = way(self._x)
        shape = list(self._x.shape)
        shape[0 if self._last else -1] = self._features
        if list(y.shape) != shape or y.dtype != self._x.dtype:
            return f"the result is {list(y.shape)} of {y.dtype}, not {shape} of {self._x.dtype}"
        fault = self.fault(self.errors(y))
        if fault is None and torch.isnan(y.sum(dtype=torch.float32)).item():
            return "parts of the result are NaN: they were not written"
        return fault

    def poison(self) -> None:
        """Fill with NaN the memory that an implementation's result may reuse."""
        x = self._x
        blocks = [x.new_empty(size) for size in (self._elements, self._elements, x.numel())]
        for block in blocks:
            block.fill_(math.nan)

    def _picked(self, tensor: Tensor) -> Tensor:
        if self._last:
            return tensor.reshape(tensor.shape[0], -1).index_select(1, self._rows)
        return tensor.reshape(-1, tensor.shape[-1]).index_select(0, self._rows)

    def _errors(self, y: Tensor) -> Errors:
        truth = self._truth
        return Errors(relative_error(y, truth), largest_error(y, truth), self._beyond(y))

    def _beyond(self, y: Tensor) -> float:
        if self._sums is None:
            return 0.0
        kind = torch.finfo(y.dtype)
        # Beyond the largest number is infinity, which is right there.
        truth = self._truth.clamp(-kind.max, kind.max)
        rounding = kind.eps / 2 * (1 + kind.eps) * truth.abs() + kind.smallest_normal * kind.eps
        beyond = (y.double().clamp(-kind.max, kind.max) - truth).abs() - rounding
        return float((beyond.clamp(min=0) / self._sums.clamp(min=kind.smallest_normal)).max())


def checked_rows(batch: int, together: int = 1) -> list[int]:
    """The rows to compare: both ends, and some between them at an odd distance.

    Odd, so that they fall on every place of a tile, whose height is a power of two. Of rows that
    are multiplied ``together`` all are compared.

    Example:
        >>> checked_rows(3)
        [0, 1, 2]
        >>> len(checked_rows(25_088)), len(checked_rows(25_088, together=4))
        (255, 636)
    """
    step = max(1, batch // _BETWEEN) | 1
    ends = [*range(min(_ENDS, batch)), *range(max(0, batch - _ENDS), batch)]
    rows = {*ends, *range(0, batch, step)}
    whole = {row - row % together + place for row in rows for place in range(together)}
    return sorted(row for row in whole if row < batch)


def checking(x: Tensor, weight: Tensor, batch_last: bool) -> tuple[AccuracyCheck, Tensor, Tensor]:
    """An accuracy check that can tell right from wrong, and the operands that it is for.

    They are the arguments, or random ones with the same layout: a choice taken on NaN or zeros
    multiplies ordinary numbers later.

    Args:
        x: (*batch, N), or (N, *batch) when batch_last.
        weight: (a, b, c, d).
        batch_last: the layout.
    """
    layout = "batch_last" if batch_last else "batch_first"
    check = AccuracyCheck(x, [weight], layout, rounded_once=True)
    if not check.is_conclusive:
        x, weight = _random_like(x), _random_like(weight)
        check = AccuracyCheck(x, [weight], layout, rounded_once=True)
    return check, x, weight


def checking_chain(
    x: Tensor, weights: Sequence[Tensor], batch_last: bool, around: Around
) -> tuple[AccuracyCheck, Tensor, tuple[Tensor, ...], Around]:
    """`checking` of a chain and what surrounds it.

    Args:
        x: (*batch, N), or (N, *batch) when batch_last.
        weights: of its factors, left to right, sibling after sibling; those of a layer ahead come
            first.
        batch_last: the layout.
        around: what else is computed.
    """
    layout, weights = "batch_last" if batch_last else "batch_first", tuple(weights)
    check = AccuracyCheck(x, weights, layout, around=around)
    if not check.is_conclusive:
        x, weights = _random_like(x), tuple(map(_random_like, weights))
        ahead = around.ahead
        if ahead is not None and ahead.bias is not None:
            ahead = replace(ahead, bias=_random_like(ahead.bias))
        bias, residual = around.bias, around.residual
        around = replace(
            around,
            bias=None if bias is None else _random_like(bias),
            residual=None if residual is None else _random_like(residual),
            ahead=ahead,
        )
        check = AccuracyCheck(x, weights, layout, around=around)
    return check, x, weights, around


def _random_like(tensor: Tensor) -> Tensor:
    """Random numbers in new memory, with the strides and the alignment to 16 bytes of a tensor."""
    size = tensor.element_size()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    reach = 1 + sum((length - 1) * stride for length, stride in steps)
    offset = tensor.data_ptr() % 16 // size
    memory = torch.randn(reach + offset, device=tensor.device).to(tensor.dtype)
    return memory.as_strided(tensor.shape, tensor.stride(), offset)
