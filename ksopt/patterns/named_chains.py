"""The factors of the paper's named families, from left to right.

The public functions are the class methods of `ksopt.patterns.chain.Chain` with the same names.

Source: paper, Table 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd

from ksopt.errors import InvalidInputError
from ksopt.patterns.divisors import divisors
from ksopt.patterns.pattern import Pattern
from ksopt.patterns.validate import checked_int


def dense(in_features: int, out_features: int) -> tuple[Pattern, ...]:
    """One full matrix."""
    call = f"Chain.dense({in_features!r}, {out_features!r})"
    columns = checked_int(in_features, "in_features", call)
    rows = checked_int(out_features, "out_features", call)
    return (Pattern(1, rows, columns, 1),)


def low_rank(in_features: int, out_features: int, rank: int) -> tuple[Pattern, ...]:
    """Two full matrices with `rank` features between them."""
    call = f"Chain.low_rank({in_features!r}, {out_features!r}, rank={rank!r})"
    columns = checked_int(in_features, "in_features", call)
    rows = checked_int(out_features, "out_features", call)
    inner = checked_int(rank, "rank", call)
    if inner > min(rows, columns):
        raise InvalidInputError(
            f"{call}: rank must be at most min(in_features, out_features) = {min(rows, columns)}"
        )
    return (Pattern(1, rows, inner, 1), Pattern(1, inner, columns, 1))


def square_dyadic(n: int) -> tuple[Pattern, ...]:
    """The butterfly of the fast Fourier transform: log2(n) factors of 2 x 2 blocks."""
    levels = _log2(n, f"Chain.square_dyadic({n!r})")
    return _butterfly(levels, block=1)


def kaleidoscope(n: int) -> tuple[Pattern, ...]:
    """A butterfly followed, to its right, by a transposed one."""
    levels = _log2(n, f"Chain.kaleidoscope({n!r})")
    butterfly = _butterfly(levels, block=1)
    return butterfly + butterfly[::-1]


def block_butterfly(n: int, block: int) -> tuple[Pattern, ...]:
    """The factors of a butterfly, their 2 x 2 blocks widened to 2*block x 2*block."""
    call = f"Chain.block_butterfly({n!r}, block={block!r})"
    size = checked_int(n, "n", call, minimum=2)
    width = checked_int(block, "block", call)
    blocks, rest = divmod(size, width)
    if rest or blocks < 2 or blocks & (blocks - 1):
        largest_power = size & -size
        if largest_power == 1:
            raise InvalidInputError(f"{call}: n must be even: it is block * 2**L with L at least 1")
        allowed = [size >> level for level in range(1, largest_power.bit_length())]
        raise InvalidInputError(
            f"{call}: n / block must be 2, 4, 8 or a higher power of two; "
            f"for n = {size} block can be {_listed(allowed)}"
        )
    return _butterfly(blocks.bit_length() - 1, width)


def monarch(in_features: int, out_features: int, p: int) -> tuple[Pattern, ...]:
    """Two factors with p blocks: the right one block-diagonal, the left one after a shuffle."""
    call = f"Chain.monarch({in_features!r}, {out_features!r}, p={p!r})"
    columns = checked_int(in_features, "in_features", call)
    rows = checked_int(out_features, "out_features", call)
    blocks = checked_int(p, "p", call)
    common = gcd(rows, columns)
    if common % blocks:
        raise InvalidInputError(
            f"{call}: p must divide both in_features and out_features; "
            f"it can be {_listed(divisors(common))}"
        )
    inner = min(rows, columns) // blocks
    return (
        Pattern(1, rows // blocks, inner, blocks),
        Pattern(blocks, inner, columns // blocks, 1),
    )


def _butterfly(levels: int, block: int) -> tuple[Pattern, ...]:
    """Factor l of L: 2^(l-1) diagonal blocks, each with a stride of 2^(L-l)."""
    return tuple(
        Pattern(2**level, 2 * block, 2 * block, 2 ** (levels - 1 - level))
        for level in range(levels)
    )


def _log2(n: object, call: str) -> int:
    """L for n = 2**L, where L is at least 1."""
    size = checked_int(n, "n", call, minimum=2)
    if size & (size - 1):
        below = 1 << (size.bit_length() - 1)
        raise InvalidInputError(
            f"{call}: n must be a power of two; the nearest are {below} and {2 * below}"
        )
    return size.bit_length() - 1


def _listed(numbers: Iterable[int]) -> str:
    """The text ``1, 2 or 4`` of numbers; a long list is cut in the middle."""
    words = [str(number) for number in sorted(numbers)]
    if len(words) == 1:
        return words[0]
    if len(words) > 16:
        words = [*words[:10], "...", *words[-3:]]
    return f"{', '.join(words[:-1])} or {words[-1]}"
