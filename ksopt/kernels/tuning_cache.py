"""Measurements on disk, of choices and of sites: one small file a key, private to the user.

Layout: ``<cache>/<ksopt version>/choices/<digest of the fingerprint>/<key>.json``. The fingerprint
is the device, its driver, the versions of torch and CUDA, and a digest of ksopt's kernels and of
the code that times them: a change of any of them starts over. Every file says in full what it is
for; one that does not parse or is for something else counts as missing and is written again.

A file is written aside and renamed into place in one step, so a process that is killed leaves the
old file or the new one. A lock per key makes the processes that meet it at once wait for
the first of them, for timings disturb each other. A cache that cannot be written, or that others
can write to, costs one warning, and is not read then.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, Self, TypeVar, get_args, overload

from ksopt.jit import cache, source_digest
from ksopt.kernels.labels import PAIR, is_pair, label_of, name_of
from ksopt.kernels.problem import ProblemKey
from ksopt.measure.interleaved import EntryResult
from ksopt.system import locks, temporary_files

Fingerprint = dict[str, str]
"""The facts that a choice depends on besides the key, as text."""

WeightMode = Literal["any", "cached", "repacked", "stored"]
"""Whether a time includes preparing the weight (repacked), not (cached), or has no such part.

"stored" is as "cached", but only for forms of a module's parameters: see merged.py."""

_SCHEMA = 5
_LONGEST_WAIT_S = 60.0


class Key(Protocol):
    """The key of a record: its problem, and what the choice depends on."""

    @property
    def file_name(self) -> str:
        """The readable name of its file, without its ending; of no other key."""


class Stored(Protocol):
    """A kind of record: a choice (`Record`), or a decision of the compiler on a site.

    Attributes:
        kind: its name in files.
    """

    kind: ClassVar[str]

    @property
    def key(self) -> Key:
        """The record's key."""

    @staticmethod
    def depends_on() -> Fingerprint:
        """The facts that records of this kind depend on beside the fingerprint."""

    def to_json(self) -> dict[str, Any]:
        """The record as plain values."""

    @classmethod
    def from_json(cls, values: Any) -> Self:
        """The record whose `to_json` gave ``values``, among others."""


Kind = TypeVar("Kind", bound=Stored)


@dataclass(frozen=True)
class Timed:
    """One timed candidate of a race.

    Attributes:
        way: its name.
        config: its tile's configuration, None where it has none.
        weight: whether the time includes preparing the weight.
        predicted_us: by its cost model, for the batch that was timed; None if it has none.
        median_us, p20_us, p80_us: microseconds on the device.
        host_us: microseconds of a call on the host; None on a CPU, which has no such part,
            and for a candidate that was given up before it was timed.
    """

    way: str
    config: dict[str, Any] | None
    weight: WeightMode
    predicted_us: float | None
    median_us: float
    p20_us: float
    p80_us: float
    host_us: float | None = None

    @classmethod
    def of(
        cls,
        result: EntryResult,
        way: str,
        weight: WeightMode,
        config: dict[str, Any] | None = None,
        predicted_us: float | None = None,
    ) -> Timed:
        """The times that a race has measured of a candidate."""
        took = result.measurement
        assert took is not None
        host_us = result.host_us if math.isfinite(result.host_us) else None
        return cls(
            way, config, weight, predicted_us, took.median_us, took.p20_us, took.p80_us, host_us
        )

    @classmethod
    def from_json(cls, values: Any) -> Timed:
        """The times whose fields are ``values``.

        Raises:
            ValueError, TypeError: they are not such values.
        """
        timed = cls(**values)
        times = [timed.median_us, timed.p20_us, timed.p80_us]
        times += [] if timed.host_us is None else [timed.host_us]
        if not isinstance(timed.way, str) or not isinstance(timed.config, dict | None):
            raise ValueError(f"not a way: {values!r}")
        if timed.way == PAIR and not is_pair(timed.config):
            raise ValueError(f"not a pair: {values!r}")
        if timed.weight not in get_args(WeightMode) or not all(
            isinstance(us, int | float) and math.isfinite(us) for us in times
        ):
            raise ValueError(f"not a time: {values!r}")
        return timed

    @property
    def label(self) -> str:
        """Name and configuration, for a person."""
        return label_of(self.way, self.config)

    @property
    def name(self) -> str:
        """Name, of a pair with those of its kernels, for a person."""
        return name_of(self.way, self.config)


