"""Where a study is kept: a SQLite file, a database server, or a journal file."""

from __future__ import annotations

import re
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import optuna
import sqlalchemy
from optuna.storages import BaseStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalStorage
from sqlalchemy.exc import SQLAlchemyError

from ksopt.errors import InvalidInputError
from ksopt.locks import Lock
from ksopt.search.request import without_password

_JOURNAL = "journal:"
_FORMS = (
    "a URL that Optuna knows, such as sqlite:///study.db, postgresql://user@host/name or "
    "mysql://user@host/name, or journal:FILE"
)
# Lock and unlock, by kind of server. Both end with the connection, and so with its process.
_SERVER_TURNS = {
    "postgresql": ("SELECT pg_advisory_lock({key})", "SELECT pg_advisory_unlock({key})"),
    "mysql": (
        # Waits a day: MySQL takes -1 for ever, but MariaDB for not at all.
        "SELECT GET_LOCK(CONCAT(DATABASE(), '-{key}'), 86400)",
        "SELECT RELEASE_LOCK(CONCAT(DATABASE(), '-{key}'))",
    ),
}
_SERVER_TURNS["mariadb"] = _SERVER_TURNS["mysql"]
# Locks of a storage: as open as the umask makes the storage itself, which a group may share.
_SHARED = 0o666
# SQLite lets one process write at a time; the others wait so long before they give up.
_SQLITE_PATIENCE_S = 60.0


class Storage:
    """A storage that several processes, on several machines, use at once.

    Args:
        url: ``sqlite:///FILE``, ``postgresql://...``, ``mysql://...`` or ``journal:FILE``.

    Raises:
        InvalidInputError: It has another form.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._engine: sqlalchemy.Engine | None = None
        self._server: tuple[str, str] | None = None
        self._journal: Path | None = None
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
            self._turn = path.with_name(f".{path.name}.turn")

    @contextmanager
    def turn(self) -> Iterator[None]:
        """This process alone, of all that use the storage: to draw a chain that no other draws.

        Kept for milliseconds, and never while something is measured.
        """
        if self._server is None:
            with Lock(self._turn, mode=_SHARED):
                yield
            return
        assert self._engine is not None
        lock, unlock = self._server
        with self._engine.connect() as connection:
            given = connection.execute(sqlalchemy.text(lock)).scalar()
            if given in (0, None):  # by MySQL; PostgreSQL says nothing, and waits for ever
                raise RuntimeError("the server did not give its lock for a day")
            try:
                yield
            finally:
                connection.execute(sqlalchemy.text(unlock))

    def create(self, name: str, objectives: int = 2) -> optuna.Study:
        """The study of a name, made if it is not there, with so many objectives.

        Raises:
            InvalidInputError: The storage cannot be used.
        """
        with self._refusing(), self.turn():
            return optuna.create_study(
                study_name=name,
                storage=self._backend(),
                directions=["minimize"] * objectives,
                load_if_exists=True,
            )

    def load(self, name: str) -> optuna.Study:
        """The study of a name; nothing is made.

        Raises:
            InvalidInputError: The storage cannot be used, or has no such study.
        """
        if self._server is None:
            path = self._turn.with_name(self._turn.name.removeprefix(".").removesuffix(".turn"))
            if not path.is_file():
                raise InvalidInputError(f"there is no study at {path}: the file is not there")
        with self._refusing(), self.turn():  # another process may be about to make its tables
            try:
                return optuna.load_study(study_name=name, storage=self._backend())
            except KeyError:
                raise InvalidInputError(
                    f"the storage {without_password(self.url)} holds no study named {name!r}"
                ) from None

    def _backend(self) -> BaseStorage:
        if self._journal is not None:
            path = str(self._journal)
            return JournalStorage(JournalFileBackend(path, lock_obj=_JournalLock(path)))  # type: ignore[arg-type]
        options = {}
        if self._server is None:
            options = {"connect_args": {"timeout": _SQLITE_PATIENCE_S}}
        return RDBStorage(self.url, engine_kwargs=options)

    def _database(self) -> str | None:
        """The file of a SQLite URL, if it has one; for a server, how to take turns on it."""
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
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except InvalidInputError:
            raise
        except (SQLAlchemyError, ImportError, ValueError, OSError, RuntimeError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            if isinstance(error, ImportError):
                reason += (
                    " (for PostgreSQL: pip install 'ksopt[postgresql]', for MySQL: ksopt[mysql])"
                )
            shown = without_password(self.url)
            reason = re.sub(re.escape(self.url), shown, reason)
            raise InvalidInputError(f"storage {shown!r} cannot be used: {reason}") from None


class _JournalLock:
    """Excludes the other writers of a journal file.

    Optuna's own locks are files that a killed process leaves behind; writers then wait 30 s.
    """

    def __init__(self, path: str) -> None:
        self._lock = Lock(Path(f"{path}.lock"), mode=_SHARED)
        self._threads = threading.Lock()

    def acquire(self) -> bool:
        """Wait for it."""
        self._threads.acquire()
        try:
            self._lock.acquire()
        except BaseException:
            self._threads.release()
            raise
        return True

    def release(self) -> None:
        """Give it back."""
        self._lock.release()
        self._threads.release()
