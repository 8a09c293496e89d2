"""Temporary files and folders, with the removal of those that killed processes left behind.

The process that fills a temporary file or folder locks it, and the lock ends with the process,
however it ends. Creating another one of the same prefix in the same place removes those that no
process holds. Names end in random letters and ``.partial``, which is unlikely in a user's own
files; no other file is touched.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ksopt.system import locks

_SUFFIX = ".partial"
_LETTERS = "[a-z0-9_]{8}"  # those of tempfile
_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@contextlib.contextmanager
def new_file(folder: Path, prefix: str) -> Iterator[tuple[int, Path]]:
    """A new, empty file in a folder, private to the user; it is removed at the end unless renamed.

    Yields:
        A descriptor, which is closed at the end, and the file's path.

    Raises:
        OSError: It cannot be created.
    """
    sweep(folder, prefix)
    while True:
        descriptor, name = tempfile.mkstemp(_SUFFIX, prefix, folder)
        if _hold(descriptor, name):
            break
        os.close(descriptor)
    try:
        yield descriptor, Path(name)
    finally:
        with contextlib.suppress(FileNotFoundError):
            Path(name).unlink()
        os.close(descriptor)


@contextlib.contextmanager
def new_folder(folder: Path, prefix: str) -> Iterator[Path]:
    """A new folder in a folder, private to the user; it is removed at the end unless renamed.

    Raises:
        OSError: It cannot be created.
    """
    sweep(folder, prefix)
    while True:
        name = tempfile.mkdtemp(_SUFFIX, prefix, folder)
        try:
            descriptor = os.open(name, _OPEN)
        except FileNotFoundError:  # another process swept it as abandoned
            continue
        if _hold(descriptor, name):
            break
        os.close(descriptor)
    try:
        yield Path(name)
    finally:
        shutil.rmtree(name, ignore_errors=True)
        os.close(descriptor)


def sweep(folder: Path, prefix: str) -> None:
    """Remove the files and folders of a prefix whose processes have ended.

    Only entries that `new_file` and `new_folder` named, this user owns and no process holds are
    removed. A folder that cannot be read, and entries that cannot be removed, stay unchanged.
    """
    pattern = re.compile(re.escape(prefix) + _LETTERS + re.escape(_SUFFIX))
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if pattern.fullmatch(entry.name):
                with contextlib.suppress(OSError):  # held, gone, or not ours to remove
                    _remove_if_left(entry.path)


def _remove_if_left(path: str) -> None:
    if not locks.EXIST:  # then only the creator removes an entry
        return
    descriptor = os.open(path, _OPEN)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            return
        locks.lock_open_file(descriptor, Path(path))
        if stat.S_ISDIR(status.st_mode):
            shutil.rmtree(path)
        elif stat.S_ISREG(status.st_mode):
            Path(path).unlink()
    finally:
        os.close(descriptor)


def _hold(descriptor: int, name: str) -> bool:
    """Lock a new entry; False if another process swept it as abandoned before."""
    if not locks.EXIST:
        return True
    try:
        locks.lock_open_file(descriptor, Path(name))
    except locks.Busy:  # another process is about to remove it
        return False
    except OSError:
        return True  # a file system without locks: no process can sweep it
    try:
        return os.path.samestat(os.fstat(descriptor), Path(name).lstat())
    except FileNotFoundError:
        return False
