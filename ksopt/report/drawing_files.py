"""The drawings of a report as separate files."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from ksopt.errors import UnavailableError
from ksopt.report import drawing_style
from ksopt.system.atomic_files import make_folder, write_whole


def write(drawings: Mapping[str, str], folder: Path) -> None:
    """Write each drawing as SVG, and as PNG where resvg-py is installed.

    Args:
        drawings: ``<svg>`` elements by the names of their files.
        folder: the output folder, created if there is a drawing.

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