@dataclass(frozen=True)
class Record:
    """The measurements for a key, and the choices.

    Attributes:
        key: what it is for.
        batch: rows that were timed.
        timed: every timed candidate.
        cached: index into ``timed`` of the choice for weights whose prepared form is cached.
        repacked: that for weights that are prepared on every call.
        stored: that for a module's parameters; None where it is ``cached``.
    """

    key: ProblemKey
    batch: int
    timed: tuple[Timed, ...]
    cached: int
    repacked: int
    stored: int | None = None
    kind: ClassVar[str] = "choice"

    def __post_init__(self) -> None:
        if not all(0 <= index < len(self.timed) for index in self.indices):
            raise ValueError("the choice is not among what was timed")

    @property
    def indices(self) -> set[int]:
        """The indices of all choices."""
        return {self.cached, self.repacked, *([] if self.stored is None else [self.stored])}

    def chosen(self, repacked: bool) -> Timed:
        """The choice for weights that change, or for a module's parameters."""
        if repacked:
            return self.timed[self.repacked]
        return self.timed[self.cached if self.stored is None else self.stored]

    @staticmethod
    def depends_on() -> Fingerprint:
        """Nothing beside the fingerprint of the device and the kernels."""
        return {}

    def to_json(self) -> dict[str, Any]:
        """The record as plain values."""
        return {
            "key": self.key.to_json(),
            "batch": self.batch,
            "cached": self.cached,
            "repacked": self.repacked,
            "stored": self.stored,
            "timed": [asdict(timed) for timed in self.timed],
        }

    @classmethod
    def from_json(cls, values: Any) -> Record:
        """The record whose `to_json` gave ``values``.

        Raises:
            ValueError, KeyError, TypeError, AttributeError, OverflowError: they are not such
                values.
        """
        timed = tuple(map(Timed.from_json, values["timed"]))
        cached, repacked, batch = (int(values[name]) for name in ("cached", "repacked", "batch"))
        stored = None if values["stored"] is None else int(values["stored"])
        return cls(ProblemKey.from_json(values["key"]), batch, timed, cached, repacked, stored)


def code_digest() -> str:
    """A digest of the code that is timed, of its compiler and of its timer.

    Comments and docstrings of Python do not count: `ksopt.jit.source_digest`.
    """
    return source_digest.digest(
        *("ksopt.csrc", "ksopt.kernels", "ksopt.jit", "ksopt.measure"),
        *("ksopt.baselines", "ksopt.batched", "ksopt.epilogue", "ksopt.precision"),
    )


def folder_of(fingerprint: Fingerprint) -> Path:
    """The folder of the choices for a fingerprint."""
    digest = hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()[:16]
    return cache.store_root() / "choices" / digest


def path_of(fingerprint: Fingerprint, key: Key) -> Path:
    """The file of a key; its name is readable, but its content decides."""
    return folder_of(fingerprint) / f"{key.file_name}.json"


@overload
def load(fingerprint: Fingerprint, key: ProblemKey) -> Record | None: ...
@overload
def load(fingerprint: Fingerprint, key: Key, kind: type[Kind]) -> Kind | None: ...
def load(fingerprint: Fingerprint, key: Key, kind: type[Any] = Record) -> Any:
    """The record of a key; None if there is none that can be used."""
    record = _read(path_of(fingerprint, key), fingerprint, kind)
    return record if record is not None and record.key == key else None


@overload
def load_all(fingerprint: Fingerprint) -> list[Record]: ...
@overload
def load_all(fingerprint: Fingerprint, kind: type[Kind]) -> list[Kind]: ...
def load_all(fingerprint: Fingerprint, kind: type[Any] = Record) -> list[Any]:
    """All records of a kind for a fingerprint, in order of the keys' names."""
    try:
        files = sorted(folder_of(fingerprint).glob("*.json"))
    except OSError:
        return []
    records = (_read(file, fingerprint, kind) for file in files)
    return [record for record in records if record is not None]


def save(fingerprint: Fingerprint, record: Stored) -> bool:
    """Write a record atomically; whether it was possible. Never raises for the disk."""
    path = path_of(fingerprint, record.key)
    values = _header(fingerprint, type(record)) | record.to_json()
    try:
        cache.make_private(path.parent)
        with temporary_files.new_file(path.parent, ".aside-") as (handle, aside):  # mode 0600
            with os.fdopen(handle, "wb", closefd=False) as file:
                file.write(json.dumps(values, indent=1).encode())
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
        return True
    except (OSError, cache.CacheUnusable) as error:
        cache.warn_once(cache.in_words(error) if isinstance(error, OSError) else str(error))
        return False


@contextlib.contextmanager
def alone(fingerprint: Fingerprint, key: Key) -> Iterator[None]:
    """Let one process at a time measure for a key; the others wait here, at most a minute.

    The lock is a file beside the key's, and ends with its holder, however it ends. Where no lock
    can be taken, nothing is locked.
    """
    path = path_of(fingerprint, key).with_suffix(".lock")
    try:
        cache.make_private(path.parent)
    except cache.CacheUnusable as reason:
        cache.warn_once(str(reason))
        yield
        return
    with locks.held_if_possible(path, _LONGEST_WAIT_S) as problem:
        busy = isinstance(problem, locks.Busy)
        if problem is not None and not busy and problem.errno not in locks.NO_LOCKS:
            cache.warn_once(cache.in_words(problem))
        yield


def _header(fingerprint: Fingerprint, kind: type[Stored]) -> dict[str, Any]:
    """The values of a file beside its record's: a file with others is not read."""
    facts = fingerprint | kind.depends_on()
    return {"schema": _SCHEMA, "kind": kind.kind, "fingerprint": facts}


def _read(path: Path, fingerprint: Fingerprint, kind: type[Kind]) -> Kind | None:
    try:
        values = json.loads(cache.read_private(path))
        header = _header(fingerprint, kind)
        if any(values[name] != header[name] for name in header):
            return None
        return kind.from_json(values)
    except cache.CacheUnusable as reason:  # another user could have written it
        cache.warn_once(str(reason))
        return None
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ):
        return None
