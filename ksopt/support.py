"""The exact support of a product of Kronecker-sparse factors, in integer arithmetic.

The support of a product is where some choice of the factors' weights (almost every choice) gives a
nonzero: entry (row, column) is in it if a path leads from that output to that input through the
factors' supports. Patterns are plain (a, b, c, d) tuples here, so that `ksopt.pattern` can
build on this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, prod

Quad = tuple[int, int, int, int]


def product_support(quads: Sequence[Quad]) -> Quad | None:
    """Support of the product of a valid chain as (a, b, c, d), or None if it is not of that form.

    Neighbours whose product is known in closed form are merged first; that settles every chain of
    the usual families. What is left, if anything, is followed row by row with one bit a column.

    A diagonal support has several names, (2, 1, 1, 3) and (6, 1, 1, 1) among them; it is
    always called (n, 1, 1, 1). Every other support has one name only.

    Example:
        >>> product_support([(1, 768, 192, 2), (6, 64, 64, 1)])
        (1, 1536, 384, 1)
        >>> product_support([(1, 2, 1, 2), (2, 1, 2, 1)]) is None
        True
    """
    merged = _merge_neighbours(quads)
    found = merged[0] if len(merged) == 1 else _by_rows(merged)
    if found is None:
        return None
    a, b, c, d = found
    return (a * d, 1, 1, 1) if b == c == 1 else found


def is_dense(quads: Sequence[Quad]) -> bool:
    """Whether every output of a valid chain depends on every input.

    Example:
        >>> is_dense([(1, 768, 192, 2), (6, 64, 64, 1)])
        True
    """
    rows = quads[0][0] * quads[0][1] * quads[0][3]
    columns = quads[-1][0] * quads[-1][2] * quads[-1][3]
    # A shared factor of all a, or of all d, splits the product into independent parts; and paths
    # fan out by at most c towards the inputs, b towards the outputs, at each factor.
    if gcd(*(a for a, _, _, _ in quads)) > 1 or gcd(*(d for _, _, _, d in quads)) > 1:
        return rows == columns == 1
    if prod(c for _, _, c, _ in quads) < columns or prod(b for _, b, _, _ in quads) < rows:
        return False
    return product_support(quads) == (1, rows, columns, 1)


def pair_support(left: Quad, right: Quad) -> Quad | None:
    """Support of a product of two factors where a closed form is known, else None.

    With g = gcd(a1, a2) and h = gcd(d1, d2) the pair is I_g (x) pair' (x) I_h. In pair' the outputs
    of block i, residue j of the left factor read the inner indices of one interval that are j
    modulo d1; those of the right factor are read likewise, modulo d2. If one of the two
    interval partitions refines the other, two such classes overlap in an interval of length
    n' / max(a1', a2') restricted to one residue modulo d1'd2' (d1', d2' are coprime), which is
    never empty if the interval is at least d1'd2' long. Then pair' is full.
    """
    a1, b1, c1, d1 = left
    a2, b2, c2, d2 = right
    if b1 == c1 == 1:
        return right
    if b2 == c2 == 1:
        return left
    g, h = gcd(a1, a2), gcd(d1, d2)
    inner = a1 * c1 * d1
    if g == min(a1, a2) and inner * h >= max(a1, a2) * d1 * d2:
        return (g, a1 * b1 * d1 // (g * h), a2 * c2 * d2 // (g * h), h)
    return None


def _merge_neighbours(quads: Sequence[Quad]) -> list[Quad]:
    """The same product with every neighbouring pair that has a closed form replaced by it."""
    merged: list[Quad] = []
    for quad in quads:
        while merged and (pair := pair_support(merged[-1], quad)):
            merged.pop()
            quad = pair
        merged.append(quad)
    return merged


def _by_rows(quads: Sequence[Quad]) -> Quad | None:
    """`product_support` by following every row: dimensions in the ten thousands take milliseconds.

    A shared factor g of all a and h of all d is split off first (product = I_g (x) core (x) I_h):
    the product is Kronecker-sparse exactly if the core is.
    """
    g, h = gcd(*(a for a, _, _, _ in quads)), gcd(*(d for _, _, _, d in quads))
    core = [(a // g, b, c, d // h) for a, b, c, d in quads]
    found = _recognise(_row_masks(core), core)
    if found is None:
        return None
    a, b, c, d = found
    return (g * a, b, c, d * h)


def _row_masks(quads: Sequence[Quad]) -> list[int]:
    """Columns reached from row class i * d + j of the first factor, one bit a column.

    A factor's rows (i, k, j) and (i, k', j) read the same columns, so a*d masks stand for all
    a*b*d rows.
    """
    a, b, c, d = quads[-1]
    comb = _comb(c, d)
    masks = [comb << (i * c * d + j) for i in range(a) for j in range(d)]
    block_rows, stride = b * d, d  # of the factor to the right, whose classes `masks` is about
    for a, b, c, d in reversed(quads[:-1]):
        reached = []
        for i in range(a):
            for j in range(d):
                mask = 0
                for column in range(i * c * d + j, (i + 1) * c * d, d):
                    mask |= masks[column // block_rows * stride + column % stride]
                reached.append(mask)
        masks, block_rows, stride = reached, b * d, d
    return masks


def _recognise(masks: Sequence[int], quads: Sequence[Quad]) -> Quad | None:
    """The (a, b, c, d) whose support the rows have, if there is one.

    Row 0 of I_a (x) 1_{b x c} (x) I_d is nonzero at columns 0, d, ..., (c - 1) d, and column 0 at
    rows 0, d, ..., (b - 1) d: they leave one candidate (d = 1 if both hold one entry), which every
    row then confirms or refutes.
    """
    first_a, first_b, _, first_d = quads[0]
    rows = first_a * first_b * first_d
    columns = quads[-1][0] * quads[-1][2] * quads[-1][3]
    row_masks = [masks[row // (first_b * first_d) * first_d + row % first_d] for row in range(rows)]
    c = row_masks[0].bit_count()
    if c > 1:
        d = (row_masks[0] >> 1 & -(row_masks[0] >> 1)).bit_length()
    else:
        d = next((row for row in range(1, rows) if row_masks[row] & 1), 1)
    if columns % (c * d):
        return None
    a = columns // (c * d)
    if rows % (a * d):
        return None
    b = rows // (a * d)
    comb = _comb(c, d)
    for row, mask in enumerate(row_masks):
        if mask != comb << (row // (b * d) * c * d + row % d):
            return None
    return (a, b, c, d)


def _comb(count: int, stride: int) -> int:
    """An integer with bits 0, stride, ..., (count - 1) * stride set."""
    return ((1 << count * stride) - 1) // ((1 << stride) - 1)
