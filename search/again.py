"""A report written again from a study, without the device that was measured."""

from __future__ import annotations

from pathlib import Path

from ksopt.errors import InvalidInputError
from ksopt.search import report, store
from ksopt.search.record import RunRecord, result_of
from ksopt.search.request import STUDY
from ksopt.search.result import SearchResult
from ksopt.search.shapes import report as shapes_report
from ksopt.search.shapes.record import ShapesRecord, replayed
from ksopt.search.shapes.result import ShapesResult
from ksopt.search.storage import Storage


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
    if folder.is_dir():
        file = folder / store.FILE
        if not file.is_file():
            raise InvalidInputError(
                f"replay {where}: there is no {store.FILE} in the folder; give the storage that "
                "the search was given"
            )
        url = f"sqlite:///{file.resolve()}"
        out = out or folder
    else:
        url = where
        if "://" not in where and not where.startswith("journal:"):
            raise InvalidInputError(
                f"replay {where}: there is no such folder; give a search's output folder, or the "
                "storage of its study"
            )
    storage = Storage(url)
    found = storage.load(study)
    several = ShapesRecord.kept(found)
    if several is not None:
        target = _made(out or several.request.each.out)
        store.refuse_another_report(target, several=True)
        together = replayed(several, storage, target)
        shapes_report.write(together, target)
        return together
    record = RunRecord.kept(found)
    target = _made(out or record.request.out)
    store.refuse_another_report(target, several=False)
    result = result_of(found, record, target, replayed=True)
    report.write(result, target)
    return result


def _made(out: Path | str | None) -> Path:
    target = Path(out or "ksopt-report")
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInputError(
            f"the output folder {target} cannot be written ({error.strerror}): choose another "
            "with --out"
        ) from None
    return target
