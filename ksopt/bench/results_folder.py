"""A folder of `ksopt bench kernels`: a line a product, with the rows of all its ways."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ksopt.bench import journal
from ksopt.bench.journal import Form, Journal
from ksopt.bench.request import BenchRequest, Subject
from ksopt.bench.rows import Row
from ksopt.jit import source_digest
from ksopt.measure.device import DeviceRecord
from ksopt.measure.roofline import Roofline

ROWS = journal.ROWS
SCHEMA = "ksopt.bench/1"
# What a time can depend on. A change anywhere else (reports, search, documents) changes none.
_CODE = (
    *("ksopt.csrc", "ksopt.kernels", "ksopt.jit", "ksopt.measure"),
    *("ksopt.baselines", "ksopt.batched", "ksopt.epilogue", "ksopt.functional", "ksopt.ops"),
    *("ksopt.bench.benchmark", "ksopt.bench.entries", "ksopt.bench.prepared_ways"),
    "ksopt.precision",
)
Rows = tuple[Row, ...]


def _subject(rows: Rows) -> Subject:
    return rows[0].subject


def _to_json(rows: Rows) -> Any:
    return [row.to_json() for row in rows]


def _of_json(value: Any) -> Rows:
    return tuple(Row.from_json(one) for one in value)


FORM = Form("ksopt bench kernels", SCHEMA, _subject, _to_json, _of_json)


@contextmanager
def opened(
    folder: Path, request: BenchRequest, record: DeviceRecord
) -> Iterator[Journal[Subject, Rows]]:
    """See `ksopt.bench.journal.opened`."""
    with journal.opened(folder, FORM, identity(request, record)) as book:
        yield book


def begin_run(book: Journal[Subject, Rows], request: BenchRequest, record: DeviceRecord) -> None:
    """Note a run in setting.json: when it was asked for what, and on what device."""
    book.begin_run(request.command, record, rooflines=[])


def add_roofline(book: Journal[Subject, Rows], roofline: Roofline) -> None:
    """Note the ceilings that one GPU of this run measured."""
    book.run["rooflines"].append(asdict(roofline))
    book.keep_setting()


def identity(request: BenchRequest, record: DeviceRecord) -> dict[str, Any]:
    """What has to be the same for two measurements to stand in one folder."""
    return journal.identity(request.identity(), record, code_digest())


def code_digest() -> str:
    """Digest of every source that a time can depend on; `DeviceRecord` has the commit beside it."""
    return source_digest.digest(*_CODE)


def read_rows(folder: Path) -> dict[Subject, Rows]:
    """The rows of a folder by subject; see `ksopt.bench.journal.read_lines`."""
    return journal.read_lines(folder, FORM)


def read_setting(folder: Path) -> dict[str, Any]:
    """setting.json of a folder; see `ksopt.bench.journal.read_setting`."""
    return journal.read_setting(folder, FORM)
