"""Chains of Kronecker-sparse patterns and their exact algebra, without torch.

`Pattern` (one factor) is defined in `ksopt.patterns.pattern`, `Chain` (a product of factors) here.

Source: Gonon, Zheng, Carrivain, Le, "Fast inference with Kronecker-sparse matrices", 2024 (the
paper).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import overload

from ksopt.errors import InvalidInputError
from ksopt.patterns import named_chains, support
from ksopt.patterns.pattern import Pattern
from ksopt.patterns.validate import checked_int


@dataclass(frozen=True, order=True)
class Chain:
    """The patterns of a product W = K_1 K_2 ... K_L, left to right; K_L meets the input first.

    Args:
        patterns: One or more patterns, each with as many columns as the next has rows:
            a_l c_l d_l = a_{l+1} b_{l+1} d_{l+1}. Any iterable; stored as a tuple.

    Raises:
        InvalidInputError: No patterns, something that is not a `Pattern`, or two neighbours whose
            sizes differ. `Chain.is_valid` checks without raising.

    Source: paper, Table 1, last row.

    Example:
        >>> chain = Chain.parse("(1,768,192,2) * (6,64,64,1)")
        >>> print(chain, chain.shape, chain.nnz)
        (1,768,192,2)*(6,64,64,1) (1536, 384) 319488
        >>> Chain((Pattern(1, 2, 3, 4), Pattern(2, 3, 4, 1)))
        Traceback (most recent call last):
        ksopt.errors.InvalidInputError: (1,2,3,4)*(2,3,4,1) is not a chain: factor 1, (1,2,3,4), \
has 12 columns, but factor 2, (2,3,4,1), has 6 rows
    """

    patterns: tuple[Pattern, ...]

    def __post_init__(self) -> None:
        values = self.patterns
        if isinstance(values, str):
            raise InvalidInputError(f"Chain({values!r}): use Chain.parse to read a chain from text")
        if isinstance(values, Pattern) or not isinstance(values, Iterable):
            raise InvalidInputError(
                f"Chain({values!r}): give a sequence of patterns, such as (Pattern(1, 2, 3, 4),)"
            )
        patterns = tuple(values)
        if not patterns:
            raise InvalidInputError("A chain needs at least one pattern, got none")
        for pattern in patterns:
            if not isinstance(pattern, Pattern):
                raise InvalidInputError(
                    f"A chain is made of Pattern objects, got {pattern!r}; "
                    "Chain.deformable_butterfly takes (a, b, c, d) tuples too"
                )
        for number, (left, right) in enumerate(pairwise(patterns), start=1):
            if left.in_features != right.out_features:
                raise InvalidInputError(
                    f"{'*'.join(map(str, patterns))} is not a chain: factor {number}, {left}, has "
                    f"{left.in_features} columns, but factor {number + 1}, {right}, has "
                    f"{right.out_features} rows"
                )
        object.__setattr__(self, "patterns", patterns)

    @staticmethod
    def is_valid(patterns: Sequence[Pattern]) -> bool:
        """Whether ``Chain(patterns)`` would be accepted.

        Example:
            >>> Chain.is_valid([Pattern(1, 2, 3, 4), Pattern(2, 3, 4, 1)])
            False
        """
        return len(patterns) > 0 and all(
            left.in_features == right.out_features for left, right in pairwise(patterns)
        )

    @classmethod
    def parse(cls, text: str) -> Chain:
        """The chain of a text; the inverse of ``str(chain)``.

        Args:
            text: Patterns joined by ``*``: ``(1,768,192,2)*(6,64,64,1)``. Spaces are allowed.

        Raises:
            InvalidInputError: The text is not of that form, or not a valid chain.

        Example:
            >>> len(Chain.parse("(1,768,192,2) * (6,64,64,1)"))
            2
            >>> Chain.parse("(1,768,192,2)*(6,64,64)")
            Traceback (most recent call last):
            ksopt.errors.InvalidInputError: '(1,768,192,2)*(6,64,64)' is not a chain: '(6,64,64)' \
