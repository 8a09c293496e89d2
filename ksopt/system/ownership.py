"""Checks that no other user could have written a file that this process trusts.

The contents of the cache are executed, or select the code that is. A path is trusted if only this
user and root could change its contents: every folder from the root down, every symbolic link on the
way and the file itself belong to one of the two, and no one else may write to any of them. A folder
that everybody may write to counts as safe if it is sticky, as /tmp is, because only the owner of an
entry can replace it; ksopt's own folders must not be writable by others at all.

The walk goes from the root downwards, so there is no race: another user can no longer change a
checked part of the path, and the path may be opened by name afterwards.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from ksopt.system import temporary_files

_MOST_LINKS = 40  # as many as Linux follows in a path
_STICKY = stat.S_ISVTX


class Distrusted(OSError):
    """Another user could have changed the contents of a path; the text names the cause."""

    def __str__(self) -> str:
        return str(self.args[0])


def check(
    path: Path,
    own: Path | None = None,
    *,
    lstat: Callable[[Path], os.stat_result] = os.lstat,
    readlink: Callable[[Path], str] = os.readlink,
    user: int | None = None,
) -> None:
    """Check that only this user and root could have changed the contents of ``path``.

    Args:
        path: A file or folder; parts that do not exist are skipped.
        own: From this folder on, nothing may be open to others, sticky or not. None: the path.
        lstat, readlink: Of a file system; tests simulate one.
        user: The user of this process; None for the system's answer.

    Raises:
        Distrusted: Another user could have changed it.
        OSError: It cannot be examined.
    """
    if user is None:
        if not hasattr(os, "getuid"):  # no owners on this system
            return
        user = os.getuid()
    path = path.absolute()
    own = path if own is None else own.absolute()
    links = 0
    here = Path("/")  # the root belongs to the system's owner
    ahead = list(path.parts[1:])
    # Parts that remain once `own` is entered; links above it do not count.
    within_own = len(path.parts) - len(own.parts)
    while ahead:
        here = here.parent if ahead[0] == ".." else here / ahead[0]
        del ahead[0]
        try:
            status = lstat(here)
        except (FileNotFoundError, NotADirectoryError):
            return  # nothing exists to be trusted
        if status.st_uid not in (user, 0):
            raise Distrusted(f"{here} belongs to another user")
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(here))
            target = Path(readlink(here))
            here = Path("/") if target.is_absolute() else here.parent
            ahead[:0] = target.parts[1:] if target.is_absolute() else target.parts
            continue
        closed = len(ahead) <= within_own  # the cache's own folder, or in it
        if _others_may_write(status, user) and (closed or not status.st_mode & _STICKY):
            raise Distrusted(f"{here} is writable by other users")


def _others_may_write(status: os.stat_result, user: int) -> bool:
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_private_group(status.st_gid, user)


@cache
def _is_private_group(group: int, user: int) -> bool:
    """Whether this user is the only member of a group, or the group is root's.

    Many systems give each user a group of the same name, and a umask that lets it write.
    """
    if group == 0:
        return True
    try:
        import grp
        import pwd

        entry, name = grp.getgrgid(group), pwd.getpwuid(user).pw_name
    except (ImportError, KeyError):
        return False
    return entry.gr_name == name and set(entry.gr_mem) <= {name}


def make_folder(folder: Path, own: Path) -> None:
    """Create a folder and its missing parents, private to the user, and check that it is trusted.

    Args:
        folder: ``own`` or a folder below it.
        own: See `check`.

    Raises:
        Distrusted: Another user could change its contents.
        OSError: It cannot be created.
    """
    check(folder, own)  # nothing is created in another user's folder
    missing = []
    for place in (folder, *folder.parents):
        if os.path.lexists(place):
            break
        missing.append(place)
    for place in reversed(missing):
        place.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)  # a file in its place is an error
    check(folder, own)


def read_bytes(path: Path, own: Path) -> bytes:
    """The content of a file that only this user and root could have written.

    Args:
        path: The file.
        own: See `check`.

    Raises:
        Distrusted: Another user could have written it.
        OSError: It cannot be read.
    """
    check(path, own)
    # The path is checked. The opened file is checked once more, without following a link or waiting
    # for a FIFO.
    flags = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    with os.fdopen(os.open(path, flags), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if hasattr(os, "getuid") and status.st_uid not in (os.getuid(), 0):
            raise Distrusted(f"{path} belongs to another user")
        return file.read()


@contextmanager
def temporary_folder(prefix: str) -> Iterator[str]:
    """A new folder for temporary files that no other user can write to.

    Folders that killed processes left are removed.

    Raises:
        Distrusted: Another user controls the system's folder for temporary files.
        OSError: It cannot be created.
    """
    with temporary_files.new_folder(Path(tempfile.gettempdir()), prefix) as folder:
        check(folder)
        yield str(folder)
