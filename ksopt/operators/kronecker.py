"""A chain of Kronecker-sparse factors as a structured operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ksopt.operators.base import Fit, StructuredOperator
from ksopt.patterns.chain import Chain

if TYPE_CHECKING:
    from torch import Tensor

# Passes of alternating least squares, where a chain takes them: a search asks for many chains, and
# a conversion, which makes more for one, comes a little nearer.
_PASSES = 4


@dataclass(frozen=True)
class KroneckerOperator(StructuredOperator):
    """What a chain computes, and what that costs factor by factor. Its text is the chain's.

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
        """The chain's."""
        return self.chain.nnz

    @property
    def rank_bound(self) -> int:
        """The chain's."""
        return self.chain.rank_bound

    def parameter_shapes(self) -> Sequence[tuple[int, ...]]:
        """(a, b, c, d) of each factor, left to right."""
        return [pattern.weight_shape for pattern in self.chain]

    def terms(self) -> Sequence[int]:
        """c of each factor."""
        return [pattern.c for pattern in self.chain]

    def bind(self, weights: Sequence[Tensor], layout: str) -> Callable[[Tensor], Tensor]:
        """The kernels that are fastest for it: see `ksopt.functional.ks_linear`."""
        from ksopt.functional import ks_linear

        return lambda x: ks_linear(x, weights, layout=layout)

    def reference(self, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """Each factor as an einsum."""
        from ksopt.reference import chain_reference

        return chain_reference(x, weights)

    def bytes_moved(self, batch: int, dtype: str) -> int:
        """Each factor's."""
        return self.chain.bytes(batch, dtype)

    def nearest(self, matrix: Tensor) -> Fit:
        """By `ksopt.projection`."""
        from ksopt.projection import project

        projected = project(matrix, self.chain, iterations=_PASSES)
        return Fit(projected.weights, projected.relative_error)
