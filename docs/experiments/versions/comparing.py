"""The differences between two documents, and the deliberate ones among them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_ROUNDING = 1e-6
_SHOWN = 160


class _Nothing:
    def __repr__(self) -> str:
        return "nothing"


NOTHING = _Nothing()
"""A placeholder where a document has no such key or list entry."""


@dataclass(frozen=True)
class Difference:
    """The values of two documents at one place.

    Attributes:
        path: the keys of the place.
        before, now: the values; `NOTHING` for none.
    """

    path: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.path}: {_short(self.before)} -> {_short(self.now)}"


@dataclass(frozen=True)
class Deliberate:
    """A kind of deliberate differences.

    Attributes:
        command: the command of their cases.
        place: a regular expression that matches their whole paths.
        change: a regular expression that occurs in "before -> now".
        reason: the reason, and the commit.
        title: the title of their only case; empty for all cases of the command.
        at_most: the largest change of a number, as a share of the larger one; None for any.
        but_for: a regular expression: without what it matches both sides are equal; empty for any.
    """

    command: str
    place: str
    change: str
    reason: str
    title: str = ""
    at_most: float | None = None
    but_for: str = ""

    def covers(self, command: str, one: Difference, title: str = "") -> bool:
        """Whether a difference, in the case of a title, is of this kind."""
        change = f"{one.before!r} -> {one.now!r}"
        return (
            command == self.command
            and (not self.title or title == self.title)
            and re.fullmatch(self.place, one.path) is not None
            and re.search(self.change, change) is not None
            and (self.at_most is None or _are_near(one, self.at_most))
            and (not self.but_for or _are_equal_but_for(one, self.but_for))
        )


def _are_near(one: Difference, share: float) -> bool:
    sides = (one.before, one.now)
    are_numbers = all(isinstance(each, (int, float)) for each in sides)
    return are_numbers and math.isclose(*sides, rel_tol=share)


def _are_equal_but_for(one: Difference, pattern: str) -> bool:
    before, now = (re.sub(pattern, "", str(each)) for each in (one.before, one.now))
    return before == now


def differences(before: Any, now: Any, path: str = "") -> Iterator[Difference]:
    """The differences of two documents; numbers that are equal to rounding are equal.

    A key that only the later document has is no difference, as keys may be added.

    Example:
        >>> before = {"chain": "(1,8,8,1)", "us": 27.904000000000035, "old": 1}
        >>> now = {"chain": "(1,8,4,1)", "us": 27.904, "new": 1}
        >>> [str(one) for one in differences(before, now)]
        ["chain: '(1,8,8,1)' -> '(1,8,4,1)'", 'old: 1 -> nothing']
        >>> [str(one) for one in differences([1, 2], [1, 2, 3], "trials")]
        ['trials/2: nothing -> 3']
    """
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key, value in before.items():
            yield from differences(value, now.get(key, NOTHING), f"{path}/{key}".lstrip("/"))
    elif isinstance(before, list) and isinstance(now, list):
        for at in range(max(len(before), len(now))):
            one, other = (side[at] if at < len(side) else NOTHING for side in (before, now))
            yield from differences(one, other, f"{path}/{at}")
    elif not _are_equal(before, now):
        yield Difference(path, before, now)


def _are_equal(before: Any, now: Any) -> bool:
    if isinstance(before, float) and isinstance(now, (int, float)):
        both_nan = math.isnan(before) and math.isnan(now)
        return both_nan or math.isclose(before, now, rel_tol=_ROUNDING)
    # bool counts as no number here.
    return type(before) is type(now) and bool(before == now)


def sorted_out(
    command: str, differing: Sequence[Difference], kinds: Sequence[Deliberate], title: str = ""
) -> tuple[list[Difference], dict[Deliberate, list[Difference]]]:
    """The differences that no kind covers, and the others by kind."""
    unexpected: list[Difference] = []
    deliberate: dict[Deliberate, list[Difference]] = {}
    for one in differing:
        kind = next((kind for kind in kinds if kind.covers(command, one, title)), None)
        if kind is None:
            unexpected.append(one)
        else:
            deliberate.setdefault(kind, []).append(one)
    return unexpected, deliberate


def counted(document: Mapping[str, Any]) -> str:
    """The parts of a document with their numbers of entries.

    Example:
        >>> counted({"plan": {"rules": 2}, "trials": {"8x8": [1, 2], "8x4": [3]}, "code": 0})
        'plan (1), trials (3), code'
    """
    return ", ".join(f"{name}{_entries(part)}" for name, part in document.items())


def _entries(part: Any) -> str:
    if isinstance(part, Mapping) and part and all(isinstance(one, list) for one in part.values()):
        return f" ({sum(map(len, part.values()))})"
    return f" ({len(part)})" if isinstance(part, (Mapping, list)) else ""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
