"""Storage of studies: a SQLite file, a database server, or a journal file."""

from __future__ import annotations

import os
import sqlite3
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Literal

import optuna
import sqlalchemy
from optuna.storages import BaseStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalStorage
from sqlalchemy.exc import SQLAlchemyError

from ksopt.errors import InvalidInputError
from ksopt.search import journal
from ksopt.search.journal import SHARED, JournalLock
from ksopt.search.storage_url import without_password, without_secrets
from ksopt.system import untrusted
from ksopt.system.locks import Lock

_JOURNAL = "journal:"
_FORMS = (
    "a URL that Optuna knows, such as sqlite:///study.db, postgresql://user@host/name or "
    "mysql://user@host/name, or journal:FILE"
)
# Lock and unlock, by kind of server. Both end with the connection, and so with its process.
_SERVER_TURNS = {
    "postgresql": ("SELECT pg_advisory_lock({key})", "SELECT pg_advisory_unlock({key})"),
    "mysql": (
        # Waits a day: -1 means forever for MySQL, but not at all for MariaDB.
        "SELECT GET_LOCK(CONCAT(DATABASE(), '-{key}'), 86400)",
        "SELECT RELEASE_LOCK(CONCAT(DATABASE(), '-{key}'))",
    ),
}
# Errors of Optuna, SQLAlchemy and their drivers for an invalid or malformed storage.
UNUSABLE = (
    optuna.exceptions.StorageInternalError,
    *(SQLAlchemyError, sqlite3.Error, ImportError, ValueError, OSError, RuntimeError),
    *(LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, AssertionError),
)
_SERVER_TURNS["mariadb"] = _SERVER_TURNS["mysql"]
# SQLite lets one process write at a time; the others wait at most this long.
_SQLITE_PATIENCE_S = 60.0


