"""Errors of writing a study: a full disk, a limit of file sizes, a lost server.

They can occur at any trial. Earlier measurements are preserved, so the same command resumes the
search; the message has to state the cause.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from optuna.exceptions import StorageInternalError
from sqlalchemy.exc import SQLAlchemyError

from ksopt.errors import KsoptError
from ksopt.search.storage_url import without_password, without_secrets

# Errors of the operating system that prevent writing.
_NO_MORE = (errno.EFBIG, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES)
# A write of SQLite, and a page of its journal: if less is left, the limit is the cause.
_SMALLEST = 2**16


class UnwritableError(KsoptError, RuntimeError):
    """A study could not be written; earlier measurements are preserved."""


@contextmanager
def in_words(url: str, file: Path | None) -> Iterator[None]:
    """Context that turns errors of a storage into a sentence.

    Args:
        url: The storage's.
        file: The file of the study; None for a server.

    Raises:
        UnwritableError: It can no longer be used; the sentence states why, and what to do.
    """
    try:
        yield
    except (StorageInternalError, SQLAlchemyError, OSError) as error:
        if isinstance(error, KsoptError) or (
            isinstance(error, OSError) and error.errno not in _NO_MORE
        ):
            raise
        if file is None:
            what, why = f"the storage {without_password(url)!r}", _words(error)
            why = f"{without_secrets(why, url)}: once it works again, "
        else:
            what, why = f"the study at {file}", _why(file, error)
        raise UnwritableError(
            f"{what} cannot be written: {why}run the same command again (what was measured before "
            "is kept)"
        ) from error


def _why(file: Path, error: BaseException) -> str:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    number = error.errno if isinstance(error, OSError) else None
    size = max((_size(place) for place in (file, Path(f"{file}-journal"))), default=0)
    if number == errno.EFBIG or (
        number is None and limit != resource.RLIM_INFINITY and size + _SMALLEST > limit
    ):
        return (
            f"no file may be larger than {limit:,} bytes here (ulimit -f). Raise that limit, then "
        )
    if number in (errno.ENOSPC, errno.EDQUOT) or (number is None and _is_full(file.parent)):
        full = "your quota is used up" if number == errno.EDQUOT else "the disk is full"
        return f"{full}. Make room, then "
    if number in (errno.EROFS, errno.EACCES) or not os.access(file, os.W_OK):
        return "it is read-only now. Make it writable, then "
    return f"{_words(error)}. Once that is mended, "


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _is_full(folder: Path) -> bool:
    try:
        status = os.statvfs(folder)
    except OSError:
        return False
    return status.f_bavail * status.f_frsize < _SMALLEST


def _words(error: BaseException) -> str:
    """The message of the database, without Optuna's."""
    innermost = error
    while isinstance(innermost, StorageInternalError) and innermost.__cause__ is not None:
        innermost = innermost.__cause__
    innermost = getattr(innermost, "orig", None) or innermost
    if isinstance(innermost, OSError) and innermost.strerror:
        return innermost.strerror
    return (str(innermost).splitlines() or [type(innermost).__name__])[0]
