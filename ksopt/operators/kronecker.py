"""A chain of Kronecker-sparse factors as a structured operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ksopt.operators.base import Fit, StructuredOperator
from ksopt.patterns.chain import Chain

if TYPE_CHECKING:
    from torch import Tensor

# Passes of alternating least squares for chains that need them. A search fits many chains; a
# conversion runs more passes for its one chain and gets a slightly smaller error.
_PASSES = 4


@dataclass(frozen=True)
class KroneckerOperator(StructuredOperator):
    """A chain as an operator, with its cost factor by factor; its text is the chain's.

    Example:
        >>> monarch = KroneckerOperator(Chain.monarch(64, 64, p=8))
        >>> monarch.parameter_shapes(), monarch.terms()
        ([(1, 8, 8, 8), (8, 8, 8, 1)], [8, 8])
    """

    chain: Chain
    in_features: int = field(init=False)
    out_features: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "in_features", self.chain.in_features)
        object.__setattr__(self, "out_features", self.chain.out_features)

    def __str__(self) -> str:
        return str(self.chain)

    @property
    def nnz(self) -> int:
        """The chain's value."""
        return self.chain.nnz

    @property
    def rank_bound(self) -> int:
        """The chain's value."""
        return self.chain.rank_bound

    def parameter_shapes(self) -> Sequence[tuple[int, ...]]:
        """The shape (a, b, c, d) of each factor, left to right."""
        return [pattern.weight_shape for pattern in self.chain]

    def terms(self) -> Sequence[int]:
        """The size c of each factor."""
        return [pattern.c for pattern in self.chain]

    def bind(self, weights: Sequence[Tensor], layout: str) -> Callable[[Tensor], Tensor]:
        """The product by the fastest kernels: see `ksopt.functional.ks_linear`."""
        from ksopt.functional import ks_linear

        return lambda x: ks_linear(x, weights, layout=layout)

    def reference(self, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """The product with an einsum per factor."""
        from ksopt.reference import chain_reference

        return chain_reference(x, weights)

    def bytes_moved(self, batch: int, dtype: str) -> int:
        """The bytes that the factors move, summed."""
        return self.chain.bytes(batch, dtype)

    def nearest(self, matrix: Tensor) -> Fit:
        """The fit by `ksopt.projection`."""
        from ksopt.projection import project

        projected = project(matrix, self.chain, iterations=_PASSES)
        return Fit(projected.weights, projected.relative_error)