is not a pattern: write (a,b,c,d) with four integers, such as (1,768,192,2)
        """
        if not isinstance(text, str):
            raise InvalidInputError(f"Chain.parse({text!r}): give a text, such as (1,768,192,2)")
        try:
            patterns = tuple(Pattern.parse(piece) for piece in text.split("*"))
        except InvalidInputError as error:
            if "*" not in text:
                raise
            raise InvalidInputError(f"{text!r} is not a chain: {error}") from None
        return cls(patterns)

    def __str__(self) -> str:
        return "*".join(str(pattern) for pattern in self.patterns)

    def __iter__(self) -> Iterator[Pattern]:
        return iter(self.patterns)

    def __len__(self) -> int:
        return len(self.patterns)

    @overload
    def __getitem__(self, index: int) -> Pattern: ...
    @overload
    def __getitem__(self, index: slice) -> Chain: ...
    def __getitem__(self, index: int | slice) -> Pattern | Chain:
        return Chain(self.patterns[index]) if isinstance(index, slice) else self.patterns[index]

    @property
    def out_features(self) -> int:
        """Number of rows of the product."""
        return self.patterns[0].out_features

    @property
    def in_features(self) -> int:
        """Number of columns of the product."""
        return self.patterns[-1].in_features

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features), as ``W.shape``."""
        return (self.out_features, self.in_features)

    @property
    def nnz(self) -> int:
        """Number of weights of all factors together."""
        return sum(pattern.nnz for pattern in self.patterns)

    @property
    def sparsity(self) -> float:
        """Share of a dense matrix's weights that the chain saves; negative if it has more."""
        dense = self.out_features * self.in_features
        return (dense - self.nnz) / dense

    def transpose(self) -> Chain:
        """The chain of the transposed product: the transposed factors in reverse order.

        Example:
            >>> print(Chain.parse("(1,768,192,2)*(6,64,64,1)").transpose())
            (6,64,64,1)*(1,192,768,2)
        """
        return Chain(tuple(pattern.transpose() for pattern in reversed(self.patterns)))

    @property
    def T(self) -> Chain:
        """Short for `transpose`."""
        return self.transpose()

    def flops(self, batch: int) -> int:
        """Floating-point operations of y = x W^T, run factor by factor on ``batch`` rows.

        Example:
            >>> Chain.monarch(384, 1536, p=2).flops(batch=10), Chain.dense(384, 1536).flops(10)
            (7372800, 11796480)
        """
        return sum(pattern.flops(batch) for pattern in self.patterns)

    def bytes(self, batch: int, dtype: object) -> int:
        """Bytes moved by y = x W^T, run factor by factor: see `Pattern.bytes`.

        The intermediate result between two factors is written once and read once.

        Example:
            >>> Chain.low_rank(384, 1536, rank=32).bytes(batch=10, dtype="fp16")
            162560
        """
        return sum(pattern.bytes(batch, dtype) for pattern in self.patterns)

    @property
    def is_chainable(self) -> bool:
        """Whether the chain is in the class for which factorization comes with guarantees.

        For each pair of neighbours: a_l divides a_{l+1}, d_{l+1} divides d_l, and
        r_l = a_l c_l / a_{l+1} = b_{l+1} d_{l+1} / d_l is an integer.

        The product of a chainable pair has the support
        (a_l, b_l d_l / d_{l+1}, a_{l+1} c_{l+1} / a_l, d_{l+1}), which splits into b_l x c_{l+1}
        blocks, each of them any matrix of rank at most r_l. The third condition does not follow
        from the first two, and is needed: (1,2,1,2)*(2,1,2,1) has r = 1/2; half of its blocks are
        zero, and the support is not Kronecker-sparse. (1,2,3,2)*(2,3,2,1) has r = 3/2; the support
        is that of the formula, but two blocks have rank 1 and two have rank 2.

        The class is not closed under transposition: a chain may fail where its transpose passes.

        Source: Le, Zheng, Riccietti, Gribonval, "Butterfly factorization with error guarantees",
        2024 (arXiv 2411.04506), the definition of chainability.

        Example:
            >>> Chain.square_dyadic(16).is_chainable, Chain.kaleidoscope(16).is_chainable
            (True, False)
        """
        return all(left.is_chainable(right) for left, right in pairwise(self.patterns))

    @property
    def ranks(self) -> tuple[int, ...]:
        """r_1, ..., r_{L-1} of a chainable chain, the largest ranks of the blocks of each product.

        The product of factors l and l + 1 splits into such blocks: see `is_chainable`.

        Raises:
            InvalidInputError: The chain is not chainable.

        Example:
            >>> Chain.monarch(384, 1536, p=2).ranks, Chain.low_rank(384, 1536, rank=32).ranks
            ((96,), (32,))
        """
        for left, right in pairwise(self.patterns):
            if not left.is_chainable(right):
                raise InvalidInputError(f"{self} has no ranks: {left}*{right} is not chainable")
        return tuple(left.a * left.c // right.a for left, right in pairwise(self.patterns))

    @property
    def product_support(self) -> Pattern | None:
        """The pattern whose support the product has, or None if it is not Kronecker-sparse.

        Exact for every chain, chainable or not. A diagonal support is called (n,1,1,1).

        Example:
            >>> print(Chain.parse("(1,2,2,4)*(2,2,2,2)").product_support)
            (1,4,4,2)
        """
        return support.product_support(self.patterns)

    @property
    def is_dense_support(self) -> bool:
        """Whether every output depends on every input.

        Example:
            >>> Chain.monarch(384, 1536, p=4).is_dense_support
            True
            >>> Chain.monarch(384, 1536, p=32).is_dense_support
            False
        """
        return support.is_dense(self.patterns)

    @property
    def rank_bound(self) -> int:
        """The rank that the product cannot exceed, and has for almost every choice of weights.

        It is the smallest of M, N and the sizes between factors. A product's rank is at most every
        such size. It is reached: let each size pass a flow f spread evenly over its features; a
        b x c sub-matrix of a factor takes in c*f/(a*c*d) and gives out b*f/(a*b*d), the same, so f
        can be the smallest size with at most 1 through any feature. A flow with integer capacities
        splits into whole units: f disjoint paths, and weights of 1 along them give rank f.
        Almost every choice of weights has at least the rank of any one choice.

        Example:
            >>> Chain.low_rank(384, 1536, rank=32).rank_bound
            32
        """
        return min(self.out_features, *(pattern.in_features for pattern in self.patterns))

    def merge(self, index: int) -> Chain:
        """The chain with factors ``index`` and ``index + 1`` (from 0) replaced by their product.

        The merged chain can express every product that this one can, usually more. Its number of
        weights differs: compare `nnz`.

        Raises:
            InvalidInputError: There is no such pair, or its product is not Kronecker-sparse.

        Example:
            >>> chain = Chain.square_dyadic(8)
            >>> print(chain, "->", chain.merge(0), chain.nnz, chain.merge(0).nnz)
            (1,2,2,4)*(2,2,2,2)*(4,2,2,1) -> (1,4,4,2)*(4,2,2,1) 48 48
        """
        if len(self) == 1:
            raise InvalidInputError(f"{self} has one factor: there is no pair to merge")
        first = checked_int(index, "index", f"merge({index!r})", minimum=0)
        if first > len(self) - 2:
            raise InvalidInputError(
                f"merge({first}): a chain of {len(self)} factors has pairs 0 to {len(self) - 2}"
            )
        pair = self[first : first + 2]
        product = pair.product_support
        if product is None:
            raise InvalidInputError(
                f"merge({first}): the product {pair} has no Kronecker-sparse support"
            )
        return Chain((*self.patterns[:first], product, *self.patterns[first + 2 :]))

    @classmethod
    def dense(cls, in_features: int, out_features: int) -> Chain:
        """One full matrix: (1,M,N,1).

        Example:
            >>> print(Chain.dense(384, 1536))
            (1,1536,384,1)
        """
        return cls(named_chains.dense(in_features, out_features))

    @classmethod
    def low_rank(cls, in_features: int, out_features: int, rank: int) -> Chain:
        """Two full matrices: (1,M,r,1)*(1,r,N,1), with r at most min(M, N).

        Example:
            >>> print(Chain.low_rank(384, 1536, rank=32))
            (1,1536,32,1)*(1,32,384,1)
        """
        return cls(named_chains.low_rank(in_features, out_features, rank))

    @classmethod
    def square_dyadic(cls, n: int) -> Chain:
        """The n x n butterfly, n = 2^L: factors (2^(l-1), 2, 2, 2^(L-l)) for l = 1 .. L.

        Example:
            >>> print(Chain.square_dyadic(8))
            (1,2,2,4)*(2,2,2,2)*(4,2,2,1)
        """
        return cls(named_chains.square_dyadic(n))

    @classmethod
    def kaleidoscope(cls, n: int) -> Chain:
        """The n x n butterfly of `square_dyadic` times its transpose's pattern, n = 2^L.

        Example:
            >>> print(Chain.kaleidoscope(4))
            (1,2,2,2)*(2,2,2,1)*(2,2,2,1)*(1,2,2,2)
        """
        return cls(named_chains.kaleidoscope(n))

    @classmethod
    def block_butterfly(cls, n: int, block: int) -> Chain:
        """Factors (2^(l-1), 2t, 2t, 2^(L-l)) for l = 1 .. L, with n = 2^L t.

        Each factor, its rows and columns reordered alike, is a factor of the butterfly with full
        t x t blocks for entries. The order differs from factor to factor.

        Args:
            n: Number of rows and of columns.
            block: The size t of a block; 1 gives `square_dyadic`.

        Example:
            >>> print(Chain.block_butterfly(768, block=192))
            (1,384,384,2)*(2,384,384,1)
        """
        return cls(named_chains.block_butterfly(n, block))

    @classmethod
    def monarch(cls, in_features: int, out_features: int, p: int) -> Chain:
        """(1, M/p, min(M,N)/p, p)*(p, min(M,N)/p, N/p, 1), for any p that divides M and N.

        Example:
            >>> print(Chain.monarch(384, 1536, p=2))
            (1,768,192,2)*(2,192,192,1)
        """
        return cls(named_chains.monarch(in_features, out_features, p))

    @classmethod
    def deformable_butterfly(cls, patterns: Iterable[Pattern | Sequence[int]]) -> Chain:
        """Any valid chain, from patterns or from (a, b, c, d) tuples.

        Example:
            >>> print(Chain.deformable_butterfly([(1, 768, 192, 2), (6, 64, 64, 1)]))
            (1,768,192,2)*(6,64,64,1)
        """
        return cls(tuple(_as_pattern(pattern) for pattern in patterns))


def _as_pattern(values: Pattern | Sequence[int]) -> Pattern:
    if isinstance(values, Pattern):
        return values
    if isinstance(values, str) or not isinstance(values, Sequence) or len(values) != 4:
        raise InvalidInputError(f"{values!r} is not a pattern: give four integers (a, b, c, d)")
    return Pattern(*values)


__all__ = ["Chain", "Pattern"]
