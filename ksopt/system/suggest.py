"""Suggestions for misspelled words."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str:
    """A question for the end of an error message, with the nearest known word; empty if none is.

    Example:
        >>> nearest("flaot16", ["float16", "float32"])
        "; did you mean 'float16'?"
        >>> nearest("toaster", ["float16", "float32"])
        ''
    """
    close = difflib.get_close_matches(str(word).strip(), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
