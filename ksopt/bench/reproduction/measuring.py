"""Measures tasks of a run on one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ksopt.bench import worker
from ksopt.bench.benchmark import Bench
from ksopt.bench.reproduction import models
from ksopt.bench.reproduction.energy import EnergyBench
from ksopt.bench.reproduction.request import PaperRequest, Part
from ksopt.bench.reproduction.tables_and_figures import ENERGY
from ksopt.bench.reproduction.tasks import Task
from ksopt.bench.request import BenchRequest
from ksopt.errors import KsoptError, first_line
from ksopt.kernels.compile_ahead import Compilers
from ksopt.measure.device_health import DeviceLostError, raise_if_lost


@dataclass(frozen=True)
class Answer:
    """The measurements of a task, as a process hands them over.

    Attributes:
        task: what was measured.
        result: as the log of its part stores it; None if it could not be measured.
        roofline: of the device, beside the first product in a dtype.
        failure: the reason there is no result.
    """

    task: Task
    result: Any
    roofline: dict[str, Any] | None = None
    failure: str = ""


class PaperBench:
    """Measures tasks on one device, one after the other.

    Args:
        request: of the run.
        device: torch's name of the device.
    """

    def __init__(self, request: PaperRequest, device: str) -> None:
        self._request, self._device = request, device
        # Of the part measured last: each holds an input as large as the largest so far.
        self._bench: tuple[Part, Bench | EnergyBench] | None = None
        self._requests: dict[str, BenchRequest] = {}  # by name of a part
        self._rooflines: set[str] = set()

    def compile_ahead(self, tasks: Sequence[Task], compilers: Compilers) -> None:
        """Queue the kernels of the products among tasks for compilation, in order."""
        for task in tasks:
            if task.is_product:
                request = self._request_of(task.part)
                worker.compile_for([task.product(self._request)], request, compilers)

    def measure(self, task: Task) -> Answer:
        """Check and measure a task. One that fails leaves the device to the next.

        Raises:
            DeviceLostError: the device no longer works.
        """
        try:
            return self._measured(task)
        except DeviceLostError:
            raise
        except (RuntimeError, KsoptError) as error:
            self._bench = None
            device = torch.device(self._device)
            raise_if_lost(device, task)
            if device.type == "cuda":
                torch.cuda.empty_cache()
            return Answer(task, None, failure=f"{type(error).__name__}: {first_line(error)}")

    def _measured(self, task: Task) -> Answer:
        part = task.part
        if not task.is_product:
            self._bench = None
            module = models.Subject(task.name, part.dtype)
            case = models.measure_case(self._request, module, self._device)
            return Answer(task, case.to_json())
        bench, subject = self._bench_of(part), task.product(self._request)
        if isinstance(bench, EnergyBench):
            return Answer(task, bench.measure(subject).to_json())
        roofline = None
        if part.dtype not in self._rooflines:
            self._rooflines.add(part.dtype)
            roofline = asdict(bench.roofline)
        return Answer(task, [row.to_json() for row in bench.measure(subject)], roofline)

    def _bench_of(self, part: Part) -> Bench | EnergyBench:
        if self._bench is None or self._bench[0] != part:
            self._bench = None  # frees its memory first
            request = self._request_of(part)
            if part.kind == ENERGY:
                self._bench = (part, EnergyBench(request, device=self._device))
            else:
                self._bench = (part, Bench(request, self._device))
        return self._bench[1]

    def _request_of(self, part: Part) -> BenchRequest:
        if part.name not in self._requests:
            self._requests[part.name] = BenchRequest.of(self._request.bench_options(part))
        return self._requests[part.name]