class Storage:
    """A storage that several processes, on several machines, use at once.

    Args:
        url: ``sqlite:///FILE``, ``postgresql://...``, ``mysql://...`` or ``journal:FILE``.

    Raises:
        InvalidInputError: The URL has another form.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._engine: sqlalchemy.Engine | None = None
        self._server: tuple[str, str] | None = None
        self._journal: Path | None = None
        self._created: list[Path] = []
        file: str | None = None
        if url.startswith(_JOURNAL):
            file = url.removeprefix(_JOURNAL)
            self._journal = Path(file)
        elif "://" in url:
            file = self._database()
        if self._server is None and not file:
            raise InvalidInputError(f"storage {without_password(url)!r}: give {_FORMS}")
        if self._server is None:
            path = Path(str(file))
            if not path.name or "\0" in str(file):
                raise InvalidInputError(f"storage {without_password(url)!r}: it names no file")
            if os.path.lexists(path) and not untrusted.is_file(path):  # opening a FIFO would block
                raise InvalidInputError(
                    f"storage {without_password(url)!r} cannot be used: {path} is not a file"
                )
            self._turn = path.with_name(f".{path.name}.turn")

    @property
    def file(self) -> Path | None:
        """The file of the studies; None on a server."""
        if self._server is not None:
            return None
        return self._turn.with_name(self._turn.name.removeprefix(".").removesuffix(".turn"))

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Exclusive access among all users of the storage, to draw a chain that no other draws.

        It is held for milliseconds, and never during a measurement.
        """
        if self._server is None:
            with self._file_turn():
                yield
            return
        assert self._engine is not None
        lock, unlock = self._server
        with self._engine.connect() as connection:
            lock_result = connection.execute(sqlalchemy.text(lock)).scalar()
            if lock_result in (0, None):  # of MySQL; PostgreSQL returns nothing, and waits forever
                raise RuntimeError("the server did not give its lock for a day")
            try:
                yield
            finally:
                connection.execute(sqlalchemy.text(unlock))

    @contextmanager
    def _file_turn(self) -> Iterator[None]:
        with Lock(self._turn, mode=SHARED) as lock:
            if lock.created:
                self._created.append(self._turn)
            yield

    def create(
        self, name: str, directions: Sequence[Literal["minimize", "maximize"]] = ("minimize",)
    ) -> optuna.Study:
        """The study of a name, created if it does not exist, with a direction for each objective.

        Raises:
            InvalidInputError: The storage cannot be used.
        """
        with self._refusing(), self.turn():
            return optuna.create_study(
                study_name=name,
                storage=self._backend(),
                directions=list(directions),
                load_if_exists=True,
            )

    def load(self, name: str) -> optuna.Study:
        """The existing study of a name.

        Raises:
            InvalidInputError: The storage cannot be used, or has no such study.
        """
        if self.file is not None and not untrusted.is_file(self.file):
            raise InvalidInputError(f"there is no study at {self.file}: the file is not there")
        # Another process may be about to create its tables.
        with self._refusing(), self.turn():
            try:
                return optuna.load_study(study_name=name, storage=self._backend())
            except KeyError:
                raise InvalidInputError(
                    f"the storage {without_password(self.url)} holds no study named {name!r}"
                ) from None

    @contextmanager
    def opened_for_reading(self) -> Iterator[Storage]:
        """The storage for reading: of a SQLite file, a copy.

        Optuna adds missing tables and rows to every file that it opens.

        Raises:
            InvalidInputError: The file does not exist, or is not one of SQLite's.
        """
        file = self.file
        if file is None or self._journal is not None or not untrusted.is_file(file):
            yield self
            return
        with tempfile.TemporaryDirectory(prefix="ksopt-") as folder:
            copy = Path(folder) / "study.db"
            with (
                self._refusing(),
                closing(sqlite3.connect(file, timeout=_SQLITE_PATIENCE_S)) as source,
                closing(sqlite3.connect(copy)) as target,
            ):
                source.backup(target)
            yield Storage(f"sqlite:///{copy}")

    def _backend(self) -> BaseStorage:
        if self._journal is not None:
            journal.check(self._journal)
            path = str(self._journal)
            lock = JournalLock(path, self._created)
            return JournalStorage(JournalFileBackend(path, lock_obj=lock))  # type: ignore[arg-type]
        options = {}
        if self._server is None:
            options = {"connect_args": {"timeout": _SQLITE_PATIENCE_S}}
        return RDBStorage(self.url, engine_kwargs=options)

    def _database(self) -> str | None:
        """The file of a SQLite URL, if it has one; for a server, set up its locks."""
        with self._refusing():
            url = sqlalchemy.make_url(self.url)
            kind = url.get_backend_name()
            if kind == "sqlite":
                in_memory = url.database in (None, "", ":memory:")
                return None if in_memory else url.database
            if kind not in _SERVER_TURNS:
                raise ValueError(f"ksopt does not know how to share a {kind} server")
            key = zlib.crc32(b"ksopt-search")
            lock, unlock = _SERVER_TURNS[kind]
            self._server = (lock.format(key=key), unlock.format(key=key))
            self._engine = sqlalchemy.create_engine(self.url, isolation_level="AUTOCOMMIT")
        return None

    @contextmanager
    def removing_new_locks(self) -> Iterator[None]:
        """Context that removes the lock files this object created after an InvalidInputError."""
        try:
            yield
        except InvalidInputError:
            self._remove_locks()
            raise

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Context that turns errors of the storage into InvalidInputError, without secrets."""
        with self.removing_new_locks():
            try:
                yield
            except InvalidInputError:
                raise
            except UNUSABLE as error:
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                if isinstance(error, ImportError):
                    reason += " (for PostgreSQL: pip install 'ksopt[postgresql]', for MySQL: "
                    reason += "ksopt[mysql])"
                raise InvalidInputError(
                    f"storage {without_password(self.url)!r} cannot be used: "
                    f"{without_secrets(reason, self.url)}"
                ) from None

    def _remove_locks(self) -> None:
        for path in self._created:
            with suppress(OSError):
                lock = Lock(path, wait_s=0)
                lock.acquire()
                lock.release(remove=True)
        self._created.clear()
