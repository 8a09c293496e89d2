"""Files and folders that appear whole or not at all."""

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
    """Write beside the file, then rename: a reader sees the old file or the new one.

    What a killed process left beside the file is removed.
    """
    with temporary_files.new_file(path.parent, f".{path.name}-") as (descriptor, beside):
        written = content if isinstance(content, bytes) else content.encode("utf-8")
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(written)
        # Temporary files are private; what is written for a reader is as open as its folder.
        beside.chmod(0o644)
        beside.replace(path)


def check_new_folder(path: Path) -> None:
    """Refuse a folder that cannot be made: there is a file, or a folder with something in it.

    Raises:
        InvalidInputError: It is there already and not an empty folder.
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
    """A folder to fill, which gets its name once it is full; on an error nothing is left of it.

    What a killed process left beside it is removed.

    Raises:
        InvalidInputError: ``path`` is there already and not an empty folder, or cannot be made.
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
        # As with files: temporary folders, and some who write files, keep them from others.
        for file in beside.iterdir():
            file.chmod(0o644)
        beside.chmod(0o755)
        beside.replace(path)


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, where they are not there yet.

    Raises:
        OSError: It cannot be made.
        ValueError: No folder can have such a name.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except RecursionError:  # a thousand levels
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), str(path)) from None


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove folders, innermost first, up to the first that holds something."""
    with suppress(OSError):
        for place in folders:
            place.rmdir()
