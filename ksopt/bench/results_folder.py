"""The folder of `ksopt bench kernels`: a line per product, with the rows of all its ways."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ksopt.bench import results_log
from ksopt.bench.request import BenchRequest, Subject
from ksopt.bench.results import Row
from ksopt.bench.results_log import LogFormat, ResultsLog
from ksopt.measure.device import DeviceRecord
from ksopt.measure.roofline import Roofline

ROWS = results_log.ROWS
SCHEMA = "ksopt.bench/1"
CODE = (
    "ksopt.bench.benchmark",
    "ksopt.bench.implementations",
    "ksopt.bench.prepared_implementations",
)
"""The modules that a time can depend on, beside those of every benchmark."""
Rows = tuple[Row, ...]


def _subject(rows: Rows) -> Subject:
    return rows[0].subject


def _to_json(rows: Rows) -> Any:
    return [row.to_json() for row in rows]


def _of_json(value: Any) -> Rows:
    return tuple(Row.from_json(one) for one in value)


LOG_FORMAT = LogFormat("ksopt bench kernels", SCHEMA, _subject, _to_json, _of_json)


@contextmanager
def opened(
    folder: Path, request: BenchRequest, record: DeviceRecord
) -> Iterator[ResultsLog[Subject, Rows]]:
    """The folder's log; see `ksopt.bench.results_log.opened`."""
    with results_log.opened(folder, LOG_FORMAT, identity(request, record)) as results:
        yield results


def begin_run(
    results: ResultsLog[Subject, Rows], request: BenchRequest, record: DeviceRecord
) -> None:
    """Record a run in setting.json: its command and its device."""
    results.begin_run(request.command, record, rooflines=[])


def add_roofline(results: ResultsLog[Subject, Rows], roofline: Roofline) -> None:
    """Record the roofline that one GPU of this run measured."""
    results.run["rooflines"].append(asdict(roofline))
    results.write_setting()


def identity(request: BenchRequest, record: DeviceRecord) -> dict[str, Any]:
    """The values that all measurements of a folder share."""
    return results_log.identity(request.identity(), record, CODE)


def read_rows(folder: Path) -> dict[Subject, Rows]:
    """The rows of a folder by subject; see `ksopt.bench.results_log.read_lines`."""
    return results_log.read_lines(folder, LOG_FORMAT)


def read_setting(folder: Path) -> dict[str, Any]:
    """The setting.json of a folder; see `ksopt.bench.results_log.read_setting`."""
    return results_log.read_setting(folder, LOG_FORMAT)
