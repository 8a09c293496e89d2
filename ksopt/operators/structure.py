"""A kind of structured operator: its name, the parser of its texts, and its candidates."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ksopt.errors import InvalidInputError
from ksopt.operators.base import StructuredOperator
from ksopt.patterns.size import Dims


@dataclass(frozen=True)
class Structure:
    """A kind of structured operator.

    Args:
        name: Its name in a request, such as ``low-rank``; the texts of its operators are
            ``NAME(...)``.
        parse: (text) -> its operator; raises `InvalidInputError`.
        candidates: (in_features, out_features) -> the operators that a search chooses from.
        order: Its place in lists; of one order the first that was registered comes first.
    """

    name: str
    parse: Callable[[str], StructuredOperator]
    candidates: Callable[[int, int], Iterable[StructuredOperator]]
    order: int = 100


def fields_of(text: str, form: str) -> tuple[Dims, tuple[int, ...]]:
    """The size of the layer and the numbers in an operator's text of a form.

    Raises:
        InvalidInputError: The text has another form.

    Example:
        >>> fields_of("low-rank(768x3072,64)", "low-rank(INxOUT,RANK)")
        (Dims(in_features=768, out_features=3072), (64,))
    """
    name, _, words = form.rstrip(")").partition("(")
    numbers = len(words.split(",")) - 1
    number = r"\s*,\s*([0-9]{1,9})\s*"
    match = re.fullmatch(rf"{name}\(([^,()]+){number * numbers}\)", text)
    if match is None:
        raise InvalidInputError(f"{text!r}: write {form}")
    return Dims.parse(match[1]), tuple(map(int, match.groups()[1:]))
