"""A journal file that several processes write: told from other files, locked, mended.

Optuna's own locks are files that a killed process leaves behind; writers then wait 30 s.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

from ksopt.system.locks import Lock

SHARED = 0o666
"""Locks of a storage: as open as the umask makes the storage itself, which a group may share."""
_LONGEST_ENTRY = 2**20


def check(path: Path) -> None:
    """Refuse a file that is no journal: Optuna would write behind what is in it.

    Raises:
        ValueError: It begins with something else than an entry of a journal.
    """
    try:
        with path.open("rb") as file:
            line = file.readline(_LONGEST_ENTRY)
    except FileNotFoundError:
        return
    begin = b'{"op_code":'
    if not (begin.startswith(line) or line.startswith(begin)):
        raise ValueError(f"the file {path} is there, and is no journal of Optuna's")


class JournalLock:
    """Excludes the other writers of a journal file.

    Args:
        path: The journal.
        made: Takes the lock's file, if this makes it.
    """

    def __init__(self, path: str, made: list[Path]) -> None:
        self._journal = Path(path)
        self._made = made
        self._lock = Lock(Path(f"{path}.lock"), mode=SHARED)
        self._threads = threading.Lock()

    def acquire(self) -> bool:
        """Wait for it."""
        self._threads.acquire()
        try:
            self._lock.acquire()
        except BaseException:
            self._threads.release()
            raise
        _cut_half_a_line(self._journal)
        if self._lock.created and self._lock.path not in self._made:
            self._made.append(self._lock.path)
        return True

    def release(self) -> None:
        """Give it back."""
        self._lock.release()
        self._threads.release()


def _cut_half_a_line(journal: Path) -> None:
    """Remove what a writer that was killed, or had no more room, left of its last line.

    What is appended to it would be lost, and all that comes after cannot be read. The caller is the
    only writer; readers leave half a line out.
    """
    with suppress(FileNotFoundError), journal.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        if end == 0:
            return
        file.seek(end - 1)
        if file.read(1) != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
