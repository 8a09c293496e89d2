"""A dense matrix in FP8 as a structured operator, by ``torch._scaled_mm``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ksopt.operators.base import Fit, StructuredOperator
from ksopt.operators.capability import least
from ksopt.operators.structure import Structure, fields_of

if TYPE_CHECKING:
    from torch import Tensor

_LEAST_CAPABILITY = (8, 9)
_MULTIPLE = 16  # torch._scaled_mm requires both sizes to be multiples


@dataclass(frozen=True)
class Fp8Dense(StructuredOperator):
    """W and x rounded to 8-bit floating point (e4m3), each row with its own scale.

    The weight is the matrix in bfloat16; each call rounds it and the rows of x. Gradients ignore
    the rounding (straight-through). No weight is omitted, so a budget counts bytes: each weight
    takes one, where bfloat16 takes two, and counts as half a weight. Scales are not counted, as
    biases are not.

    Source: Micikevicius et al. 2022 (arXiv 2209.05433); scales by row as in torchao.

    Example:
        >>> dense = Fp8Dense(768, 3072)
        >>> str(dense), dense.nnz / (768 * 3072), dense.refusal("cpu", "bfloat16")
        ('fp8-dense(768x3072)', 0.5, 'it needs a CUDA device of compute capability 8.9, not cpu')
    """

    in_features: int
    out_features: int

    def __str__(self) -> str:
        return f"fp8-dense({self.in_features}x{self.out_features})"

    @property
    def nnz(self) -> int:
        """The number of bfloat16 elements with as many bytes as the weights."""
        return -(-self.in_features * self.out_features // 2)

    def parameter_shapes(self) -> Sequence[tuple[int, ...]]:
        """The shape of the matrix."""
        return [(self.out_features, self.in_features)]

    def refusal(self, device: str, dtype: str) -> str | None:
        """The reason a device or dtype is refused: FP8 needs Ada or newer, and bfloat16 results."""
        refusal = least(_LEAST_CAPABILITY, device)
        if refusal is not None:
            return refusal
        if dtype != "bfloat16":
            return f"its results are in bfloat16, not in {dtype}"
        if self.in_features % _MULTIPLE or self.out_features % _MULTIPLE:
            return f"it needs both sizes to be multiples of {_MULTIPLE}"
        return None

    def bind(self, weights: Sequence[Tensor], layout: str) -> Callable[[Tensor], Tensor]:
        """The product by ``torch._scaled_mm``.

        Raises:
            InvalidInputError: The weights' device or dtype does not run it.
        """
        from ksopt.operators.fp8_product import bind

        self.check_runs(weights)
        return bind(weights[0], layout)

    def reference(self, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """The product of the rounded x and W, with straight-through gradients."""
        from ksopt.operators.fp8_product import rounded

        return rounded(x) @ rounded(weights[0]).T

    def bytes_moved(self, batch: int, dtype: str) -> int:
        """The bytes of rounding x (reads 16 bit, writes 8) and of the product (writes 16 bit)."""
        rounding = 3 * batch * self.in_features
        product = batch * self.in_features + self.in_features * self.out_features
        scales = 4 * (2 * batch + self.out_features)
        return rounding + product + scales + 2 * batch * self.out_features

    def flops(self, batch: int) -> int:
        """The dense product's; in 8 bit, tensor cores compute them twice as fast as in 16."""
        return 2 * batch * self.in_features * self.out_features

    def nearest(self, matrix: Tensor) -> Fit:
        """The matrix itself; its error is the rounding error."""
        from ksopt.measure.accuracy import relative_error
        from ksopt.operators.fp8_product import rounded

        whole = matrix.double()
        return Fit([matrix.clone()], relative_error(rounded(whole), whole))


def parse(text: str) -> Fp8Dense:
    """The operator of a text."""
    size, _ = fields_of(text, "fp8-dense(INxOUT)")
    return Fp8Dense(size.in_features, size.out_features)


def candidates(in_features: int, out_features: int) -> Iterator[Fp8Dense]:
    """The only operator of a size."""
    yield Fp8Dense(in_features, out_features)


STRUCTURE = Structure("fp8-dense", parse, candidates, order=50)
