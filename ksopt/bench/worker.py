"""``python -m ksopt.bench.worker``: measures on one device the subjects that its parent sends."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ksopt import precision
from ksopt.bench import pool
from ksopt.bench.benchmark import Bench
from ksopt.bench.options import BenchOptions
from ksopt.bench.pool import Task
from ksopt.bench.request import BenchRequest, Subject
from ksopt.bench.results import Row
from ksopt.kernels.compile_ahead import Compilers
from ksopt.kernels.problem import is_exact
from ksopt.measure.roofline import Roofline
from ksopt.reference import is_batch_last
from ksopt.system.user_code import import_plugins

Progress = Roofline | list[Row]


def measure_with(
    request: BenchRequest,
    subjects: Sequence[Subject],
    devices: Sequence[str],
    is_over: Callable[[], bool],
) -> Generator[Progress, None, None]:
    """Measure each subject once, on several devices concurrently, with a process for each device.

    Args:
        request: of the benchmark.
        subjects: the request's remaining ones, in the order to measure.
        devices: torch's names; one process each.
        is_over: whether to start no further subject; those already started are waited for.

    Yields:
        The Roofline of each device, and the rows of each subject, as they come.

    Raises:
        KsoptError: a process failed.
    """
    options = asdict(request.options)
    tasks = [subject.to_json() for subject in subjects]
    for answer in pool.answers("ksopt.bench.worker", options, tasks, devices, is_over):
        if "roofline" in answer:
            yield Roofline(**answer["roofline"])
        elif "result" in answer:
            yield [Row.from_json(row) for row in answer["result"]]


def compile_for(subjects: Sequence[Subject], request: BenchRequest, compilers: Compilers) -> None:
    """Queue the kernels of subjects for compilation, in order."""
    with precision.fp32_products(request.fp32_products):
        for subject in subjects:
            for layout in request.layouts:
                kind = (request.torch_name, is_batch_last(layout), is_exact(request.torch_name))
                compilers.soon([subject.problem(*kind)], subject.batch)


class KernelsRunner:
    """Measures subjects; see `ksopt.bench.pool.TaskRunner`.

    Args:
        options: of the benchmark.
        device: torch's name.
    """

    def __init__(self, options: Mapping[str, Any], device: str) -> None:
        import_plugins(options.get("plugins", ()), sys.stderr)
        self._request = BenchRequest.of(BenchOptions(**options))
        self._bench = Bench(self._request, device)
        self.device = self._bench.device
        self.ready = {"roofline": asdict(self._bench.roofline)}

    def compile_ahead(self, tasks: Sequence[Task], compilers: Compilers) -> None:
        """Queue the kernels of tasks for compilation, in order."""
        compile_for([Subject.from_json(task) for task in tasks], self._request, compilers)

    def run(self, task: Task) -> dict[str, Any]:
        """The rows of a subject."""
        subject = Subject.from_json(task)
        return {"result": [row.to_json() for row in self._bench.measure(subject)]}


if __name__ == "__main__":
    sys.exit(pool.serve(KernelsRunner))
