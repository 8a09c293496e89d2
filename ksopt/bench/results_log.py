"""The folder of a benchmark as a log: each result is on disk before the next measurement starts.

``rows.jsonl`` gets one line per subject, written and synced before the next is measured; a line
that a killed process left half written is cut off. ``setting.json`` records the request and the
device; a folder refuses measurements of any other request or device.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

from ksopt import settings
from ksopt.errors import InvalidInputError
from ksopt.jit import source_digest
from ksopt.measure.device import DeviceRecord
from ksopt.system import untrusted
from ksopt.system.atomic_files import make_folder, remove_empty, write_whole
from ksopt.system.locks import Busy, lock_open_file
from ksopt.system.plurals import counted

ROWS = "rows.jsonl"
SETTING = "setting.json"
# The sources that the times of every benchmark can depend on; each adds its own. No other change
# (reports, search, docs) affects a time.
_CODE = (
    *("ksopt.csrc", "ksopt.kernels", "ksopt.jit", "ksopt.measure", "ksopt.ops"),
    *("ksopt.baselines", "ksopt.batched", "ksopt.functional", "ksopt.epilogue", "ksopt.precision"),
)
Subject = TypeVar("Subject")
Result = TypeVar("Result")


@dataclass(frozen=True)
class LogFormat(Generic[Subject, Result]):
    """The format of a benchmark's folder.

    Args:
        command: The command that writes the folder.
        schema: The schema of setting.json.
        subject: (result) -> its subject.
        to_json: (result) -> plain values, one line of the file.
        of_json: The inverse of ``to_json``.
    """

    command: str
    schema: str
    subject: Callable[[Result], Subject]
    to_json: Callable[[Result], Any]
    of_json: Callable[[Any], Result]


class ResultsLog(Generic[Subject, Result]):
    """The results of a folder, and the place to add more; open it with `opened`."""

    def __init__(
        self,
        folder: Path,
        log_format: LogFormat[Subject, Result],
        file: BinaryIO,
        setting: dict[str, Any],
    ) -> None:
        self.folder = folder
        self._log_format = log_format
        self._file = file
        self._setting = setting
        self.measured = read_lines(folder, log_format)

    def add(self, result: Result) -> None:
        """Store one subject's result; it is on disk when this returns."""
        line = json.dumps(self._log_format.to_json(result)) + "\n"
        self._file.write(line.encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        self.measured[self._log_format.subject(result)] = result

    def begin_run(self, command: str, record: DeviceRecord, **more: Any) -> None:
        """Record a run in setting.json: its command, its device, and ``more``."""
        run = {"command": command, "device": asdict(record), **more}
        self._setting.setdefault("runs", []).append(run)
        self.write_setting()

    @property
    def run(self) -> dict[str, Any]:
        """The entry of this run in setting.json; `write_setting` stores changes."""
        run: dict[str, Any] = self._setting["runs"][-1]
        return run

    def write_setting(self) -> None:
        """Write setting.json."""
        write_whole(self.folder / SETTING, json.dumps(self._setting, indent=2) + "\n")


@contextmanager
def opened(
    folder: Path, log_format: LogFormat[Subject, Result], expected: dict[str, Any]
) -> Iterator[ResultsLog[Subject, Result]]:
    """The folder's log, new or continued, locked until the end.

    Args:
        folder: of the log.
        log_format: its format.
        expected: the `identity` of the measurements.

    Raises:
        InvalidInputError: the folder cannot be written, another benchmark is running in it, or it
            holds other measurements; the sentence names the difference.
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
            setting = _setting(folder, log_format, expected)
        except InvalidInputError:
            if is_new:  # a refused run leaves no file
                (folder / ROWS).unlink()
            raise
        _cut_half_a_line(folder / ROWS)
        yield ResultsLog(folder, log_format, file, setting)


def _opened(path: Path) -> BinaryIO:
    """The file opened for appending; a symbolic link in its place is refused."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.fdopen(os.open(path, flags, 0o666), "ab")


def identity(
    request: Mapping[str, object], record: DeviceRecord, own_code: Sequence[str]
) -> dict[str, Any]:
    """The values that all measurements of a folder share, as JSON values.

    Args:
        request: the values of the request.
        record: of the device.
        own_code: the modules of this benchmark that a time can depend on.
    """
    machine = {
        "device name": record.name,
        "driver": record.driver,
        "torch": record.torch,
        "cuda": record.cuda,
        "threads": record.threads if record.type == "cpu" else None,
        "tuning": settings.tuning(),
        "code": source_digest.digest(*_CODE, *own_code),
    }
    read_back: dict[str, Any] = json.loads(json.dumps({**request, **machine}))
    return read_back


def read_lines(folder: Path, log_format: LogFormat[Subject, Result]) -> dict[Subject, Result]:
    """The results of a folder by subject, without a half-written last line.

    Raises:
        InvalidInputError: A line is not in the command's format.
    """
    lines = (folder / ROWS).read_bytes().split(b"\n")[:-1]
    measured = {}
    for number, line in enumerate(lines, 1):
        what = f"{folder / ROWS}, line {number}"
        with untrusted.of_its_form(what, f"it is not as `{log_format.command}` writes it"):
            result = log_format.of_json(json.loads(line))
            measured[log_format.subject(result)] = result
    return measured


def read_setting(folder: Path, log_format: LogFormat[Any, Any]) -> dict[str, Any]:
    """The contents of a folder's setting.json.

    Raises:
        InvalidInputError: the folder has none, or it is not in the command's format.
    """
    try:
        setting = untrusted.json_of(folder / SETTING, "the file")
    except InvalidInputError:
        setting = None
    if not isinstance(setting, dict) or setting.get("schema") != log_format.schema:
        raise InvalidInputError(
            f"{folder} is not a folder of `{log_format.command}`: it has no {SETTING} of schema "
            f"{log_format.schema}"
        )
    return setting


def _setting(
    folder: Path, log_format: LogFormat[Any, Any], expected: dict[str, Any]
) -> dict[str, Any]:
    if not (folder / SETTING).exists():
        if (folder / ROWS).stat().st_size:
            raise InvalidInputError(f"{folder} has a {ROWS} and no {SETTING}: choose another --out")
        setting: dict[str, Any] = {"schema": log_format.schema, "identity": expected}
        write_whole(folder / SETTING, json.dumps(setting, indent=2) + "\n")
        return setting
    setting = read_setting(folder, log_format)
    stored = setting["identity"]
    differing = [name for name in expected if expected[name] != stored.get(name)]
    if differing:
        pairs = ", ".join(_difference(name, stored.get(name), expected[name]) for name in differing)
        raise InvalidInputError(
            f"{folder} holds measurements of something else ({pairs}): their times cannot be "
            "compared; choose another --out"
        )
    return setting


def _difference(name: str, there: Any, here: Any) -> str:
    if name == "subjects":
        return (
            f"{counted(len(there or ()), 'product')} there and {len(here)} here, not the same ones"
        )
    return f"{name} {there} there and {here} here"


def _cut_half_a_line(path: Path) -> None:
    whole = path.read_bytes()
    end = whole.rfind(b"\n") + 1
    if end != len(whole):
        os.truncate(path, end)
