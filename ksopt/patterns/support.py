"""The exact support of a product of Kronecker-sparse factors, in integer arithmetic.

The support of a product is the set of entries that are nonzero for almost every choice of the
factors' weights: entry (row, column) is in it if a path leads from that output to that input
through the supports of the factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, prod

from ksopt.patterns.pattern import Pattern


def product_support(chain: Sequence[Pattern]) -> Pattern | None:
    """The support of the product of a valid chain, or None if it is not Kronecker-sparse.

    Neighbours whose product has a closed form are merged first, which is enough for every chain of
    the usual families. Remaining factors are followed row by row, with one bit per column.

    A diagonal support has several patterns, such as (2,1,1,3) and (6,1,1,1); the result is always
    (n,1,1,1). Every other support has one pattern only.

    Example:
        >>> print(product_support([Pattern(1, 768, 192, 2), Pattern(6, 64, 64, 1)]))
        (1,1536,384,1)
        >>> print(product_support([Pattern(1, 2, 1, 2), Pattern(2, 1, 2, 1)]))
        None
    """
    merged = _merge_neighbours(chain)
    support = merged[0] if len(merged) == 1 else _by_rows(merged)
    if support is not None and support.b == support.c == 1:
        return Pattern(support.out_features, 1, 1, 1)
    return support


def is_dense(chain: Sequence[Pattern]) -> bool:
    """Whether every output of a valid chain depends on every input.

    Example:
        >>> is_dense([Pattern(1, 768, 192, 2), Pattern(6, 64, 64, 1)])
        True
    """
    rows, columns = chain[0].out_features, chain[-1].in_features
    # Two fast checks for False. A shared factor of all a, or of all d, splits the product into
    # independent parts. Paths fan out by at most c at each factor on their way to the inputs, and
    # by at most b on their way to the outputs.
    shared_a, shared_d = _shared(chain)
    if shared_a * shared_d > 1:
        return False
    if prod(factor.c for factor in chain) < columns or prod(factor.b for factor in chain) < rows:
        return False
    return product_support(chain) == Pattern(1, rows, columns, 1)


def pair_support(left: Pattern, right: Pattern) -> Pattern | None:
    """The support of the product of two factors if a closed form is known, else None.

    With g = gcd(a1, a2) and h = gcd(d1, d2) the product is I_g (x) core (x) I_h, so take a1 and a2,
    d1 and d2 as coprime. Of the n indices between the factors, a row of the left one reads those in
    one of a1 intervals that are some j1 modulo d1; a column of the right one is fed by those in one
    of a2 intervals that are some j2 modulo d2. If a1 or a2 is 1 they share an interval of
    n / max(a1, a2) indices, and in it those of one residue modulo d1*d2 (Chinese remainders).
    An interval of at least d1*d2 indices holds every residue, and then the core is full.
    """
    if left.b == left.c == 1:
        return right
    if right.b == right.c == 1:
        return left
    g, h = gcd(left.a, right.a), gcd(left.d, right.d)
    largest_a = max(left.a, right.a)
    if g == min(left.a, right.a) and left.in_features * h >= largest_a * left.d * right.d:
        return Pattern(g, left.out_features // (g * h), right.in_features // (g * h), h)
    return None


def _merge_neighbours(chain: Sequence[Pattern]) -> list[Pattern]:
    """The chain with every neighbouring pair that has a closed form replaced by its product."""
    merged: list[Pattern] = []
    for factor in chain:
        product = factor
        while merged and (pair := pair_support(merged[-1], product)):
            merged.pop()
            product = pair
        merged.append(product)
    return merged


def _by_rows(chain: Sequence[Pattern]) -> Pattern | None:
    """The support by following every row: features in the ten thousands take milliseconds.

    A shared factor g of all a and h of all d is split off first: the product is
    I_g (x) core (x) I_h, and is Kronecker-sparse exactly if the core is.
    """
    g, h = _shared(chain)
    core = [Pattern(factor.a // g, factor.b, factor.c, factor.d // h) for factor in chain]
    core_support = _recognise(_row_masks(core), core[0], columns=core[-1].in_features)
    if core_support is None:
        return None
    return Pattern(g * core_support.a, core_support.b, core_support.c, core_support.d * h)


def _shared(chain: Sequence[Pattern]) -> tuple[int, int]:
    """The greatest common divisors of all a and of all d."""
    return gcd(*(factor.a for factor in chain)), gcd(*(factor.d for factor in chain))


def _row_masks(chain: Sequence[Pattern]) -> list[int]:
    """The columns that each row of the product reaches, one bit per column, by class of rows.

    Rows (i, k, j) and (i, k', j) of a factor read the same columns: its a*d classes i*d + j stand
    for all a*b*d rows.
    """
    right = chain[-1]
    comb = _comb(right.c, right.d)
    masks = [comb << column for column in _first_columns(right)]
    for factor in reversed(chain[:-1]):
        reached = []
        for first in _first_columns(factor):
            mask = 0
            for column in range(first, first + factor.c * factor.d, factor.d):
                mask |= masks[_row_class(right, column)]
            reached.append(mask)
        masks, right = reached, factor
    return masks


def _recognise(masks: Sequence[int], left: Pattern, columns: int) -> Pattern | None:
    """The pattern that has these rows, or None; ``masks`` holds one per row class of ``left``.

    Row 0 of I_a (x) 1_{b x c} (x) I_d is nonzero at columns 0, d, ..., (c - 1) d, and column 0 at
    rows 0, d, ..., (b - 1) d. They leave one candidate (with d = 1 if both hold one entry), which
    every row then confirms or refutes.
    """
    rows = left.out_features
    row_masks = [masks[_row_class(left, row)] for row in range(rows)]
    c = row_masks[0].bit_count()
    if c > 1:
        after_first = row_masks[0] >> 1
        d = (after_first & -after_first).bit_length()
    else:
        d = next((row for row in range(1, rows) if row_masks[row] & 1), 1)
    a, left_over = divmod(columns, c * d)
    if left_over or rows % (a * d):
        return None
    candidate = Pattern(a, rows // (a * d), c, d)
    comb, firsts = _comb(c, d), _first_columns(candidate)
    if all(row_masks[row] == comb << firsts[_row_class(candidate, row)] for row in range(rows)):
        return candidate
    return None


def _row_class(factor: Pattern, row: int) -> int:
    """The class i*d + j of row i*b*d + k*d + j."""
    return row // (factor.b * factor.d) * factor.d + row % factor.d


def _first_columns(factor: Pattern) -> list[int]:
    """The first column that each row class reads; the others follow at distances d."""
    width = factor.c * factor.d
    return [i * width + j for i in range(factor.a) for j in range(factor.d)]


def _comb(count: int, stride: int) -> int:
    """An integer with bits 0, stride, ..., (count - 1) * stride set."""
    return ((1 << count * stride) - 1) // ((1 << stride) - 1)
