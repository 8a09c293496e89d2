"""A matrix of low rank as a structured operator: W = U V."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ksopt.errors import InvalidInputError
from ksopt.operators.base import Fit, StructuredOperator
from ksopt.operators.structure import Structure, fields_of
from ksopt.patterns.pattern import bytes_per_element

if TYPE_CHECKING:
    from torch import Tensor

_MOST_RANKS = 64
"""The largest number of ranks that a search chooses from."""


@dataclass(frozen=True)
class LowRank(StructuredOperator):
    """The matrix W = U V with U [out_features, rank] and V [rank, in_features]: two dense products.

    A chain (1,out,rank,1)*(1,rank,in,1) is the same matrix; here PyTorch's own products compute it,
    and a search offers ranks below the full one.

    Raises:
        InvalidInputError: The rank is not in 1 to min(in_features, out_features).

    Example:
        >>> low = LowRank(768, 3072, 64)
        >>> str(low), low.nnz, low.rank_bound
        ('low-rank(768x3072,64)', 245760, 64)
    """

    in_features: int
    out_features: int
    rank: int

    def __post_init__(self) -> None:
        full = min(self.in_features, self.out_features)
        if not 1 <= self.rank <= full:
            raise InvalidInputError(f"{self}: the rank can be 1 to min(in, out) = {full}")

    def __str__(self) -> str:
        return f"low-rank({self.in_features}x{self.out_features},{self.rank})"

    @property
    def nnz(self) -> int:
        """The weights of U and V."""
        return self.rank * (self.in_features + self.out_features)

    @property
    def rank_bound(self) -> int:
        """The rank of the operator."""
        return self.rank

    def parameter_shapes(self) -> Sequence[tuple[int, ...]]:
        """The shapes of U and V."""
        return [(self.out_features, self.rank), (self.rank, self.in_features)]

    def bind(self, weights: Sequence[Tensor], layout: str) -> Callable[[Tensor], Tensor]:
        """Two products, by V and then by U."""
        from torch.nn.functional import linear

        from ksopt.operators.batches import of_any_batch
        from ksopt.reference import is_batch_last

        u, v = weights
        if is_batch_last(layout):
            return of_any_batch(lambda x: u @ (v @ x), layout)
        return lambda x: linear(linear(x, v), u)

    def reference(self, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """The product by the matrix itself."""
        u, v = weights
        return x @ (u @ v).T

    def bytes_moved(self, batch: int, dtype: str) -> int:
        """The bytes of both products; the intermediate [batch, rank] is written and read."""
        features = self.in_features + 2 * self.rank + self.out_features
        return (batch * features + self.nnz) * bytes_per_element(dtype)

    def nearest(self, matrix: Tensor) -> Fit:
        """The truncated singular value decomposition: no matrix of this rank is nearer.

        Source: Eckart and Young, 1936.
        """
        import torch

        left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
        largest = values[: self.rank]
        root = largest.sqrt()  # in both factors, so that both train at the same rate
        weights = (left[:, : self.rank] * root, root.unsqueeze(1) * right[: self.rank])
        whole = float(values.norm())
        error = float(values[self.rank :].norm()) / whole if whole > 0 else 0.0
        return Fit([weight.to(matrix.dtype) for weight in weights], error)


def parse(text: str) -> LowRank:
    """The operator of a text."""
    size, (rank,) = fields_of(text, "low-rank(INxOUT,RANK)")
    return LowRank(size.in_features, size.out_features, rank)


def candidates(in_features: int, out_features: int) -> Iterator[LowRank]:
    """At most 64 ranks with fewer weights than the dense matrix: multiples of a power of two.

    Example:
        >>> [one.rank for one in candidates(64, 64)][:3], len(list(candidates(768, 3072)))
        ([1, 2, 3], 38)
    """
    most = (in_features * out_features - 1) // (in_features + out_features)
    step = 1
    while most // step > _MOST_RANKS:
        step *= 2
    for rank in range(step, most + 1, step):
        yield LowRank(in_features, out_features, rank)


STRUCTURE = Structure("low-rank", parse, candidates, order=10)
