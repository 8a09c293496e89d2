"""Readers of files that others wrote: every malformed file raises one sentence."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ksopt.errors import InvalidInputError

MOST_BYTES = 64 * 2**20
"""The size limit: larger than any plan or config, smaller than a wrong or endless file."""

MALFORMED = (
    *(LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError),
    *(AssertionError, NotImplementedError),
)
"""The exceptions of code that reads a malformed value: a missing key, a text for a number."""


def is_file(path: Path) -> bool:
    """`Path.is_file` that returns False for invalid names, such as a name that is too long."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def is_folder(path: Path) -> bool:
    """`Path.is_dir` that returns False for invalid names."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def text(path: Path, what: str) -> str:
    """The text of a file.

    Args:
        path: The file.
        what: The kind of file, for the message: ``the plan``.

    Raises:
        InvalidInputError: It cannot be read, is no text, or is too large.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except (OSError, ValueError, RuntimeError) as error:  # no such file; NUL in its name; a loop
        raise InvalidInputError(f"{what} {path} cannot be read: {reason(error)}") from None
    if len(data) > MOST_BYTES:
        raise InvalidInputError(
            f"{what} {path} cannot be read: it is larger than {MOST_BYTES // 2**20} MB"
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInputError(
            f"{what} {path} cannot be read: it is no text in UTF-8 (byte {error.start})"
        ) from None


def json_of(path: Path, what: str) -> Any:
    """The value of a JSON file; raises as `text` and `parsed`."""
    return parsed(text(path, what), f"{what} {path}")


def parsed(content: str, what: str) -> Any:
    """The value of a JSON text.

    Raises:
        InvalidInputError: It is not JSON, or nested deeper than a reader can follow.
    """
    try:
        return json.loads(content)
    except RecursionError:
        raise InvalidInputError(f"{what} is not JSON that can be read: nested too deeply") from None
    except ValueError as error:
        raise InvalidInputError(f"{what} is not JSON: {error}") from None


@contextmanager
def of_its_form(what: str, form: str) -> Iterator[None]:
    """Turn the exceptions of reading a malformed value into one sentence.

    Args:
        what: The value, such as ``the file x.json``.
        form: The expected form, as the end of a sentence.

    Raises:
        InvalidInputError: The block raised one of `MALFORMED`.
    """
    try:
        yield
    except InvalidInputError:
        raise
    except MALFORMED as error:
        raise InvalidInputError(f"{what}: {form} ({type(error).__name__}: {error})") from None


def reason(error: Exception) -> str:
    """An error in a few words: the system's text if it has one."""
    return str(getattr(error, "strerror", None) or error or type(error).__name__)
