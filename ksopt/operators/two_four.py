"""2:4 semi-structured sparsity as a structured operator: of each four weights of a row two stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ksopt.errors import InvalidInputError
from ksopt.operators.base import Fit, StructuredOperator
from ksopt.operators.structure import Structure, fields_of

if TYPE_CHECKING:
    from torch import Tensor

_LEAST_CAPABILITY = (8, 0)
# Of torch's two backends, CUTLASS and cuSPARSELt, the stricter one's: out and in features.
_MULTIPLES = (32, 64)


@dataclass(frozen=True)
class TwoFour(StructuredOperator):
    """W with two nonzeros at most in each four neighbours of a row, as torch's own sparse tensor.

    The weight is the dense matrix: the product uses the two of each four that are largest, and
    their gradients are theirs alone, so that training may find other positions. What the product
    reads is half of the values, and two bits of position for each: 9/16 of the dense matrix in 16
    bit, and so many weights a budget counts. In training the gradients take dense products.

    Source: Mishra et al. 2021 (arXiv 2104.08378).

    Raises:
        InvalidInputError: in_features is no multiple of 4.

    Example:
        >>> half = TwoFour(768, 3072)
        >>> str(half), half.nnz / (768 * 3072), half.refusal("cpu", "bfloat16")
        ('two-four(768x3072)', 0.5625, 'it needs a CUDA device of compute capability 8.0, not cpu')
    """

    in_features: int
    out_features: int

    def __post_init__(self) -> None:
        if self.in_features % 4:
            raise InvalidInputError(f"{self}: in_features must be a multiple of 4")

    def __str__(self) -> str:
        return f"two-four({self.in_features}x{self.out_features})"

    @property
    def nnz(self) -> int:
        """Stored values, and their positions as 16-bit numbers."""
        return -(-9 * self.in_features * self.out_features // 16)

    def parameter_shapes(self) -> Sequence[tuple[int, ...]]:
        """The dense matrix's."""
        return [(self.out_features, self.in_features)]

    def refusal(self, device: str, dtype: str) -> str | None:
        """Sparse tensor cores are on GPUs since Ampere, and torch's type wants whole tiles."""
        from ksopt.operators.capability import least

        refusal = least(_LEAST_CAPABILITY, device)
        if refusal is not None:
            return refusal
        rows, columns = _MULTIPLES
        if dtype not in ("float16", "bfloat16"):
            return f"it runs in float16 and bfloat16, not in {dtype}"
        if self.out_features % rows or self.in_features % columns:
            return (
                f"it needs in_features to be a multiple of {columns} and out_features to be one of "
                f"{rows}"
            )
        return None

    def bind(self, weights: Sequence[Tensor], layout: str) -> Callable[[Tensor], Tensor]:
        """torch's product of a semi-structured tensor.

        Raises:
            InvalidInputError: The weights' device or dtype does not run it.
        """
        from ksopt.operators.two_four_product import bind

        (weight,) = weights
        dtype = str(weight.dtype).removeprefix("torch.")
        refusal = self.refusal(str(weight.device), dtype)
        if refusal is not None:
            raise InvalidInputError(f"{self}: {refusal}")
        return bind(weight, layout)

    def reference(self, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """By the dense matrix, zeros in the places that do not stay."""
        (weight,) = weights
        return x @ (weight * kept(weight)).T

    def flops(self, batch: int) -> int:
        """Of the values that stay: half of the dense product's."""
        return batch * self.in_features * self.out_features

    def nearest(self, matrix: Tensor) -> Fit:
        """The two of each four that are largest: no matrix of this structure is nearer."""
        from ksopt.operators.batches import relative_error

        near = matrix * kept(matrix)
        return Fit([near], relative_error((matrix - near).double(), matrix.double()))


def kept(weight: Tensor) -> Tensor:
    """Where the two largest of each four lie, of equals the first: booleans of a weight's shape.

    Stable, so that a weight and its copy in float64 keep the same places.
    """
    fours = weight.detach().abs().unflatten(-1, (-1, 4))
    order = fours.argsort(dim=-1, descending=True, stable=True)
    places = fours.new_zeros(fours.shape, dtype=order.dtype).bool()
    return places.scatter(-1, order[..., :2], True).flatten(-2)


def parse(text: str) -> TwoFour:
    """The operator of a text."""
    size, _ = fields_of(text, "two-four(INxOUT)")
    return TwoFour(size.in_features, size.out_features)


def candidates(in_features: int, out_features: int) -> Iterator[TwoFour]:
    """One, where there are fours."""
    if in_features % 4 == 0:
        yield TwoFour(in_features, out_features)


STRUCTURE = Structure("two-four", parse, candidates)
