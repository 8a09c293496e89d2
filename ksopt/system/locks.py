"""File locks that a process holds and that end with it, however it ends.

A lock is the operating system's (flock) on a file that is opened without following a symbolic link
and without truncation: the target of a planted link and the contents of the file do not change. A
killed process leaves nothing to clean up.

filelock, which torch installs, is not used: it polls where a lock here waits in the kernel (a wait
with a limit polls here as well), waits forever in a folder that takes no file (/proc; seen with
4.2.11), creates folders, and truncated the file up to 3.29.7, while torch requires no version of
it. Two locks here need more: one is on a file of data, and one checks whether a lock is held
without creating its file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # on Windows, where ksopt can still be imported
    fcntl = None  # type: ignore[assignment]

EXIST = fcntl is not None
"""Whether this system has file locks."""

_POLL_S = 0.02


class Busy(OSError):
    """Another process holds the lock."""


NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
"""Error numbers of a file system without locks; its files can still be written."""


class Lock:
    """A lock held from `acquire` to `release`; a ``with`` statement calls both.

    Args:
        path: Its file, created private to the user if it does not exist.
        wait_s: Seconds to wait for another holder; None for no limit.
        mode: Permissions of a file that is created.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "one.lock"
        >>> with Lock(path):
        ...     is_held(path)
        True
        >>> is_held(path)
        False
    """

    def __init__(self, path: Path, wait_s: float | None = None, mode: int = 0o600) -> None:
        self.path = path
        self.wait_s = wait_s
        self.mode = mode
        self.created = False
        """Whether this lock created the file."""
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Wait for the lock and take it.

        Raises:
            Busy: Another process still holds it when the time is up.
            OSError: The file cannot be opened, or is a symbolic link or no regular file.
        """
        end = None if self.wait_s is None else time.monotonic() + self.wait_s
        while True:
            descriptor = self._opened()
            try:
                _take(descriptor, end, self.path)
                # The last holder may have removed the file: the lock is then useless.
                if os.fstat(descriptor).st_nlink > 0:
                    self._descriptor = descriptor
                    return
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def release(self, remove: bool = False) -> None:
        """Release the lock; ``remove`` deletes its file while no other process can hold it."""
        assert self._descriptor is not None
        if remove:
            with contextlib.suppress(OSError):
                self.path.unlink()
        descriptor, self._descriptor = self._descriptor, None
        os.close(descriptor)

    def _opened(self) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        while True:
            try:
                descriptor = os.open(self.path, flags | os.O_CREAT | os.O_EXCL, self.mode)
                self.created = True
                break
            except FileExistsError:
                pass
            try:
                descriptor = os.open(self.path, flags)
                break
            except FileNotFoundError:  # removed between the two
                continue
        try:
            _check_regular(descriptor, self.path)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def __enter__(self) -> Lock:
        self.acquire()
        return self

    def __exit__(self, *raised: object) -> None:
        self.release()


def is_held(path: Path) -> bool:
    """Whether a process holds the lock of a file; the file is not created.

    Raises:
        FileNotFoundError: There is no such file.
        OSError: It cannot be opened, or is a symbolic link or no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        _check_regular(descriptor, path)
        _take(descriptor, time.monotonic(), path)
    except Busy:
        return True
    finally:
        os.close(descriptor)
    return False


def lock_open_file(descriptor: int, path: Path) -> None:
    """Lock an open file or folder until it is closed.

    Raises:
        Busy: Another process holds it.
    """
    _take(descriptor, time.monotonic(), path)


@contextlib.contextmanager
def held_if_possible(path: Path, wait_s: float | None = None) -> Iterator[OSError | None]:
    """Hold a lock if possible; otherwise continue without it and yield the error.

    For work that may run twice but should run once.
    """
    lock = Lock(path, wait_s)
    problem: OSError | None = None
    try:
        lock.acquire()
    except OSError as error:
        problem = error
    try:
        yield problem
    finally:
        if problem is None:
            lock.release()


def _take(descriptor: int, end: float | None, path: Path) -> None:
    if end is None:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= end:
                raise Busy(errno.EWOULDBLOCK, "another process holds it", str(path)) from None
        time.sleep(_POLL_S)


def _check_regular(descriptor: int, path: Path) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
