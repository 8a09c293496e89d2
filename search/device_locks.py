"""File locks: exclusive use of a device, and liveness of the processes of a search.

They end with the process that holds them, even if it is killed (`ksopt.system.locks`).
"""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

import torch

from ksopt import settings
from ksopt.errors import UnavailableError
from ksopt.search import process_identity
from ksopt.system import ownership
from ksopt.system.locks import Lock, is_held

_WORKER = "worker-"
# The file of a process of another container, or boot, is the only evidence that it has ended.
_RETENTION_S = 86400.0


@contextmanager
def device(place: torch.device) -> Iterator[None]:
    """Exclusive use of a device of this machine: measurements on it never overlap.

    It covers all searches of one user on one machine, whatever numbers they use for its GPUs.
    """
    key = place.type
    if place.type == "cuda":
        key = f"cuda-{torch.cuda.get_device_properties(place).uuid}"
    with Lock(_folder() / f"{_host()}-{key}"):
        yield


class Presence:
    """Signal to other processes that this one is alive, until it ends.

    Attributes:
        host: Name of this machine.
        token: Unique name of this process.
    """

    def __init__(self) -> None:
        self.host = _host()
        self.token = process_identity.name(secrets.token_hex(4))
        _remove_ended()
        self._lock = Lock(_path(self.token))
        self._lock.acquire()

    def __enter__(self) -> Presence:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release(remove=True)


def is_gone(host: str, token: str) -> bool | None:
    """Whether the process of a `Presence` has ended; None if that is unknown on this machine."""
    if host != _host():
        return None
    try:
        return not is_held(_path(token))
    except FileNotFoundError:
        # It ended, or has its cache elsewhere; or only its search has ended.
        return True if process_identity.has_ended(token) else None


def _path(token: str) -> Path:
    return _folder() / f"{_WORKER}{token}"


def _remove_ended() -> None:
    """Remove the files of killed processes, unless another process may still need them."""
    for path in _folder().glob(f"{_WORKER}*"):
        with suppress(OSError):  # another process is about to remove it, too
            ended = process_identity.has_ended(path.name.removeprefix(_WORKER))
            old = time.time() - path.stat().st_mtime > _RETENTION_S
            if ended or (old and not is_held(path)):
                path.unlink()


def _folder() -> Path:
    """The folder of the locks: in the cache, or, if that is unusable, with temporary files.

    Raises:
        UnavailableError: Neither can be written, or others could write there.
    """
    own = settings.cache_dir()
    beside = Path(tempfile.gettempdir()) / f"ksopt-locks-{os.getuid()}"
    problems = []
    for folder, outermost in ((own / "locks", own), (beside, beside)):
        try:
            ownership.make_folder(folder, outermost)
        except OSError as error:
            problems.append(str(error))
        else:
            return folder
    raise UnavailableError(
        f"there is no folder for the locks of a search ({'; '.join(problems)}): set "
        "KSOPT_CACHE_DIR to a folder that only you can write to"
    )


def _host() -> str:
    return socket.gethostname()
