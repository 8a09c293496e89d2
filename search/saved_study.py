"""Reports rewritten from a saved study, without the measured device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import optuna

from ksopt.errors import InvalidInputError
from ksopt.search import study_store
from ksopt.search.options import STUDY
from ksopt.search.report import export
from ksopt.search.results import SearchResult
from ksopt.search.search_record import SearchRecord
from ksopt.search.storage import UNUSABLE, Storage
from ksopt.search.storage_url import without_password
from ksopt.system import untrusted
from ksopt.system.atomic_files import make_folder, remove_empty


def read(where: str, study: str = STUDY) -> SearchResult:
    """The result of the last run of a search; nothing is measured, and nothing written.

    Args:
        where: The output folder of a search, or the storage of its study.
        study: As for `replay`.

    Raises:
        InvalidInputError: There is no such study.
    """
    url, folder = _place(where)
    storage = Storage(url)
    with storage.removing_new_locks(), storage.opened_for_reading() as opened, _readable(study):
        record = _record(opened.load(study))
        return record.replayed(opened, _target(folder, record))


def replay(where: str, study: str = STUDY, out: Path | str | None = None) -> SearchResult:
    """Write the report of the last run of a search; nothing is measured.

    Args:
        where: The output folder of a search, or the storage of its study.
        study: Name of the search's study in the storage, or of one of its layers' alone.
        out: Folder of the report; None takes ``where`` if it is a folder, else the run's own.

    Raises:
        InvalidInputError: There is no such study, or the report cannot be written.
    """
    url, folder = _place(where)
    storage = Storage(url)
    with storage.removing_new_locks(), storage.opened_for_reading() as opened:
        return _replayed(opened, study, out or folder)


def _place(where: str) -> tuple[str, Path | None]:
    """The storage that a text names, and the folder if it names one.

    Raises:
        InvalidInputError: It is neither a folder with a study nor a storage.
    """
    folder = Path(where)
    if untrusted.is_folder(folder):
        file = folder / study_store.FILE
        if not untrusted.is_file(file):
            raise InvalidInputError(
                f"{where}: there is no {study_store.FILE} in this folder; name the folder of "
                "a search, or the --storage that it had"
            )
        return f"sqlite:///{file.absolute()}", folder
    if "://" not in where and not where.startswith("journal:"):
        there = "it is no folder" if untrusted.is_file(folder) else "there is no such folder"
        raise InvalidInputError(
            f"{without_password(where)}: {there}; name a search's output folder, "
            "or the storage of its study"
        )
    return where, None


def _target(out: Path | str | None, record: SearchRecord) -> Path:
    """Folder of a report."""
    return Path(out or record.request.out or "ksopt-report")


def _replayed(storage: Storage, study: str, out: Path | str | None) -> SearchResult:
    loaded = storage.load(study)
    with _readable(study):
        record = _record(loaded)
    target = _target(out, record)
    study_store.check_report_kind(target, record.request)
    with _readable(study):
        result = record.replayed(storage, target)
    with report_folder(target), _readable(study):
        export.write(result, target)
    return result


def _record(study: optuna.Study) -> SearchRecord:
    study_store.check_format(study)
    return SearchRecord.load(study)


@contextmanager
def _readable(study: str) -> Iterator[None]:
    """Context that turns errors of reading trials of other origin into InvalidInputError."""
    try:
        yield
    except (InvalidInputError, OSError):
        raise
    except UNUSABLE as error:
        words = next(iter(str(error).splitlines()), "nothing more")
        raise InvalidInputError(
            f"the study {study!r} cannot be read ({type(error).__name__}: {words}): it is not as "
            "ksopt writes it"
        ) from None


@contextmanager
def report_folder(target: Path) -> Iterator[None]:
    """Context that creates the report's folder; a new one is removed if nothing is written."""
    missing = [place for place in (target, *target.parents) if not os.path.lexists(place)]
    try:
        make_folder(target)
        yield
    except InvalidInputError:
        remove_empty(missing)
        raise
    except (OSError, ValueError) as error:
        remove_empty(missing)
        raise InvalidInputError(
            f"the output folder {target} cannot be written ({untrusted.reason(error)}): choose "
            "another with --out"
        ) from None
