"""Lists of known words, and suggestions for misspelled ones."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from ksopt.errors import InvalidInputError


def nearest(word: str, known: Iterable[str], prefix: str = "") -> str:
    """A question for the end of an error message, with the nearest known word; empty if none is.

    Args:
        word: The unknown word.
        known: The known words; those without the prefix are not suggested.
        prefix: The beginning of all words, which makes none of them nearer.

    Example:
        >>> nearest("flaot16", ["float16", "float32"])
        "; did you mean 'float16'?"
        >>> nearest("toaster", ["float16", "float32"])
        ''
        >>> nearest("--out", ["--quiet", "--svg"], prefix="--")
        ''
    """
    ends = [one.removeprefix(prefix) for one in known if one.startswith(prefix)]
    close = difflib.get_close_matches(str(word).strip().removeprefix(prefix), ends, n=1)
    return f"; did you mean {prefix + close[0]!r}?" if close else ""


def known_words(option: str, text: str, allowed: Sequence[str]) -> tuple[str, ...]:
    """The words of a text with commas between them, each once.

    Args:
        option: The option's name, for the error message.
        text: Its value.
        allowed: The known words.

    Raises:
        InvalidInputError: A word is unknown.

    Example:
        >>> known_words("--passes", "step,forward,step", ["forward", "step"])
        ('step', 'forward')
    """
    words = tuple(dict.fromkeys(text.split(",")))
    for word in words:
        if word not in allowed:
            raise InvalidInputError(
                f"{option} {text}: {word!r} is unknown, it must be of {', '.join(allowed)}"
                f"{nearest(word, allowed)}"
            )
    return words
