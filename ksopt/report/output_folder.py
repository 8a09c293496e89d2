"""The files of a report in its output folder."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from ksopt.errors import InvalidInputError, UnavailableError
from ksopt.report import drawing_style
from ksopt.system.atomic_files import make_folder, write_whole
from ksopt.system.untrusted import reason

_KEPT = "the measurements are kept; choose another --out"


def write(
    folder: Path,
    texts: Mapping[str, str],
    drawings: Mapping[str, str] | None = None,
    drawings_folder: str = "figures",
    remedy: str = _KEPT,
) -> None:
    """Write the texts of a report by their names, and its drawings into a folder inside.

    Args:
        folder: created if it does not exist.
        texts: of each file, by its name.
        drawings: ``<svg>`` elements by the names of their files.
        drawings_folder: the name of their folder.
        remedy: the end of the error's sentence: what to do.

    Raises:
        InvalidInputError: the folder cannot be written.
    """
    try:
        make_folder(folder)
        for name, text in texts.items():
            write_whole(folder / name, text)
        write_drawings(drawings or {}, folder / drawings_folder)
    except (OSError, ValueError) as error:
        raise InvalidInputError(
            f"the report cannot be written to {folder} ({reason(error)}): {remedy}"
        ) from None


def write_drawings(drawings: Mapping[str, str], folder: Path) -> None:
    """Write each drawing as SVG, and as PNG where resvg-py is installed.

    Args:
        drawings: ``<svg>`` elements by the names of their files.
        folder: created if there is a drawing.

    Raises:
        OSError: the folder cannot be written.
    """
    if drawings:
        make_folder(folder)
    for name, drawing in drawings.items():
        alone = drawing_style.standalone(drawing)
        write_whole(folder / f"{name}.svg", alone)
        with contextlib.suppress(UnavailableError):
            write_whole(folder / f"{name}.png", drawing_style.png(alone))
