"""A benchmark's folder: what is measured is on disk before the next thing is, whatever happens.

``rows.jsonl`` gets one line a subject, with all its rows, written and synced before the next is
measured; a line that a killed process left half written is cut off. ``setting.json`` says what was
measured and on what; a folder refuses to take measurements of anything else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from ksopt import settings
from ksopt.bench.request import BenchRequest, Subject
from ksopt.bench.rows import Row
from ksopt.errors import InvalidInputError
from ksopt.measure.device import DeviceRecord
from ksopt.measure.roofline import Roofline
from ksopt.system import sources, untrusted
from ksopt.system.atomic_files import make_folder, remove_empty, write_whole
from ksopt.system.locks import Busy, lock_open_file

ROWS = "rows.jsonl"
SETTING = "setting.json"
SCHEMA = "ksopt.bench/1"
# What a time can depend on. A change anywhere else (reports, search, documents) changes none.
_CODE = (
    *("ksopt.csrc", "ksopt.kernels", "ksopt.jit", "ksopt.measure"),
    *("ksopt.baselines", "ksopt.batched", "ksopt.epilogue", "ksopt.functional", "ksopt.ops"),
    *("ksopt.bench.benchmark", "ksopt.bench.entries", "ksopt.precision"),
)


class Journal:
    """The rows of a folder, and the place to add more; open it with `opened`."""

    def __init__(self, folder: Path, file: BinaryIO, setting: dict[str, Any]) -> None:
        self.folder = folder
        self._file = file
        self._setting = setting
        self.measured = read_rows(folder)

    def add(self, rows: Sequence[Row]) -> None:
        """Keep one subject's rows; they are on disk when this returns."""
        line = json.dumps([row.to_json() for row in rows]) + "\n"
        self._file.write(line.encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        self.measured[rows[0].subject] = tuple(rows)

    def begin_run(self, request: BenchRequest, record: DeviceRecord) -> None:
        """Note a run in setting.json: when it was asked for what, and on what device."""
        run = {"command": request.command, "device": asdict(record), "rooflines": []}
        self._setting.setdefault("runs", []).append(run)
        write_whole(self.folder / SETTING, json.dumps(self._setting, indent=2) + "\n")

    def add_roofline(self, roofline: Roofline) -> None:
        """Note the ceilings that one GPU of this run measured."""
        self._setting["runs"][-1]["rooflines"].append(asdict(roofline))
        write_whole(self.folder / SETTING, json.dumps(self._setting, indent=2) + "\n")


@contextmanager
def opened(folder: Path, request: BenchRequest, record: DeviceRecord) -> Iterator[Journal]:
    """The folder's journal, new or continued, and ours alone until the end.

    Raises:
        InvalidInputError: the folder cannot be written, another benchmark is at work in it, or it
            holds measurements of something else; the sentence names what differs.
    """
    missing = [place for place in (folder, *folder.parents) if not os.path.lexists(place)]
    try:
        make_folder(folder)
        is_new = not os.path.lexists(folder / ROWS)
        file = _opened(folder / ROWS)
    except (OSError, ValueError) as error:
        remove_empty(missing)
        raise InvalidInputError(
            f"the output folder {folder} cannot be written ({untrusted.reason(error)}): "
            "choose another with --out"
        ) from None
    with file:
        try:
            lock_open_file(file.fileno(), folder / ROWS)
        except Busy:
            raise InvalidInputError(
                f"another benchmark is at work in {folder}: wait for it, or choose another --out"
            ) from None
        try:
            setting = _setting(folder, identity(request, record))
        except InvalidInputError:
            if is_new:  # who is refused leaves nothing
                (folder / ROWS).unlink()
            raise
        _cut_half_a_line(folder / ROWS)
        yield Journal(folder, file, setting)


def _opened(path: Path) -> BinaryIO:
    """A file to append to, itself: what a symbolic link in its place points to is another's."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.fdopen(os.open(path, flags, 0o666), "ab")


def identity(request: BenchRequest, record: DeviceRecord) -> dict[str, Any]:
    """What has to be the same for two measurements to stand in one folder."""
    machine = {
        "device name": record.name,
        "driver": record.driver,
        "torch": record.torch,
        "cuda": record.cuda,
        "threads": record.threads if record.type == "cpu" else None,
        "tuning": settings.tuning(),
        "code": code_digest(),
    }
    read_back: dict[str, Any] = json.loads(json.dumps(request.identity() | machine))
    return read_back


def code_digest() -> str:
    """Digest of every source that a time can depend on; `DeviceRecord` has the commit beside it."""
    return sources.digest(*_CODE)


def read_rows(folder: Path) -> dict[Subject, tuple[Row, ...]]:
    """The rows of a folder by subject, without a half-written last line.

    Raises:
        InvalidInputError: A line is not one of `ksopt bench kernels`.
    """
    lines = (folder / ROWS).read_bytes().split(b"\n")[:-1]
    measured = {}
    for number, line in enumerate(lines, 1):
        what = f"{folder / ROWS}, line {number}"
        with untrusted.of_its_form(what, "it is not as `ksopt bench kernels` writes it"):
            rows = tuple(Row.from_json(value) for value in json.loads(line))
            measured[rows[0].subject] = rows
    return measured


def read_setting(folder: Path) -> dict[str, Any]:
    """setting.json of a folder.

    Raises:
        InvalidInputError: the folder has none, or it is not one of `ksopt bench kernels`.
    """
    try:
        setting = untrusted.json_of(folder / SETTING, "the file")
    except InvalidInputError:
        setting = None
    if not isinstance(setting, dict) or setting.get("schema") != SCHEMA:
        raise InvalidInputError(
            f"{folder} is not a folder of `ksopt bench kernels`: it has no {SETTING} of schema "
            f"{SCHEMA}"
        )
    return setting


def _setting(folder: Path, asked: dict[str, Any]) -> dict[str, Any]:
    if not (folder / SETTING).exists():
        if (folder / ROWS).stat().st_size:
            raise InvalidInputError(f"{folder} has a {ROWS} and no {SETTING}: choose another --out")
        setting: dict[str, Any] = {"schema": SCHEMA, "identity": asked}
        write_whole(folder / SETTING, json.dumps(setting, indent=2) + "\n")
        return setting
    setting = read_setting(folder)
    stored = setting["identity"]
    differing = [name for name in asked if asked[name] != stored.get(name)]
    if differing:
        pairs = ", ".join(_difference(name, stored.get(name), asked[name]) for name in differing)
        raise InvalidInputError(
            f"{folder} holds measurements of something else ({pairs}): their times cannot be "
            "compared; choose another --out"
        )
    return setting


def _difference(name: str, there: Any, here: Any) -> str:
    if name == "subjects":
        return f"{len(there or ())} products there and {len(here)} here, not the same ones"
    return f"{name} {there} there and {here} here"


def _cut_half_a_line(path: Path) -> None:
    whole = path.read_bytes()
    end = whole.rfind(b"\n") + 1
    if end != len(whole):
        os.truncate(path, end)
