"""The structures that a search can choose from, by name."""

from __future__ import annotations

import functools
import re

from ksopt.errors import InvalidInputError
from ksopt.operators import block_diagonal, fp8_dense, low_rank, strassen_tile, two_four
from ksopt.operators.base import StructuredOperator
from ksopt.operators.kronecker import KroneckerOperator
from ksopt.operators.structure import Structure
from ksopt.patterns.chain import Chain
from ksopt.system.suggest import nearest

KRONECKER = "ks"
"""Chains of Kronecker-sparse factors, whose candidates are the search's own space."""

Replacement = Chain | StructuredOperator
"""What may stand in the place of a dense matrix; a chain is what `KroneckerOperator` computes."""


_NAME = "[a-z][a-z0-9-]*"
_STRUCTURES: dict[str, Structure] = {
    structure.name: structure
    for structure in (
        low_rank.STRUCTURE,
        block_diagonal.STRUCTURE,
        two_four.STRUCTURE,
        strassen_tile.STRUCTURE,
        fp8_dense.STRUCTURE,
    )
}


def register_structure(structure: Structure) -> Structure:
    """Add a structure: a search that names it chooses from its operators, too.

    Raises:
        InvalidInputError: There is one of that name, or it is none.
    """
    if not re.fullmatch(_NAME, structure.name):
        raise InvalidInputError(
            f"structure {structure.name!r}: a name has small letters, digits and hyphens"
        )
    if structure.name in names():
        raise InvalidInputError(f"structure {structure.name!r}: there is one of that name")
    _STRUCTURES[structure.name] = structure
    return structure


def unregister_structure(name: str) -> None:
    """Take a structure out again.

    Raises:
        InvalidInputError: There is none of that name.
    """
    structure_of(name)
    del _STRUCTURES[name]


def names() -> tuple[str, ...]:
    """The structures that there are, chains first."""
    return (KRONECKER, *_STRUCTURES)


def structure_of(name: str) -> Structure:
    """The structure of a name, other than chains.

    Raises:
        InvalidInputError: There is none of that name.
    """
    if name not in _STRUCTURES:
        raise InvalidInputError(
            f"structures {name!r}: there is no such structure; there are {', '.join(names())}, and "
            f"those that a module of --plugins registers{nearest(name, names())}"
        )
    return _STRUCTURES[name]


def name_of(replacement: Replacement) -> str:
    """The name of the structure of a chain or of another operator.

    Example:
        >>> name_of(Chain.dense(4, 2))
        'ks'
    """
    return str(replacement).partition("(")[0] or KRONECKER


def parse(text: str) -> Replacement:
    """A chain, or the operator of another structure, from its text.

    Raises:
        InvalidInputError: There is no such structure, or it does not know the text.

    Example:
        >>> parse("(1,4,4,2)*(2,4,4,1)").nnz
        64
    """
    name = re.match(rf"\s*({_NAME})\(", text)
    return _chain(text) if name is None else structure_of(name[1]).parse(text.strip())


@functools.lru_cache(maxsize=2**14)
def _chain(text: str) -> Chain:
    """A chain never changes, and a search reads those of all its trials before each new one."""
    return Chain.parse(text)


def operator_of(replacement: Replacement) -> StructuredOperator:
    """What a chain, or another operator, computes."""
    return KroneckerOperator(replacement) if isinstance(replacement, Chain) else replacement
