"""The families of the paper's Table 1, by their definitions: their chains for some dims.

Source: paper, Table 1; the chains are those of the class methods of `ksopt.patterns.chain.Chain`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd

from ksopt.errors import InvalidInputError
from ksopt.patterns.chain import Chain
from ksopt.patterns.divisors import divisors
from ksopt.system.suggest import nearest

EVERY = "deformable_butterfly"
"""Any valid chain: the family of the search's whole space."""


@dataclass(frozen=True)
class Family:
    """A family and the construction of its members.

    Args:
        parameters: (in_features, out_features, least, most) -> the parameters of the members with
            these dims, if easily determined only of those with at least ``least`` features between
            factors and at most ``most`` weights.
        chain: (in_features, out_features, parameter) -> the member.
        needs: Description of layers that have members.
    """

    parameters: Callable[[int, int, int, int], Sequence[int]]
    chain: Callable[[int, int, int], Chain]
    needs: str = "layers of any size"


def _ranks(columns: int, rows: int, least: int, most: int) -> Sequence[int]:
    return range(least, min(columns, rows, most // (columns + rows)) + 1)


def _powers_of_two(columns: int, rows: int, least: int, most: int) -> Sequence[int]:
    return (columns,) if columns == rows >= 2 and columns & (columns - 1) == 0 else ()


def _blocks(columns: int, rows: int, least: int, most: int) -> Sequence[int]:
    """All t with columns = 2^L t, L at least 1."""
    if columns != rows:
        return ()
    return [columns >> level for level in range(1, (columns & -columns).bit_length())]


FAMILIES = {
    # One full matrix.
    "dense": Family(lambda *_: (1,), lambda columns, rows, _: Chain.dense(columns, rows)),
    # Two full matrices, with r features between them: 1 to min(in, out).
    "low_rank": Family(_ranks, Chain.low_rank),
    # Factors of 2 x 2 blocks for n x n, n a power of two: no rectangular layer has one.
    "square_dyadic": Family(
        _powers_of_two,
        lambda n, _, __: Chain.square_dyadic(n),
        "square layers of a power of two",
    ),
    # That times its mirror image; of the same layers.
    "kaleidoscope": Family(
        _powers_of_two,
        lambda n, _, __: Chain.kaleidoscope(n),
        "square layers of a power of two",
    ),
    # Factors of 2t x 2t blocks for n x n, n = 2^L t with L at least 1; none rectangular either.
    "block_butterfly": Family(
        _blocks, lambda n, _, t: Chain.block_butterfly(n, t), "square layers of an even size"
    ),
    # (1, out/p, min/p, p)*(p, min/p, in/p, 1) with p dividing in and out, in this order only.
    "monarch": Family(lambda columns, rows, *_: divisors(gcd(columns, rows)), Chain.monarch),
}
NAMES = (*FAMILIES, EVERY)
_ALSO = {"butterfly": "square_dyadic"}


def names_of(families: str | Sequence[str]) -> tuple[str, ...]:
    """Validated names of families, in the order of Table 1.

    Args:
        families: Names joined by commas, or a sequence of names.

    Raises:
        InvalidInputError: There is no such family, or no name at all.

    Example:
        >>> names_of("monarch, low_rank")
        ('low_rank', 'monarch')
        >>> names_of("toeplitz")
        Traceback (most recent call last):
        ksopt.errors.InvalidInputError: families 'toeplitz': there is no such family; there are \
dense, low_rank, square_dyadic (or butterfly), kaleidoscope, block_butterfly, monarch and \
deformable_butterfly
    """
    words = families.split(",") if isinstance(families, str) else families
    names = [_ALSO.get(str(word).strip(), str(word).strip()) for word in words]
    for word in names:
        if word not in NAMES:
            also = {name: f" (or {short})" for short, name in _ALSO.items()}
            *others, last = (name + also.get(name, "") for name in NAMES)
            raise InvalidInputError(
                f"families {word!r}: there is no such family; there are {', '.join(others)} and "
                f"{last}{nearest(word, (*NAMES, *_ALSO))}"
            )
    return tuple(name for name in NAMES if name in names)


def is_member(name: str, chain: Chain) -> bool:
    """Whether a chain is exactly a member of a family by its definition.

    Example:
        >>> chain = Chain.monarch(384, 1536, p=2)
        >>> [name for name in NAMES if is_member(name, chain)]
        ['monarch', 'deformable_butterfly']
    """
    if name == EVERY:
        return True
    family, columns, rows = FAMILIES[name], chain.in_features, chain.out_features
    # Of low rank only one can have these inner features and weights.
    able = family.parameters(columns, rows, chain[0].in_features, chain.nnz)
    return any(family.chain(columns, rows, parameter) == chain for parameter in able)


def obstacle(name: str, columns: int, rows: int, max_factors: int) -> str | None:
    """The reason why a layer has no chain of a family at any budget; None if it may have one.

    Example:
        >>> obstacle("square_dyadic", 1024, 1024, max_factors=3)
        'square_dyadic has 10 factors there, and a search takes at most 3'
    """
    if name == EVERY:
        return None
    family = FAMILIES[name]
    able = family.parameters(columns, rows, 1, columns * rows * 2)
    if not able:
        return f"{name} is of {family.needs}"
    fewest = len(family.chain(columns, rows, able[0]))
    if fewest > max_factors:
        return f"{name} has {fewest} factors there, and a search takes at most {max_factors}"
    return None
