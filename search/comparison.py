"""Comparison of several searches, read from their folders, as one report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ksopt.errors import InvalidInputError
from ksopt.report import document, output_folder
from ksopt.search.options import STUDY
from ksopt.search.report import comparison
from ksopt.search.report.comparison import Searches
from ksopt.search.saved_study import read, report_folder
from ksopt.search.storage_url import without_password
from ksopt.system.atomic_files import write_whole


def compare(
    places: Sequence[str], out: Path | str = "ksopt-comparison", study: str = STUDY
) -> Searches:
    """Write comparison.html and comparison.md of several searches; nothing is measured.

    Args:
        places: Their output folders, or the storages of their studies.
        out: Folder of the comparison.
        study: The searches' name in the storages.

    Returns:
        The results, by the names that the report shows.

    Raises:
        InvalidInputError: Fewer than two, one named twice, no such study, a folder that cannot be
            written.
    """
    names = _names(places)
    searches = {name: read(place, study) for name, place in zip(names, places, strict=True)}
    target = Path(out)
    with report_folder(target):
        write_whole(target / "comparison.html", comparison.html(searches))
        write_whole(target / "comparison.md", comparison.markdown(searches))
        output_folder.write_drawings(
            document.figures(comparison.sections(searches)), target / "plots"
        )
    return searches


def _names(places: Sequence[str]) -> list[str]:
    """Names of the searches: the last part of each place, or all of it if two share that.

    Raises:
        InvalidInputError: Fewer than two, or one twice.
    """
    shown = [without_password(place) for place in places]
    if len(set(places)) < max(2, len(places)):
        raise InvalidInputError(
            f"report {' '.join(shown)}: give two searches or more to be compared, each once"
        )
    short = [Path(place).name or place for place in shown]
    return short if len(set(short)) == len(short) else shown
