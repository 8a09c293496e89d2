"""The chain of a layer, from its patterns or from the name of a family."""

from __future__ import annotations

import re
from math import gcd

from ksopt.errors import InvalidInputError
from ksopt.patterns.chain import Chain

_NAMED = re.compile(r"\s*([a-z_]+)\s*(?::\s*([0-9]{1,9})\s*)?")
_NUMBERED = {"monarch": "blocks", "low_rank": "rank", "block_butterfly": "block"}
_NAMES = (*_NUMBERED, "dense", "square_dyadic", "kaleidoscope")
_BLOCKS = 4


def is_named(text: str) -> bool:
    """Whether a text names a family instead of patterns.

    Example:
        >>> is_named("monarch"), is_named("low_rank:64"), is_named("(1,4,4,1)")
        (True, True, False)
    """
    return _NAMED.fullmatch(text) is not None


def chain_of(text: str, in_features: int, out_features: int) -> Chain:
    """The chain of a text for a layer.

    Args:
        text: Patterns, as `Chain.parse` takes them, or the name of a family of the paper, with a
            number if it needs one: "monarch:8" (blocks), "low_rank:64" (rank),
            "block_butterfly:96" (block), "dense", "square_dyadic", "kaleidoscope". "monarch" alone
            has 4 blocks, or as many of the nearest number that divides both sizes.
        in_features: Of the layer.
        out_features: Of the layer.

    Raises:
        InvalidInputError: There is no such family, it has no chain of that size, or the text
            contains neither patterns nor a name.

    Example:
        >>> print(chain_of("monarch", 384, 1536))
        (1,384,96,4)*(4,96,96,1)
        >>> print(chain_of("low_rank:64", 384, 1536))
        (1,1536,64,1)*(1,64,384,1)
    """
    named = _NAMED.fullmatch(text)
    if named is None:
        return Chain.parse(text)
    name, number = named[1], None if named[2] is None else int(named[2])
    if name not in _NAMES:
        raise InvalidInputError(
            f"{text!r} is neither patterns, such as (1,384,96,4)*(4,96,96,1), nor one of "
            f"{', '.join(_NAMES)}"
        )
    if name == "monarch" and number is None:
        number = _usual_blocks(in_features, out_features)
    if (number is None) == (name in _NUMBERED):
        hint = f"{name} has no number: leave it out"
        if name in _NUMBERED:
            hint = f"give its {_NUMBERED[name]}: {name}:64"
        raise InvalidInputError(f"{text!r}: {hint}")
    sizes = [in_features, out_features]
    if name not in ("dense", "monarch", "low_rank"):
        if in_features != out_features:
            raise InvalidInputError(
                f"{text!r}: {name} is for square layers, and this one has "
                f"in_features={in_features} and out_features={out_features}"
            )
        sizes = [in_features]
    chain: Chain
    try:
        chain = getattr(Chain, name)(*sizes, *([] if number is None else [number]))
    except InvalidInputError as error:
        _, _, reason = str(error).partition(": ")  # before it is the call, in Python
        raise InvalidInputError(
            f"{text!r} is no chain for in_features={in_features} and "
            f"out_features={out_features}: {reason}"
        ) from None
    return chain


def _usual_blocks(in_features: int, out_features: int) -> int:
    common = gcd(in_features, out_features)
    divisors = [number for number in range(2, min(common, 64) + 1) if common % number == 0]
    return min(divisors, key=lambda number: abs(number - _BLOCKS), default=1)
