"""Enumeration of the chains of a space by a tree of choices that reaches each of them once.

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

**Constraints** cut branches, not leaves. What b, c and d of a factor must be is a property of each
triple and, of R, what it is a multiple of and its bounds. Two factors with a dense product are
chainable exactly if a1 = d2 = 1 and R is a multiple of d1 * a2. Every pair of a chainable chain has
a Kronecker-sparse product, so all of three factors are right splits, their outer pair is chainable
with the same a1 = d2 = 1, and the two that P is split into are chainable among themselves.

Families of the paper's Table 1 have few members, which are created one by one. If requested by name
they are included even if a pair could be merged, as in all butterflies.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from math import gcd, isqrt, lcm
from typing import TypeVar

from ksopt.errors import InvalidInputError
from ksopt.patterns.chain import Chain
from ksopt.patterns.pattern import Pattern
from ksopt.patterns.size import Dims
from ksopt.patterns.support import pair_support
from ksopt.search.space.constraints import NONE, Constraints
from ksopt.search.space.factorizations import Triple, pair, partners, row_triples, rows_to_split
from ksopt.search.space.factorizations import count as count_triples
from ksopt.search.space.families import EVERY, FAMILIES, is_member

# A walk creates up to some thousands of lists of this length before it reaches its limit of
# choices. The longest for all sizes up to a million is 8,505, of 997,920.
_MOST_TRIPLES = 10_000

T = TypeVar("T")
Factors = tuple[Pattern, ...]


class TooManyError(Exception):
    """The walk has exceeded its limit of choices."""


class Walk:
    """A traversal of the tree of choices that yields every chain of a space.

    Args:
        dims: Size of the layer.
        most: The most weights of a chain; may be lowered during the walk, which prunes it.
        least_inner: The least size between factors.
        rng: None to take the choices in order, else they are taken in a random order: the first
            chain of a walk is then a random one, the second a neighbour of it.
        visits: Choices after which `TooManyError` is raised; None for no limit.
        constraints: Further constraints on every chain.

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
        constraints: Constraints = NONE,
    ) -> None:
        self.most = most
        self._dims = dims
        self._inner = (least_inner, max(dims.in_features, dims.out_features))
        self._rng = rng
        self._visits = visits
        self._constraints = constraints
        # Constraints that cut branches of the tree; None is faster to check.
        self._cuts = constraints if constraints.cut else None

    def factors(self, count: int) -> Iterator[Factors]:
        """The chains with exactly ``count`` factors, each once, as tuples of patterns."""
        if self._constraints.is_any_chain:
            yield from self._any(count)
        if self._constraints.families:
            yield from self._members(count)

    def _any(self, count: int) -> Iterator[Factors]:
        """Chains of no particular family."""
        check_listable(self._dims)
        rows, columns = self._dims.out_features, self._dims.in_features
        whole = Pattern(1, rows, columns, 1)
        if count == 1:
            fits = whole.nnz <= self.most and self._inner[0] <= min(rows, columns)
            if fits and self._constraints.admits_factor(whole):
                yield (whole,)
        elif count == 2:
            yield from self._split(whole, spare=0)
        elif self._constraints.chainable:
            yield from self._right_splits()
        else:
            for split_right in self._choose((True, False)):
                yield from self._right_splits() if split_right else self._left_splits()

    def _members(self, count: int) -> Iterator[Factors]:
        """Chains of the families, without those that `_any` or an earlier family has."""
        names = [name for name in self._constraints.families if name != EVERY]
        for place in self._choose(range(len(names))):
            family = FAMILIES[names[place]]
            columns, rows = self._dims.in_features, self._dims.out_features
            able = family.parameters(columns, rows, self._inner[0], self.most)
            for parameter in self._choose(able):
                chain = family.chain(columns, rows, parameter)
                if (
                    len(chain) == count
                    and self._holds(chain)
                    and not any(is_member(name, chain) for name in names[:place])
                    and not (self._constraints.is_any_chain and not is_reducible(chain))
                ):
                    yield chain.patterns

    def _holds(self, chain: Chain) -> bool:
        """Whether a family's chain is in the space, apart from pairs that could be merged."""
        return (
            chain.nnz <= self.most
            and chain.rank_bound >= self._inner[0]
            and (not self._constraints.chainable or chain.is_chainable)
            and all(map(self._constraints.admits_factor, chain))
            and chain.is_dense_support
        )

    def _right_splits(self) -> Iterator[Factors]:
        """Chains of K_1 and a factor P that is split in two."""
        for left, whole in self._shapes(split_right=True):
            for middle, right in self._split(whole, spare=left.nnz):
                if self._constraints.chainable and not left.is_chainable(middle):
                    continue
                if not _is_reducible(left, middle):
                    yield left, middle, right

    def _left_splits(self) -> Iterator[Factors]:
        """Chains of a factor P that is split in two and K_3, except those with a right split."""
        for whole, right in self._shapes(split_right=False):
            for left, middle in self._split(whole, spare=right.nnz):
                if pair_support(middle, right) is None:
                    yield left, middle, right

    def _split(self, whole: Pattern, spare: int) -> Iterator[tuple[Pattern, Pattern]]:
        """Pairs whose product has the support ``whole`` and more weights than they.

        ``spare`` weights are already used.
        """
        scale = whole.a * whole.d
        least, most = -(-self._inner[0] // scale), self._inner[1] // scale
        # With R features between them, b1 * c2 * R >= whole.b * whole.c (see "Two factors"), so the
        # parts have scale * R * (b1 + c2) >= 2 * scale * sqrt(whole.b * whole.c * R) weights.
        if spare + 2 * scale * isqrt(whole.b * whole.c * least) > self.most:
            return
        d = whole.d if self._constraints.alignment else 1
        for left in self._choose(row_triples(whole.b, d, self._cuts)):
            a1, _, d1 = left
            for right in self._choose(partners(a1 == 1, d1, whole.c, d, self._cuts)):
                each = left[1] + right[1]
                weights = min((self.most - spare) // scale, whole.b * whole.c - 1)
                if least * each > weights:
                    continue
                sizes = self._inner_sizes(left, right, least, min(most, weights // each), d)
                for inner in self._choose(sizes):
                    first, second = pair(left, right, inner)
                    yield (
                        Pattern(whole.a * first.a, first.b, first.c, first.d * whole.d),
                        Pattern(whole.a * second.a, second.b, second.c, second.d * whole.d),
                    )

    def _shapes(self, split_right: bool) -> Iterator[tuple[Pattern, Pattern]]:
        """Pairs with a dense product, one of which will be split: only the other's weights count.

        The two parts have at least one weight for each of the features at their outer side, and as
        many as there are inner features.
        """
        rows, columns = self._dims.out_features, self._dims.in_features
        least, most = self._inner
        lefts = (row_triples if split_right else rows_to_split)(rows, 1, self._cuts)
        for left in self._choose(lefts):
            a1, _, d1 = left
            rights = partners(a1 == 1, d1, columns, 1, self._cuts, split_right)
            for right in self._choose(rights):
                each = (left[1] if split_right else right[1]) + 1
                spare = self.most - (columns if split_right else rows)
                largest = min(most, spare // each)
                sizes = self._inner_sizes(
                    left, right, least, largest, 1, factors=(split_right, not split_right)
                )
                for inner in self._choose(sizes):
                    yield pair(left, right, inner)

    def _inner_sizes(
        self,
        left: Triple,
        right: Triple,
        least: int,
        most: int,
        d: int,
        factors: tuple[bool, bool] = (True, True),
    ) -> Sequence[int]:
        """The sizes between two factors at which every row meets every column.

        ``factors`` tells which of the two will not be split: those must meet the constraints. Their
        d are ``d`` times the triples'.
        """
        (a1, _, d1), (a2, _, d2) = left, right
        groups = (a1 * d1, a2 * d2)
        step, low = lcm(*groups), max(least, max(a1, a2) * d1 * d2)
        if self._cuts is None:
            return range(-(-low // step) * step, most + 1, step)
        if self._cuts.chainable:
            step = lcm(step, d1 * a2)
        allowed = self._cuts.block_sizes
        steps = (self._cuts.column_step(d1 * d), self._cuts.row_step(d2 * d))
        limited = [
            (group, block_step)
            for group, block_step, is_factor in zip(groups, steps, factors, strict=True)
            if is_factor
        ]
        for group, block_step in limited:
            step = lcm(step, group * block_step)
            low, most = max(low, group * allowed.least), min(most, group * allowed.most)
        sizes = range(-(-low // step) * step, most + 1, step)
        if not allowed.listed:
            return sizes
        one = limited[0][0]
        able = [size * one for size in allowed.listed if size * one in sizes]
        return [n for n in able if all(allowed.holds(n // group) for group, _ in limited)]

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


def check_listable(dims: Dims) -> None:
    """Reject sizes for which even the lists of a walk's choices take too long.

    Raises:
        InvalidInputError: A size has too many divisors.

    Example:
        >>> check_listable(Dims(768, 735134400))
        Traceback (most recent call last):
        ksopt.errors.InvalidInputError: dims 768x735134400: 735,134,400 is a product of three \
whole numbers in 136,080 ways, and chains are listed of sizes with at most 10,000, as every size \
up to 1,000,000 has: give a size with fewer divisors, or name families
    """
    for size in (dims.in_features, dims.out_features):
        if (ways := count_triples(size)) > _MOST_TRIPLES:
            raise InvalidInputError(
                f"dims {dims}: {size:,} is a product of three whole numbers in {ways:,} ways, and "
                f"chains are listed of sizes with at most {_MOST_TRIPLES:,}, as every size up to "
                "1,000,000 has: give a size with fewer divisors, or name families"
            )


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
