"""The log of a part of a run: its measured tasks, its missing ones, and a place for more."""

from __future__ import annotations

from collections.abc import Generator, Hashable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ksopt.bench import results_folder
from ksopt.bench.reproduction import energy, models
from ksopt.bench.reproduction.measuring import Answer
from ksopt.bench.reproduction.request import PaperRequest, Part
from ksopt.bench.reproduction.tables_and_figures import ENERGY, PRODUCTS
from ksopt.bench.reproduction.tasks import Task, tasks_of
from ksopt.bench.request import BenchRequest
from ksopt.bench.results_log import LogFormat, ResultsLog
from ksopt.measure.device import DeviceRecord
from ksopt.measure.roofline import Roofline


@dataclass(frozen=True)
class PartLog:
    """The results of a part and the tasks that it lacks; open it with `opened`.

    Attributes:
        request: of the run.
        part: whose results it holds.
        record: of the device.
        log: of the folder.
        log_format: of the log.
    """

    request: PaperRequest
    part: Part
    record: DeviceRecord
    log: ResultsLog[Any, Any]
    log_format: LogFormat[Any, Any]

    @property
    def missing(self) -> list[Task]:
        """The tasks that are not measured yet, in order."""
        tasks = tasks_of(self.part)
        return [task for task in tasks if self._subject(task) not in self.log.measured]

    @property
    def total(self) -> int:
        """The number of the part's tasks."""
        return len(tasks_of(self.part))

    @property
    def measured(self) -> int:
        """The number of its measured tasks."""
        return self.total - len(self.missing)

    def begin_run(self) -> None:
        """Record a run: its command and its device."""
        if self.part.kind == PRODUCTS:
            own = BenchRequest.of(self.request.bench_options(self.part))
            results_folder.begin_run(self.log, own, self.record)
        else:
            self.log.begin_run(self.request.command, self.record)

    def add(self, answer: Answer) -> None:
        """Store what was measured; it is on disk when this returns."""
        if answer.roofline is not None:
            results_folder.add_roofline(self.log, Roofline(**answer.roofline))
        self.log.add(self.log_format.of_json(answer.result))

    def _subject(self, task: Task) -> Hashable:
        if task.is_product:
            return task.product(self.request)
        return models.Subject(task.name, self.part.dtype)


@contextmanager
def opened(
    request: PaperRequest, part: Part, record: DeviceRecord, out: Path
) -> Generator[PartLog]:
    """The log of a part, locked until the end; see `ksopt.bench.results_log.opened`.

    Args:
        request: of the run.
        part: of the request.
        record: of the device.
        out: the run's folder, which holds the part's own.
    """
    folder = out / part.name
    if part.kind == PRODUCTS:
        own = BenchRequest.of(request.bench_options(part))
        with results_folder.opened(folder, own, record) as log:
            yield PartLog(request, part, record, log, results_folder.LOG_FORMAT)
    elif part.kind == ENERGY:
        own = BenchRequest.of(request.bench_options(part))
        with energy.opened(folder, own, record) as energies:
            yield PartLog(request, part, record, energies, energy.LOG_FORMAT)
    else:
        with models.opened(folder, request, record) as cases:
            yield PartLog(request, part, record, cases, models.LOG_FORMAT)
