"""Which chains there are: a tree of choices that reaches each of them once.

A chain is in the space if

- it has the layer's dims and at most the budget's weights;
- it has 1 to 3 factors;
- every output depends on every input;
- each size between factors is at least the minimum rank (then so is the rank bound, see
  `Chain.rank_bound`) and at most max(in, out), because more would only move more data;
- no neighbouring pair has a product that is Kronecker-sparse with no more weights than the pair:
  the shorter chain expresses as much and costs no more (a diagonal factor is such a case);
- with three factors, the product of the first two or of the last two is Kronecker-sparse, so that
  the chain refines a two-factor chain. The others, where the factors interleave in no common
  blocks, are fewer (45 beside 291 for 8 outputs of 12 inputs at rank 4), and no family of the
  literature is among them.

**Two factors.** Let R be the size between (a1,b1,c1,d1) and (a2,b2,c2,d2). A row of the left factor
reads the indices of R that lie in one of a1 intervals and are some j1 modulo d1; a column of the
right one is fed by those in one of a2 intervals that are some j2 modulo d2. Every row must meet
every column:

- the first interval of one and the last of the other must meet, so a1 = 1 or a2 = 1;
- every j1 must meet every j2, so gcd(d1, d2) = 1, and an interval of R / max(a1, a2) indices must
  hold every residue modulo d1*d2, which it does exactly if R >= max(a1, a2) * d1 * d2.

So each two-factor chain is a factorization (a1, b1, d1) of out_features, one (a2, c2, d2) of
in_features with these conditions, and a multiple R of lcm(a1*d1, a2*d2); it has R * (b1 + c2)
weights. Monarch is a1 = d2 = 1, d1 = a2 = p; the low-rank family is all four 1; the mirrored order,
coprime strides and every rank between are in it too.

**Three factors.** A two-factor chain, one of whose factors (a,b,c,d) is replaced by
I_a (x) (a two-factor chain of a b x c matrix) (x) I_d. What can be split on both sides is listed by
its right split only, so each chain comes once.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from math import gcd, isqrt, lcm
from typing import TypeVar

from ksopt.factor import Pattern
from ksopt.pattern import Chain
from ksopt.search.request import Dims
from ksopt.support import pair_support

T = TypeVar("T")
Factors = tuple[Pattern, ...]
# (a, b, d) of a factor's rows or (a, c, d) of its columns.
Triple = tuple[int, int, int]


class TooManyError(Exception):
    """The walk has made more choices than it was allowed."""


class Walk:
    """A way through the tree of choices that makes up every chain of a space.

    Args:
        dims: Size of the layer.
        most: The most weights of a chain; may be lowered during the walk, which prunes it.
        least_inner: The least size between factors.
        rng: None to take the choices in order, else they are taken in a random order: the first
            chain of a walk is then a random one, the second a neighbour of it.
        visits: Choices after which `TooManyError` is raised; None for no limit.

    Example:
        >>> for factors in Walk(Dims(8, 12), most=56, least_inner=8).factors(2):
        ...     print(Chain(factors), Chain(factors).nnz)
        (1,3,2,4)*(2,4,4,1) 56
        (4,3,2,1)*(1,4,4,2) 56
    """

    def __init__(
        self,
        dims: Dims,
        most: int,
        least_inner: int,
        rng: random.Random | None = None,
        visits: int | None = None,
    ) -> None:
        self.most = most
        self._dims = dims
        self._inner = (least_inner, max(dims.in_features, dims.out_features))
        self._rng = rng
        self._visits = visits

    def factors(self, count: int) -> Iterator[Factors]:
        """The chains with exactly ``count`` factors, each once, as tuples of patterns."""
        rows, columns = self._dims.out_features, self._dims.in_features
        if count == 1:
            if rows * columns <= self.most and self._inner[0] <= min(rows, columns):
                yield (Pattern(1, rows, columns, 1),)
        elif count == 2:
            yield from self._pairs(rows, columns, *self._inner, spare=0, scale=1)
        else:
            for split_right in self._choose((True, False)):
                yield from self._right_splits() if split_right else self._left_splits()

    def _right_splits(self) -> Iterator[Factors]:
        """K_1 and a factor P, P split in two."""
        rows, columns = self._dims.out_features, self._dims.in_features
        for left, whole in self._shapes(rows, columns, *self._inner, rest=(columns, 1, 0)):
            for middle, right in self._split(whole, spare=left.nnz):
                if not _is_reducible(left, middle):
                    yield left, middle, right

    def _left_splits(self) -> Iterator[Factors]:
        """A factor P and K_3, P split in two; without those that a right split gives too."""
        rows, columns = self._dims.out_features, self._dims.in_features
        for whole, right in self._shapes(rows, columns, *self._inner, rest=(rows, 0, 1)):
            for left, middle in self._split(whole, spare=right.nnz):
                if pair_support(middle, right) is None:
                    yield left, middle, right

    def _split(self, whole: Pattern, spare: int) -> Iterator[tuple[Pattern, Pattern]]:
        """Pairs whose product fills ``whole``, with ``spare`` weights already spent."""
        scale = whole.a * whole.d
        least, most = -(-self._inner[0] // scale), self._inner[1] // scale
        # With R features between them, b1 * c2 * R >= whole.b * whole.c (see "Two factors"), so the
        # parts have scale * R * (b1 + c2) >= 2 * scale * sqrt(whole.b * whole.c * R) weights.
        if spare + 2 * scale * isqrt(whole.b * whole.c * least) > self.most:
            return
        for left, right in self._pairs(whole.b, whole.c, least, most, spare, scale):
            yield (
                Pattern(whole.a * left.a, left.b, left.c, left.d * whole.d),
                Pattern(whole.a * right.a, right.b, right.c, right.d * whole.d),
            )

    def _pairs(
        self, rows: int, columns: int, least: int, most: int, spare: int, scale: int
    ) -> Iterator[tuple[Pattern, Pattern]]:
        """Two-factor chains of a dense rows x columns matrix with fewer weights than it has."""
        for left, right in self._outer(rows, columns, least, spare, scale):
            weights = min((self.most - spare) // scale, rows * columns - 1)
            largest = min(most, weights // (left[1] + right[1]))
            yield from self._inner_sizes(left, right, least, largest)

    def _shapes(
        self, rows: int, columns: int, least: int, most: int, rest: tuple[int, int, int]
    ) -> Iterator[tuple[Pattern, Pattern]]:
        """Pairs with a dense product, one of which will be split: only the other's weights count.

        ``rest`` is (n, 1, 0) where the right one will be, (n, 0, 1) where the left one will. Its
        two parts have at least n weights, for the n features at their outer side, and as many as
        there are inner features.
        """
        outside, count_left, count_right = rest
        for left, right in self._outer(rows, columns, least=1, spare=0, scale=1):
            each = left[1] * count_left + right[1] * count_right + 1
            largest = min(most, (self.most - outside) // each)
            yield from self._inner_sizes(left, right, least, largest)

    def _outer(
        self, rows: int, columns: int, least: int, spare: int, scale: int
    ) -> Iterator[tuple[Triple, Triple]]:
        """(a1, b1, d1), (a2, c2, d2) that may let every row meet every column within the budget."""
        for left in self._choose(_triples(rows)):
            a1, b1, d1 = left
            for right in self._choose(_partners(columns, a1 == 1, d1)):
                if spare + scale * least * (b1 + right[1]) <= self.most:
                    yield left, right

    def _inner_sizes(
        self, left: Triple, right: Triple, least: int, most: int
    ) -> Iterator[tuple[Pattern, Pattern]]:
        """The factors at every size between them at which every row does meet every column."""
        (a1, b1, d1), (a2, c2, d2) = left, right
        step = lcm(a1 * d1, a2 * d2)
        low = max(least, max(a1, a2) * d1 * d2)
        for inner in self._choose(range(-(-low // step) * step, most + 1, step)):
            yield (
                Pattern(a1, b1, inner // (a1 * d1), d1),
                Pattern(a2, inner // (a2 * d2), c2, d2),
            )

    def _choose(self, options: Sequence[T]) -> Iterator[T]:
        """Every option: in order, or from a random start with a random stride."""
        count = len(options)
        start, stride = 0, 1
        if self._rng is not None and count > 1:
            start, stride = self._rng.randrange(count), self._rng.randrange(1, count)
            while gcd(stride, count) > 1:
                stride = self._rng.randrange(1, count)
        for turn in range(count):
            if self._visits is not None:
                self._visits -= 1
                if self._visits < 0:
                    raise TooManyError
            yield options[(start + turn * stride) % count]


def is_reducible(chain: Chain) -> bool:
    """Whether a neighbouring pair has a Kronecker-sparse product with no more weights than it.

    Example:
        >>> is_reducible(Chain.parse("(1,4,4,4)*(4,2,2,2)*(8,2,2,1)"))
        True
    """
    return any(_is_reducible(chain[i], chain[i + 1]) for i in range(len(chain) - 1))


def _is_reducible(left: Pattern, right: Pattern) -> bool:
    product = pair_support(left, right)
    return product is not None and product.nnz <= left.nnz + right.nnz


@functools.lru_cache(maxsize=4096)
def _partners(columns: int, left_is_whole: bool, d1: int) -> tuple[Triple, ...]:
    """(a2, c2, d2) such that a1 or a2 is 1, and d1 and d2 are coprime."""
    return tuple(
        (a2, c2, d2)
        for a2, c2, d2 in _triples(columns)
        if (left_is_whole or a2 == 1) and gcd(d1, d2) == 1
    )


@functools.lru_cache(maxsize=4096)
def _triples(number: int) -> tuple[Triple, ...]:
    """Every (x, y, z) with x * y * z = number."""
    return tuple((x, number // (x * z), z) for x in divisors(number) for z in divisors(number // x))


@functools.lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """The divisors in rising order.

    Example:
        >>> divisors(12)
        (1, 2, 3, 4, 6, 12)
    """
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))
