"""A report written again from a study, without the device that was measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ksopt import reading
from ksopt.errors import InvalidInputError
from ksopt.search import report, store
from ksopt.search.record import RunRecord, result_of
from ksopt.search.request import STUDY
from ksopt.search.result import SearchResult
from ksopt.search.shapes import report as shapes_report
from ksopt.search.shapes.record import ShapesRecord, replayed
from ksopt.search.shapes.result import ShapesResult
from ksopt.search.storage import Storage
from ksopt.search.storage_url import without_password


def replay(
    where: str, study: str = STUDY, out: Path | str | None = None
) -> SearchResult | ShapesResult:
    """Write the report of the last run of a study, or of one of several sizes; nothing is measured.

    Args:
        where: The output folder of a search, or the storage of its study.
        study: Name of the study in the storage.
        out: Folder of the report; None takes ``where`` if it is a folder, else the run's own.

    Raises:
        InvalidInputError: There is no such study, or the report cannot be written.
    """
    folder = Path(where)
    if reading.is_folder(folder):
        file = folder / store.FILE
        if not reading.is_file(file):
            raise InvalidInputError(
                f"replay {where}: there is no {store.FILE} in the folder; give the storage that "
                "the search was given"
            )
        url = f"sqlite:///{file.absolute()}"
        out = out or folder
    else:
        url = where
        if "://" not in where and not where.startswith("journal:"):
            raise InvalidInputError(
                f"replay {without_password(where)}: there is no such folder; give a search's "
                "output folder, or the storage of its study"
            )
    storage = Storage(url)
    with storage.leaving_nothing():
        return _replayed(storage, study, out)


def _replayed(storage: Storage, study: str, out: Path | str | None) -> SearchResult | ShapesResult:
    kept = storage.load(study)
    several = ShapesRecord.kept(kept)
    if several is not None:
        target = _checked(out or several.request.each.out, several=True)
        with _readable(study):
            together = replayed(several, storage, target)
        _make(target)
        shapes_report.write(together, target)
        return together
    record = RunRecord.kept(kept)
    target = _checked(out or record.request.out, several=False)
    with _readable(study):
        result = result_of(kept, record, target, replayed=True)
    _make(target)
    report.write(result, target)
    return result


@contextmanager
def _readable(study: str) -> Iterator[None]:
    """What trials that ksopt did not write make its reader raise, in a sentence."""
    try:
        yield
    except InvalidInputError as error:
        raise InvalidInputError(
            f"the trials of the study {study!r} cannot be read: {error}"
        ) from None
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise InvalidInputError(
            f"the trials of the study {study!r} cannot be read ({type(error).__name__}: {error}): "
            "they are not as ksopt writes them"
        ) from None


def _checked(out: Path | str | None, several: bool) -> Path:
    target = Path(out or "ksopt-report")
    store.refuse_another_report(target, several=several)
    return target


def _make(target: Path) -> None:
    try:
        target.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidInputError(
            f"the output folder {target} cannot be written ({reason}): choose another with --out"
        ) from None
