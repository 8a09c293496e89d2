"""A block-diagonal matrix as a structured operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING

from ksopt.errors import InvalidInputError
from ksopt.operators.base import Fit, StructuredOperator
from ksopt.operators.structure import Structure, fields_of

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class BlockDiagonal(StructuredOperator):
    """The matrix W = diag(B_1, ..., B_blocks), with blocks of one size and separate inputs.

    It is the single factor (blocks, out/blocks, in/blocks, 1), which a search of chains omits
    because not every output depends on every input.

    Raises:
        InvalidInputError: The number of blocks does not divide both sizes.

    Example:
        >>> four = BlockDiagonal(768, 3072, 4)
        >>> str(four), four.nnz, four.parameter_shapes()
        ('block-diagonal(768x3072,4)', 589824, [(4, 768, 192)])
    """

    in_features: int
    out_features: int
    blocks: int

    def __post_init__(self) -> None:
        common = gcd(self.in_features, self.out_features)
        if self.blocks < 1 or common % self.blocks:
            raise InvalidInputError(
                f"{self}: the number of blocks must divide both sizes, and so {common}"
            )

    def __str__(self) -> str:
        return f"block-diagonal({self.in_features}x{self.out_features},{self.blocks})"

    @property
    def nnz(self) -> int:
        """The weights of all blocks."""
        return self.in_features * self.out_features // self.blocks

    def parameter_shapes(self) -> Sequence[tuple[int, ...]]:
        """The blocks in one tensor, [blocks, out/blocks, in/blocks]."""
        return [(self.blocks, self.out_features // self.blocks, self.in_features // self.blocks)]

    def bind(self, weights: Sequence[Tensor], layout: str) -> Callable[[Tensor], Tensor]:
        """The product as a factor with d = 1, by the fastest of ksopt's and PyTorch's kernels."""
        from ksopt.functional import ks_linear

        (blocks,) = weights
        return lambda x: ks_linear(x, [blocks.unsqueeze(-1)], layout=layout)

    def reference(self, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """The product by the full matrix with its zeros."""
        import torch

        return x @ torch.block_diag(*weights[0]).T

    def nearest(self, matrix: Tensor) -> Fit:
        """The diagonal blocks of the matrix; the entries beside them are dropped."""
        import torch

        from ksopt.measure.accuracy import relative_error

        cut = matrix.unflatten(0, (self.blocks, -1)).unflatten(2, (self.blocks, -1))
        place = torch.arange(self.blocks, device=matrix.device)
        blocks = cut[place, :, place]
        error = relative_error(torch.block_diag(*blocks), matrix.double())
        return Fit([blocks.contiguous()], error)


def parse(text: str) -> BlockDiagonal:
    """The operator of a text."""
    size, (blocks,) = fields_of(text, "block-diagonal(INxOUT,BLOCKS)")
    return BlockDiagonal(size.in_features, size.out_features, blocks)


def candidates(in_features: int, out_features: int) -> Iterator[BlockDiagonal]:
    """The operators for every number of blocks from 2 on that divides both sizes.

    Example:
        >>> [one.blocks for one in candidates(12, 18)]
        [2, 3, 6]
    """
    common = gcd(in_features, out_features)
    for blocks in range(2, common + 1):
        if common % blocks == 0:
            yield BlockDiagonal(in_features, out_features, blocks)


STRUCTURE = Structure("block-diagonal", parse, candidates, order=20)
