"""Files that others wrote, read with suspicion: whatever is wrong with one is a sentence."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ksopt.errors import InvalidInputError

MOST_BYTES = 64 * 2**20
"""More than any plan or config has; the file that is read by mistake, or has no end, is larger."""

MALFORMED = (
    *(LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError),
    *(AssertionError, NotImplementedError),
)
"""What code that reads a value of the wrong form raises: a key that lacks, a text for a number."""


def is_file(path: Path) -> bool:
    """As `Path.is_file`, which raises for a name that no file can have, such as a long one."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def is_folder(path: Path) -> bool:
    """As `Path.is_dir`, for any name."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def text(path: Path, what: str) -> str:
    """The text of a file.

    Args:
        path: The file.
        what: It is, for the message: ``the plan``.

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
    """The value of a file of JSON; the errors are those of `text`, and that it is not JSON."""
    return parsed(text(path, what), f"{what} {path}")


def parsed(content: str, what: str) -> Any:
    """The value of a text of JSON.

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
    """What a value of another form makes its reader raise, as a sentence.

    Args:
        what: Is read, such as ``the file x.json``.
        form: It should have, as a sentence's end.

    Raises:
        InvalidInputError: In place of what code raises that looks for something that is not there.
    """
    try:
        yield
    except InvalidInputError:
        raise
    except MALFORMED as error:
        raise InvalidInputError(f"{what}: {form} ({type(error).__name__}: {error})") from None


def reason(error: Exception) -> str:
    """An error in a few words: the system's own, where it is the system's."""
    return str(getattr(error, "strerror", None) or error or type(error).__name__)
