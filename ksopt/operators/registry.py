"""The structures that a search can choose from, by name."""

from __future__ import annotations

import functools
import re

from ksopt.errors import InvalidInputError
from ksopt.operators.base import StructuredOperator
from ksopt.operators.kronecker import KroneckerOperator
from ksopt.operators.structure import Structure
from ksopt.operators.structures import STRUCTURES
from ksopt.patterns.chain import Chain
from ksopt.system.suggest import nearest

KRONECKER = "ks"
"""The name of chains of Kronecker-sparse factors, whose candidates are the search's own space."""

Replacement = Chain | StructuredOperator
"""A replacement of a dense matrix; `KroneckerOperator` computes a chain."""


_NAME = "[a-z][a-z0-9-]*"
_STRUCTURES: dict[str, Structure] = {structure.name: structure for structure in STRUCTURES}


def register_structure(structure: Structure) -> Structure:
    """Register a structure: a search that names it also chooses from its operators.

    Raises:
        InvalidInputError: The name is taken or malformed.
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
    """Remove a registered structure.

    Raises:
        InvalidInputError: There is none of that name.
    """
    structure_of(name)
    del _STRUCTURES[name]


def names() -> tuple[str, ...]:
    """The names of all structures, chains first."""
    return (KRONECKER, *sorted(_STRUCTURES, key=lambda name: _STRUCTURES[name].order))


def structure_of(name: str) -> Structure:
    """The structure of a name; chains are none.

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
    """The structure's name of a chain or of another operator.

    Example:
        >>> name_of(Chain.dense(4, 2))
        'ks'
    """
    return str(replacement).partition("(")[0] or KRONECKER


def parse(text: str) -> Replacement:
    """A chain, or the operator of another structure, from its text.

    Raises:
        InvalidInputError: There is no such structure, or it cannot parse the text.

    Example:
        >>> parse("(1,4,4,2)*(2,4,4,1)").nnz
        64
    """
    name = re.match(rf"\s*({_NAME})\(", text)
    return _chain(text) if name is None else structure_of(name[1]).parse(text.strip())


@functools.lru_cache(maxsize=2**14)
def _chain(text: str) -> Chain:
    """The chain of a text, cached: before each trial a search parses the chains of all trials."""
    return Chain.parse(text)


def operator_of(replacement: Replacement) -> StructuredOperator:
    """A chain as an operator; other operators are returned as they are."""
    return KroneckerOperator(replacement) if isinstance(replacement, Chain) else replacement
