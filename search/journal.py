"""Journal file that several processes write: validation, locking, repair.

Optuna's own locks are files that a killed process leaves behind; writers then wait 30 s.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

from ksopt.system.locks import Lock

SHARED = 0o666
"""Mode of a storage's locks: restricted by the umask like the storage, which a group may share."""
_LONGEST_ENTRY = 2**20


def check(path: Path) -> None:
    """Reject a file that is no journal: Optuna would append to it.

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
        created: The list to which the lock's file is added if this creates it.
    """

    def __init__(self, path: str, created: list[Path]) -> None:
        self._journal = Path(path)
        self._created = created
        self._lock = Lock(Path(f"{path}.lock"), mode=SHARED)
        self._threads = threading.Lock()

    def acquire(self) -> bool:
        """Wait for the lock."""
        self._threads.acquire()
        try:
            self._lock.acquire()
        except BaseException:
            self._threads.release()
            raise
        _remove_incomplete_line(self._journal)
        if self._lock.created and self._lock.path not in self._created:
            self._created.append(self._lock.path)
        return True

    def release(self) -> None:
        """Release the lock."""
        self._lock.release()
        self._threads.release()


def _remove_incomplete_line(journal: Path) -> None:
    """Remove an incomplete last line, left by a writer that was killed or ran out of space.

    An entry appended to it would be lost, and everything behind it unreadable. The caller is the
    only writer; readers ignore an incomplete line.
    """
    with suppress(FileNotFoundError), journal.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        if end == 0:
            return
        file.seek(end - 1)
        if file.read(1) != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
