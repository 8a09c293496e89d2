"""A benchmark's folder: what is measured is on disk before the next thing is, whatever happens.

``rows.jsonl`` gets one line a subject, written and synced before the next is measured; a line that
a killed process left half written is cut off. ``setting.json`` says what was measured and on what;
a folder refuses to take measurements of anything else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

from ksopt import settings
from ksopt.errors import InvalidInputError
from ksopt.measure.device import DeviceRecord
from ksopt.system import untrusted
from ksopt.system.atomic_files import make_folder, remove_empty, write_whole
from ksopt.system.locks import Busy, lock_open_file

ROWS = "rows.jsonl"
SETTING = "setting.json"
Subject = TypeVar("Subject")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Form(Generic[Subject, Result]):
    """What a benchmark keeps in its folder.

    Args:
        command: That writes it.
        schema: Of setting.json.
        subject: Of a result: what was measured.
        to_json: A result as plain values, a line.
        of_json: The inverse.
    """

    command: str
    schema: str
    subject: Callable[[Result], Subject]
    to_json: Callable[[Result], Any]
    of_json: Callable[[Any], Result]


class Journal(Generic[Subject, Result]):
    """The results of a folder, and the place to add more; open it with `opened`."""

    def __init__(
        self, folder: Path, form: Form[Subject, Result], file: BinaryIO, setting: dict[str, Any]
    ) -> None:
        self.folder = folder
        self._form = form
        self._file = file
        self._setting = setting
        self.measured = read_lines(folder, form)

    def add(self, result: Result) -> None:
        """Keep one subject's result; it is on disk when this returns."""
        line = json.dumps(self._form.to_json(result)) + "\n"
        self._file.write(line.encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        self.measured[self._form.subject(result)] = result

    def begin_run(self, command: str, record: DeviceRecord, **more: Any) -> None:
        """Note a run in setting.json: what was asked, on what device, and what is added to it."""
        run = {"command": command, "device": asdict(record), **more}
        self._setting.setdefault("runs", []).append(run)
        self.keep_setting()

    @property
    def run(self) -> dict[str, Any]:
        """What setting.json notes of this run; `keep_setting` keeps what is changed."""
        found: dict[str, Any] = self._setting["runs"][-1]
        return found

    def keep_setting(self) -> None:
        """Write setting.json."""
        write_whole(self.folder / SETTING, json.dumps(self._setting, indent=2) + "\n")


@contextmanager
def opened(
    folder: Path, form: Form[Subject, Result], asked: dict[str, Any]
) -> Iterator[Journal[Subject, Result]]:
    """The folder's journal, new or continued, and ours alone until the end.

    Args:
        folder: where.
        form: of what is kept in it.
        asked: the `identity` of what is measured.

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
            setting = _setting(folder, form, asked)
        except InvalidInputError:
            if is_new:  # who is refused leaves nothing
                (folder / ROWS).unlink()
            raise
        _cut_half_a_line(folder / ROWS)
        yield Journal(folder, form, file, setting)


def _opened(path: Path) -> BinaryIO:
    """A file to append to, itself: what a symbolic link in its place points to is another's."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.fdopen(os.open(path, flags, 0o666), "ab")


def identity(
    request: Mapping[str, object], record: DeviceRecord, code_digest: str
) -> dict[str, Any]:
    """What has to be the same for two measurements to stand in one folder.

    Args:
        request: what of the request.
        record: of the device.
        code_digest: of every source that a time can depend on.
    """
    machine = {
        "device name": record.name,
        "driver": record.driver,
        "torch": record.torch,
        "cuda": record.cuda,
        "threads": record.threads if record.type == "cpu" else None,
        "tuning": settings.tuning(),
        "code": code_digest,
    }
    read_back: dict[str, Any] = json.loads(json.dumps({**request, **machine}))
    return read_back


def read_lines(folder: Path, form: Form[Subject, Result]) -> dict[Subject, Result]:
    """The results of a folder by subject, without a half-written last line.

    Raises:
        InvalidInputError: A line is not one of the command.
    """
    lines = (folder / ROWS).read_bytes().split(b"\n")[:-1]
    measured = {}
    for number, line in enumerate(lines, 1):
        what = f"{folder / ROWS}, line {number}"
        with untrusted.of_its_form(what, f"it is not as `{form.command}` writes it"):
            result = form.of_json(json.loads(line))
            measured[form.subject(result)] = result
    return measured


def read_setting(folder: Path, form: Form[Any, Any]) -> dict[str, Any]:
    """setting.json of a folder.

    Raises:
        InvalidInputError: the folder has none, or it is not one of the command.
    """
    try:
        setting = untrusted.json_of(folder / SETTING, "the file")
    except InvalidInputError:
        setting = None
    if not isinstance(setting, dict) or setting.get("schema") != form.schema:
        raise InvalidInputError(
            f"{folder} is not a folder of `{form.command}`: it has no {SETTING} of schema "
            f"{form.schema}"
        )
    return setting


def _setting(folder: Path, form: Form[Any, Any], asked: dict[str, Any]) -> dict[str, Any]:
    if not (folder / SETTING).exists():
        if (folder / ROWS).stat().st_size:
            raise InvalidInputError(f"{folder} has a {ROWS} and no {SETTING}: choose another --out")
        setting: dict[str, Any] = {"schema": form.schema, "identity": asked}
        write_whole(folder / SETTING, json.dumps(setting, indent=2) + "\n")
        return setting
    setting = read_setting(folder, form)
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
