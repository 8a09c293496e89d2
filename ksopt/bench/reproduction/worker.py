"""``python -m ksopt.bench.reproduction.worker``: measures on one device its parent's tasks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from ksopt.bench import pool
from ksopt.bench.reproduction.measuring import Answer, PaperBench
from ksopt.bench.reproduction.options import PaperOptions
from ksopt.bench.reproduction.request import PaperRequest, Part
from ksopt.bench.reproduction.tasks import Task
from ksopt.kernels.compile_ahead import Compilers


def measure_with(
    request: PaperRequest,
    tasks: Sequence[Task],
    devices: Sequence[str],
    is_over: Callable[[], bool],
) -> Generator[Answer, None, None]:
    """Measure each task once, on several devices at once, with a process for each device.

    Args:
        request: of the run.
        tasks: in the order to begin them.
        devices: torch's names; one process each.
        is_over: whether to begin no further task; those already begun are waited for.

    Raises:
        KsoptError: a process failed.
    """
    module, options = "ksopt.bench.reproduction.worker", asdict(request.options)
    sent = [{"part": task.part.name, "name": task.name} for task in tasks]
    for answer in pool.answers(module, options, sent, devices, is_over):
        if "result" in answer:
            task = _task(answer, request.parts)
            yield Answer(task, answer["result"], answer.get("roofline"), answer.get("failure", ""))


class PaperRunner:
    """Measures tasks; see `ksopt.bench.pool.TaskRunner`.

    Args:
        options: of the benchmark.
        device: torch's name.
    """

    ready: Mapping[str, Any] = {}

    def __init__(self, options: Mapping[str, Any], device: str) -> None:
        self._request = PaperRequest.of(PaperOptions(**options))
        self.device = torch.device(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._bench = PaperBench(self._request, device)

    def compile_ahead(self, tasks: Sequence[pool.Task], compilers: Compilers) -> None:
        """Queue the kernels of tasks for compilation, in order."""
        self._bench.compile_ahead([_task(one, self._request.parts) for one in tasks], compilers)

    def run(self, task: pool.Task) -> dict[str, Any]:
        """The measurements of a task, or the reason why there are none."""
        answer = self._bench.measure(_task(task, self._request.parts))
        return {"result": answer.result, "roofline": answer.roofline, "failure": answer.failure}


def _task(sent: Mapping[str, Any], parts: Sequence[Part]) -> Task:
    """The task of what was sent."""
    part = next(part for part in parts if part.name == sent["part"])
    return Task(part, sent["name"])


if __name__ == "__main__":
    sys.exit(pool.serve(PaperRunner))
