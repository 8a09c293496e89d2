"""The on-disk cache of compiled code: one folder per artifact, published atomically, verified.

Layout: ``<cache>/<ksopt version>/<arch>/<digest>/{<artifact>, key.json}``, private to the user.
``key.json`` records everything the artifact was built from and its checksum, so that a person can
see what a file is and a truncated or altered file is rebuilt instead of trusted. The checksum is no
defence against another user, who could write one too: nothing is read from a place that others
could have written to (`system.ownership`). A lock per artifact lets ten processes that want one
kernel compile it once. A cache that cannot be used (others', read-only, full) costs a rebuild per
process and one warning, never a failure.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ksopt import settings
from ksopt.system import locks, ownership, temporary_files

log = logging.getLogger("ksopt.jit")


@dataclass(frozen=True)
class ArtifactKey:
    """The key of an artifact: everything that it is built from.

    Attributes:
        arch: folder it belongs in, such as ``sm_90a`` or ``host-x86_64``.
        filename: name of the artifact, such as ``kernel.cubin``.
        parts: every input of the build by name: sources, flags, compiler version.
    """

    arch: str
    filename: str
    parts: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, arch: str, filename: str, parts: Mapping[str, str]) -> ArtifactKey:
        """Create a key from a mapping; the order of ``parts`` does not matter."""
        return cls(arch, filename, tuple(sorted(parts.items())))

    @property
    def digest(self) -> str:
        """Name of the artifact's folder: 32 hexadecimal digits of SHA-256 over all parts."""
        text = json.dumps([self.arch, self.filename, self.parts])
        return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Artifact:
    """A verified artifact: its bytes, and its file where the cache could hold it."""

    data: bytes
    path: Path | None


def store_root() -> Path:
    """Folder of this version's artifacts."""
    from ksopt import __version__

    return settings.cache_dir() / __version__


def get(key: ArtifactKey, build: Callable[[], bytes]) -> Artifact:
    """Return the cached artifact of ``key``, building and publishing it when needed.

    Args:
        key: everything the artifact depends on.
        build: returns the artifact's bytes; called at most once per cache and key, by however many
            processes, as long as the cache can be written.

    Raises:
        Whatever ``build`` raises. An unusable cache never raises: it warns once and builds.
    """
    folder = store_root() / key.arch / key.digest
    try:
        artifact = _load(folder, key)
        if artifact is not None:
            return artifact
        make_private(folder.parent)
        with _locked(folder.with_suffix(".lock")):
            artifact = _load(folder, key)
            if artifact is not None:
                return artifact
            data = _built(key, build)
            return Artifact(data, _publish(folder, key, data))
    except CacheUnusable as reason:
        warn_once(str(reason))
    return Artifact(_built(key, build), None)


def _built(key: ArtifactKey, build: Callable[[], bytes]) -> bytes:
    began = time.monotonic()
    data = build()
    log.info("compiled %s for %s in %.1f s", key.filename, key.arch, time.monotonic() - began)
    return data


def find(key: ArtifactKey) -> Artifact | None:
    """The cached artifact of ``key``, if there is a trusted one; nothing is built."""
    try:
        return _load(store_root() / key.arch / key.digest, key)
    except CacheUnusable as reason:
        warn_once(str(reason))
        return None


class CacheUnusable(Exception):
    """The cache cannot be read or written safely; the message states the reason."""


_warned: set[str] = set()


def warn_once(reason: str) -> None:
    """Warn that the cache cannot be used; the same reason once in a process."""
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(
            f"ksopt: the cache {settings.cache_dir()} cannot be used ({reason}); compiled code and "
            "measured choices are not stored, so every process makes them again. Set "
            "KSOPT_CACHE_DIR to a folder that only you can write to.",
            RuntimeWarning,
            stacklevel=3,
        )


def make_private(folder: Path) -> None:
    """Create a folder of the cache; refuse one that another user could write into.

    Raises:
        CacheUnusable: It cannot be created, or another user could.
    """
    try:
        ownership.make_folder(folder, own=settings.cache_dir())
    except OSError as error:
        raise CacheUnusable(in_words(error)) from error


def read_private(path: Path) -> bytes:
    """The content of a file of the cache, which nobody but this user and root can have written.

    Raises:
        CacheUnusable: Somebody else could have.
        OSError: It is not there, or cannot be read.
    """
    try:
        return ownership.read_bytes(path, own=settings.cache_dir())
    except ownership.Distrusted as error:
        raise CacheUnusable(str(error)) from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the artifact's lock; without it, publishing is still one atomic step."""
    with locks.held_if_possible(path) as problem:
        if problem is not None and problem.errno not in locks.NO_LOCKS:
            raise CacheUnusable(in_words(problem)) from problem
        yield


def _load(folder: Path, key: ArtifactKey) -> Artifact | None:
    """The artifact in ``folder`` if it is complete and matches ``key``; otherwise None.

    Raises:
        CacheUnusable: Another user could have put it there.
    """
    try:
        record = json.loads(read_private(folder / "key.json"))
        data = read_private(folder / key.filename)
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or record.get("parts") != [list(p) for p in key.parts]:
        return None
    if record.get("sha256") != hashlib.sha256(data).hexdigest():
        return None
    return Artifact(data, folder / key.filename)


def _publish(folder: Path, key: ArtifactKey, data: bytes) -> Path | None:
    """Write aside, then rename into place in one step; called with the artifact's lock held."""
    record = {
        "arch": key.arch,
        "parts": key.parts,
        "sha256": hashlib.sha256(data).hexdigest(),
        "bytes": len(data),
    }
    try:
        with temporary_files.new_folder(folder.parent, ".aside-") as aside:
            _write(aside / key.filename, data)
            _write(aside / "key.json", json.dumps(record, indent=1).encode())
            if folder.exists():  # what is there failed verification: replace it
                shutil.rmtree(folder)
            aside.rename(folder)
    except OSError as error:
        warn_once(in_words(error))
        return None
    return folder / key.filename


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def in_words(error: OSError) -> str:
    return f"{error.strerror or error}: {error.filename}" if error.filename else str(error)
