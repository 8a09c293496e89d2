"""Factorizations of a size into three: (a, b, d) of a factor's rows, (a, c, d) of its columns.

The product of a triple is the size it belongs to; a walk chooses among its triples. Lists of them
are cached, because a walk needs the same ones repeatedly. ``d`` is always the multiplier of a
triple's own d to its factor's; ``cuts`` are the constraints on triples, None for none.
"""

from __future__ import annotations

import functools
from math import comb, gcd

from ksopt.patterns.divisors import divisors
from ksopt.patterns.pattern import Pattern
from ksopt.search.space.constraints import Constraints

Triple = tuple[int, int, int]


def pair(left: Triple, right: Triple, inner: int) -> tuple[Pattern, Pattern]:
    """The factors with ``inner`` features between them."""
    (a1, b1, d1), (a2, c2, d2) = left, right
    return Pattern(a1, b1, inner // (a1 * d1), d1), Pattern(a2, inner // (a2 * d2), c2, d2)


@functools.lru_cache(maxsize=4096)
def partners(
    left_is_whole: bool,
    d1: int,
    columns: int,
    d: int,
    cuts: Constraints | None,
    to_split: bool = False,
) -> tuple[Triple, ...]:
    """Triples (a2, c2, d2) such that a1 or a2 is 1, and d1 and d2 are coprime."""
    rights = (columns_to_split if to_split else column_triples)(columns, d, cuts)
    return tuple(
        (a2, c2, d2) for a2, c2, d2 in rights if (left_is_whole or a2 == 1) and gcd(d1, d2) == 1
    )


@functools.lru_cache(maxsize=4096)
def row_triples(number: int, d: int, cuts: Constraints | None) -> tuple[Triple, ...]:
    """Triples (a1, b1, d1) of the left of two factors whose product has this d."""
    return tuple(
        (a1, b1, d1)
        for a1, b1, d1 in triples(number)
        if cuts is None or (cuts.admits_rows(b1, d1 * d) and (a1 == 1 or not cuts.chainable))
    )


@functools.lru_cache(maxsize=4096)
def column_triples(number: int, d: int, cuts: Constraints | None) -> tuple[Triple, ...]:
    """Triples (a2, c2, d2) of the right of two factors."""
    return tuple(
        (a2, c2, d2)
        for a2, c2, d2 in triples(number)
        if cuts is None or (cuts.admits_columns(c2, d2 * d) and (d2 == 1 or not cuts.chainable))
    )


@functools.lru_cache(maxsize=4096)
def rows_to_split(number: int, d: int, cuts: Constraints | None) -> tuple[Triple, ...]:
    """Triples (a1, b1, d1) of a left factor that will be split, if its rows can be."""
    return tuple(
        (a1, b1, d1)
        for a1, b1, d1 in triples(number)
        if cuts is None or row_triples(b1, d1 * d, cuts)
    )


@functools.lru_cache(maxsize=4096)
def columns_to_split(number: int, d: int, cuts: Constraints | None) -> tuple[Triple, ...]:
    """Triples (a2, c2, d2) of a right factor that will be split, if its columns can be."""
    return tuple(
        (a2, c2, d2)
        for a2, c2, d2 in triples(number)
        if cuts is None or (column_triples(c2, d2 * d, cuts) and (d2 == 1 or not cuts.chainable))
    )


@functools.lru_cache(maxsize=4096)
def count(number: int) -> int:
    """Number of triples with a product, without listing them.

    Example:
        >>> count(12), len(triples(12))
        (18, 18)
    """
    ways, rest, prime = 1, number, 2
    while rest > 1:
        if prime * prime > rest:
            prime = rest
        power = 0
        while rest % prime == 0:
            rest //= prime
            power += 1
        ways *= comb(power + 2, 2)  # the ways to distribute a prime's powers
        prime += 1
    return ways


@functools.lru_cache(maxsize=4096)
def triples(number: int) -> tuple[Triple, ...]:
    """All (x, y, z) with x * y * z = number."""
    return tuple((x, number // (x * z), z) for x in divisors(number) for z in divisors(number // x))
