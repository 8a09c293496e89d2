"""Locks that end with the process that holds them, even if it is killed.

They are locks of the operating system on files (flock): nothing has to be cleaned up after a
process that ended in any way.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch

from ksopt import settings


@contextmanager
def held(path: Path) -> Iterator[None]:
    """The lock of a file, waited for."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def device(place: torch.device) -> Iterator[None]:
    """A device of this machine, alone: measurements on it never overlap.

    It holds for all searches of one user on one machine, whatever numbers they give its GPUs.
    """
    key = place.type
    if place.type == "cuda":
        key = f"cuda-{torch.cuda.get_device_properties(place).uuid}"
    with held(_folder() / f"{_host()}-{key}"):
        yield


class Presence:
    """Says to other processes that this one is alive, until it ends.

    Attributes:
        host: Name of this machine.
        token: Names this process, uniquely.
    """

    def __init__(self) -> None:
        self.host = _host()
        self.token = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._path = _path(self.token)
        self._file = self._path.open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __enter__(self) -> Presence:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._path.unlink(missing_ok=True)
        self._file.close()


def is_gone(host: str, token: str) -> bool | None:
    """Whether the process of a `Presence` has ended; None if that cannot be seen from here."""
    if host != _host():
        return None
    try:
        with _path(token).open("r") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return None  # it ended well, or keeps its cache elsewhere
    except BlockingIOError:
        return False
    return True


def _path(token: str) -> Path:
    return _folder() / f"worker-{token}"


def _folder() -> Path:
    folder = settings.cache_dir() / "locks"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def _host() -> str:
    return socket.gethostname()
