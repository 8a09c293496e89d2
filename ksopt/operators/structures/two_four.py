"""2:4 semi-structured sparsity as a structured operator: two of each four weights of a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ksopt.errors import InvalidInputError
from ksopt.operators.base import Fit, StructuredOperator
from ksopt.operators.capability import least
from ksopt.operators.structure import Structure, fields_of

if TYPE_CHECKING:
    from torch import Tensor

_LEAST_CAPABILITY = (8, 0)
# Multiples of out and in features that the stricter of torch's backends requires (CUTLASS,
# cuSPARSELt).
_MULTIPLES = (32, 64)


@dataclass(frozen=True)
class TwoFour(StructuredOperator):
    """A matrix W with at most two nonzeros in each four neighbours of a row, in torch's format.

    The weight is the dense matrix: the product uses the two largest of each four, and only those
    have gradients, so that training may move to other positions. The product reads half of the
    values, and two bits of position for each: 9/16 of the dense matrix in 16 bit, which a budget
    counts as weights. In training the gradients take dense products.

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
        """The stored values, and their positions as 16-bit numbers."""
        return -(-9 * self.in_features * self.out_features // 16)

    def parameter_shapes(self) -> Sequence[tuple[int, ...]]:
        """The shape of the dense matrix."""
        return [(self.out_features, self.in_features)]

    def refusal(self, device: str, dtype: str) -> str | None:
        """The reason a device, dtype or size is refused: it needs Ampere or newer and 16 bit."""
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
        """The product by torch's semi-structured tensor.

        Raises:
            InvalidInputError: The weights' device or dtype does not run it.
        """
        from ksopt.operators.two_four_product import bind

        self.check_runs(weights)
        return bind(weights[0], layout)

    def reference(self, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """The product by the dense matrix with zeros at the pruned positions."""
        (weight,) = weights
        return x @ (weight * largest_two_mask(weight)).T

    def flops(self, batch: int) -> int:
        """The flops of the stored values: half of the dense product's."""
        return batch * self.in_features * self.out_features

    def nearest(self, matrix: Tensor) -> Fit:
        """The two largest of each four: no matrix of this structure is nearer."""
        from ksopt.measure.accuracy import relative_error

        near = matrix * largest_two_mask(matrix)
        return Fit([near], relative_error(near, matrix.double()))


def largest_two_mask(weight: Tensor) -> Tensor:
    """The mask of the two largest of each four, the first of equals: booleans of a weight's shape.

    Stable, so that a weight and its copy in float64 have the same mask.
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
    """The only operator of a size; none if in_features is no multiple of 4."""
    if in_features % 4 == 0:
        yield TwoFour(in_features, out_features)


STRUCTURE = Structure("two-four", parse, candidates, order=30)
