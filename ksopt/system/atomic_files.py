"""Files and folders that are written atomically."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ksopt.errors import InvalidInputError
from ksopt.system import temporary_files
from ksopt.system.untrusted import is_folder, reason


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a temporary file, then rename it: a reader sees the old file or the new one.

    Temporary files that killed processes left beside the file are removed.
    """
    with temporary_files.new_file(path.parent, f".{path.name}-") as (descriptor, beside):
        written = content if isinstance(content, bytes) else content.encode("utf-8")
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(written)
        # Temporary files are private; a file for readers is as open as its folder.
        beside.chmod(0o644)
        beside.replace(path)


def check_new_folder(path: Path) -> None:
    """Raise if a folder cannot be created because of an existing file or non-empty folder.

    Raises:
        InvalidInputError: The path exists and is not an empty folder.
    """
    if is_folder(path):
        if any(path.iterdir()):
            raise InvalidInputError(
                f"the folder {path} is not empty: give one that does not exist yet, so that "
                "nothing is overwritten"
            )
        return
    try:
        path.lstat()
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"the folder {path} cannot be made: {reason(error)}") from None
    raise InvalidInputError(f"{path} is not a folder: give one that does not exist yet")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder to fill, renamed to ``path`` at the end and removed on an error.

    Temporary folders that killed processes left beside it are removed.

    Raises:
        InvalidInputError: ``path`` exists and is not an empty folder, or cannot be created.
    """
    check_new_folder(path)
    path = path.absolute()
    missing = [place for place in path.parents if not os.path.lexists(place)]
    with ExitStack() as stack:
        stack.callback(remove_empty, missing)
        try:
            make_folder(path.parent)
            beside = stack.enter_context(temporary_files.new_folder(path.parent, f".{path.name}-"))
        except (OSError, ValueError) as error:
            raise InvalidInputError(f"the folder {path} cannot be made: {reason(error)}") from None
        yield beside
        # As for files: temporary folders are private, and so are some writers' files.
        for file in beside.iterdir():
            file.chmod(0o644)
        beside.chmod(0o755)
        beside.replace(path)


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents.

    Raises:
        OSError: The folder cannot be created.
        ValueError: No folder can have such a name.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except RecursionError:  # a thousand levels
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), str(path)) from None


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove folders, innermost first, up to the first that is not empty."""
    with suppress(OSError):
        for place in folders:
            place.rmdir()
