"""Allowed b and c of a search: a list, a range, or multiples."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ksopt.errors import InvalidInputError

_SIZE = r"[1-9][0-9]{0,8}"
_LIST = re.compile(rf"{_SIZE}(,{_SIZE})*")
_RANGE = re.compile(rf"({_SIZE})-({_SIZE})")
_MULTIPLE = re.compile(rf"multiple:({_SIZE})")
_LARGEST = 10**9


@dataclass(frozen=True)
class BlockSizes:
    """The allowed sizes of every b and c.

    Args:
        least: The smallest.
        most: The largest.
        step: All are multiples of it.
        listed: The only sizes, in rising order; empty if there is no list.
    """

    least: int = 1
    most: int = _LARGEST
    step: int = 1
    listed: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> BlockSizes:
        """Parse a list ``16,32,64``, a range ``16-256`` with its ends, or ``multiple:16``.

        Raises:
            InvalidInputError: The text has another form, or the range is empty.

        Example:
            >>> [n for n in range(1, 100) if BlockSizes.parse("multiple:16").holds(n)]
            [16, 32, 48, 64, 80, 96]
            >>> BlockSizes.parse("big")
            Traceback (most recent call last):
            ksopt.errors.InvalidInputError: block_sizes 'big': write the b and c that are allowed \
as a list (16,32,64), a range (16-256) or multiples (multiple:16)
        """
        plain = re.sub(r"\s", "", text) if isinstance(text, str) else ""
        if _LIST.fullmatch(plain):
            listed = tuple(sorted({int(size) for size in plain.split(",")}))
            return cls(listed[0], listed[-1], listed=listed)
        if match := _RANGE.fullmatch(plain):
            least, most = int(match[1]), int(match[2])
            if least > most:
                raise InvalidInputError(
                    f"block_sizes {text!r}: the range is empty; write the smaller size first, "
                    f"{most}-{least}"
                )
            return cls(least, most)
        if match := _MULTIPLE.fullmatch(plain):
            return cls(step=int(match[1]))
        raise InvalidInputError(
            f"block_sizes {text!r}: write the b and c that are allowed as a list (16,32,64), "
            "a range (16-256) or multiples (multiple:16)"
        )

    def __str__(self) -> str:
        """The text form, see `parse`."""
        if self.listed:
            return ",".join(map(str, self.listed))
        return f"{self.least}-{self.most}" if self.most < _LARGEST else f"multiple:{self.step}"

    @property
    def words(self) -> str:
        """The sizes as a phrase.

        Example:
            >>> BlockSizes.parse("64,16").words, BlockSizes.parse("multiple:16").words
            ('16 or 64', 'a multiple of 16')
        """
        if self.listed:
            *others, last = map(str, self.listed)
            return f"{', '.join(others)} or {last}" if others else last
        return f"a multiple of {self.step}" if self.step > 1 else f"{self.least} to {self.most}"

    def holds(self, size: int) -> bool:
        """Whether a size is allowed."""
        return (
            self.least <= size <= self.most
            and size % self.step == 0
            and (not self.listed or size in self.listed)
        )


ANY_SIZE = BlockSizes()
