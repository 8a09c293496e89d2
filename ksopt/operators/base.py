"""The interface of structured operators, which a search needs of any replacement of a matrix."""

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
    """The weights of an operator fitted to a matrix W.

    Args:
        weights: Of the shapes `StructuredOperator.parameter_shapes`.
        relative_error: ||W - W'|| / ||W|| in the Frobenius norm, where W' is the operator's matrix.
    """

    weights: Sequence[Tensor]
    relative_error: float


@runtime_checkable
class StructuredOperator(Protocol):
    """A structured matrix W [out_features, in_features] without its weights: y = x Wᵀ.

    An operator is a value, like a frozen dataclass: operators of one text are equal and have one
    hash. The methods that are not abstract are correct for a product of one launch that uses each
    weight once per row; an operator of several launches counts each of them.
    """

    in_features: int
    out_features: int

    @abstractmethod
    def __str__(self) -> str:
        """The text ``NAME(...)``, with the structure's name; the structure's ``parse`` reads it."""

    @property
    @abstractmethod
    def nnz(self) -> int:
        """The number of weights that a product reads, which a budget counts.

        Weights of other types count as the elements of the layer's dtype with the same bytes.
        """

    @abstractmethod
    def parameter_shapes(self) -> Sequence[tuple[int, ...]]:
        """The shapes of the weights."""

    @abstractmethod
    def bind(self, weights: Sequence[Tensor], layout: str) -> Callable[[Tensor], Tensor]:
        """The product as a function of x, with gradients of x and of the weights.

        Args:
            weights: Of the shapes `parameter_shapes`, of one dtype and device.
            layout: Of x and the result: "batch_first" for x [*batch, in_features], "batch_last" for
                [in_features, *batch].

        Raises:
            KsoptError: The operator does not run in this dtype or layout, or on this device.
        """

    @abstractmethod
    def reference(self, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """The product for x [rows, in_features] in plain PyTorch: in float64, the reference."""

    @property
    def rank_bound(self) -> int:
        """The largest rank that the matrix can have."""
        return min(self.in_features, self.out_features)

    @property
    def rows_together(self) -> int:
        """The rows of x in one tile: 1 if no row's result depends on another row.

        If it is larger, the last tile is padded with zeros, and only whole tiles are compared with
        the reference.
        """
        return 1

    def refusal(self, device: str, dtype: str) -> str | None:
        """The reason a device does not run it in a dtype, without a full stop; None if it does.

        A search omits refused operators.

        Args:
            device: torch's name, such as "cpu" or "cuda:0".
            dtype: torch's name, such as "bfloat16".
        """
        return None

    def check_runs(self, weights: Sequence[Tensor]) -> None:
        """Check that the weights' device and dtype are not refused.

        Raises:
            InvalidInputError: `refusal` has a reason.
        """
        from ksopt.precision import dtype_name

        reason = self.refusal(str(weights[0].device), dtype_name(weights[0].dtype))
        if reason is not None:
            raise InvalidInputError(f"{self}: {reason}")

    def terms(self) -> Sequence[int]:
        """The number of products that are summed to one element, for each of the weights."""
        return [shape[-1] for shape in self.parameter_shapes()]

    def draw(self, weights: Sequence[Tensor], gain: float) -> None:
        """Draw new weights in place, for training.

        Args:
            weights: Of the shapes `parameter_shapes`.
            gain: The ratio of the root mean square of the product to that of its input.
        """
        from ksopt.nn import init

        init.product_uniform_(weights, self.terms(), gain)

    def bytes_moved(self, batch: int, dtype: str) -> int:
        """The minimum of bytes that the product moves: input, output and weights, once each."""
        features = self.in_features + self.out_features
        return (batch * features + self.nnz) * bytes_per_element(dtype)

    def flops(self, batch: int) -> int:
        """The floating-point operations: a multiplication and an addition per weight and row."""
        return 2 * batch * self.nnz

    def nearest(self, matrix: Tensor) -> Fit:
        """Weights fitted to a matrix [out_features, in_features].

        Raises:
            InvalidInputError: The structure cannot be fitted.
        """
        raise InvalidInputError(f"{self} cannot be fitted to trained weights")
