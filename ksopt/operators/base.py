"""What a search needs of any replacement for a dense matrix."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ksopt.errors import InvalidInputError
from ksopt.patterns.pattern import bytes_per_element

if TYPE_CHECKING:  # operators are listed and counted without torch
    from torch import Tensor


@dataclass(frozen=True)
class Fit:
    """Weights of an operator that are fitted to a matrix W.

    Args:
        weights: Of `StructuredOperator.parameter_shapes`.
        relative_error: ||W - W'|| / ||W|| in the Frobenius norm, W' being their product.
    """

    weights: Sequence[Tensor]
    relative_error: float


@runtime_checkable
class StructuredOperator(Protocol):
    """A matrix W [out_features, in_features] of some structure, without its weights: y = x Wᵀ.

    An operator is a value: those of one text are equal and have one hash, as of a frozen dataclass.
    What is not abstract is right for a product of one launch that uses each weight once a row; an
    operator of several launches counts each of them.
    """

    in_features: int
    out_features: int

    @abstractmethod
    def __str__(self) -> str:
        """``NAME(...)``, with the name of its structure: what the structure's ``parse`` reads."""

    @property
    @abstractmethod
    def nnz(self) -> int:
        """Weights that a product reads: what a budget counts.

        Where they are not all numbers of the layer's dtype, as many of those as take their bytes.
        """

    @abstractmethod
    def parameter_shapes(self) -> Sequence[tuple[int, ...]]:
        """The shapes of its weights."""

    @abstractmethod
    def bind(self, weights: Sequence[Tensor], layout: str) -> Callable[[Tensor], Tensor]:
        """The product as a function of x, with gradients of x and of the weights.

        Args:
            weights: Of `parameter_shapes`, of one dtype and device.
            layout: "batch_first" for x [*batch, in_features], "batch_last" for
                [in_features, *batch]; the result's, too.

        Raises:
            KsoptError: It does not run in this dtype or layout, or on this device.
        """

    @abstractmethod
    def reference(self, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """The product for x [rows, in_features] in plain PyTorch: in float64 it is the truth."""

    @property
    def rank_bound(self) -> int:
        """The largest rank that the matrix can have."""
        return min(self.in_features, self.out_features)

    @property
    def rows_together(self) -> int:
        """Rows of x that are multiplied as one tile: 1 where no row depends on another.

        Of more, the last tile is filled up with zeros, and only whole tiles are compared with the
        reference.
        """
        return 1

    def refusal(self, device: str, dtype: str) -> str | None:
        """Why a device does not run it in a dtype, in a sentence without an end; None if it does.

        What is refused is left out of a search.

        Args:
            device: torch's name, such as "cpu" or "cuda:0".
            dtype: torch's name, such as "bfloat16".
        """
        return None

    def terms(self) -> Sequence[int]:
        """How many products with each of the weights are added up to one number."""
        return [shape[-1] for shape in self.parameter_shapes()]

    def draw(self, weights: Sequence[Tensor], gain: float) -> None:
        """Draw new weights in place, to be trained.

        Args:
            weights: Of `parameter_shapes`.
            gain: What the product multiplies the root of the mean square of its input by.
        """
        from ksopt.nn import init

        init.product_uniform_(weights, self.terms(), gain)

    def bytes_moved(self, batch: int, dtype: str) -> int:
        """Bytes that the product cannot avoid to move: input, output and weights, each once."""
        features = self.in_features + self.out_features
        return (batch * features + self.nnz) * bytes_per_element(dtype)

    def flops(self, batch: int) -> int:
        """A multiplication and an addition for each weight and row."""
        return 2 * batch * self.nnz

    def nearest(self, matrix: Tensor) -> Fit:
        """Weights whose product is near a matrix [out_features, in_features].

        Raises:
            InvalidInputError: The structure cannot be fitted.
        """
        raise InvalidInputError(f"{self} cannot be fitted to trained weights")
