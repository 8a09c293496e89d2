"""Worker processes that measure on several devices at once, and get their tasks from one queue.

The parent calls `answers`. A worker's module calls `serve`. Tasks and answers are JSON objects.
Only the parent writes to disk. A worker ends when its stdin does, so it does not outlive its
parent.
"""

from __future__ import annotations

import queue
import signal
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch

from ksopt.errors import KsoptError
from ksopt.kernels.compile_ahead import Compilers, Target, affordable
from ksopt.measure.device_health import DeviceLostError
from ksopt.system import worker_process
from ksopt.system.worker_process import WorkerProcess, ended

Task = Mapping[str, Any]


def answers(
    module: str,
    options: Mapping[str, Any],
    tasks: Sequence[Task],
    devices: Sequence[str],
    is_over: Callable[[], bool],
) -> Generator[Mapping[str, Any]]:
    """Start a worker for each device, and give each the next task as soon as it is free.

    Args:
        module: of the workers, which calls `serve`.
        options: of the benchmark.
        tasks: in the order to begin them.
        devices: torch's names.
        is_over: whether to begin no further task; those already begun are waited for.

    Yields:
        Every answer, as they come: of each worker one when it is ready, then one for each task.
        What a worker answers beside an error is yielded before the error is raised.

    Raises:
        KsoptError: a worker failed.
    """
    received: queue.Queue[tuple[int, Mapping[str, Any]]] = queue.Queue()
    left = list(reversed(tasks))
    with ExitStack() as stack:
        processes = [
            stack.enter_context(_started(module, number, received))
            for number in range(len(devices))
        ]
        for number, process in enumerate(processes):
            first = {
                "options": options,
                "device": devices[number],
                # The shares are about even, and each kernel is compiled once, by any of them.
                "ahead": tasks[number :: len(devices)],
                "workers": len(devices),
            }
            process.send(first)
        working = set(range(len(processes)))
        while working:
            number, answer = received.get()
            device = devices[number]
            if "error" in answer:
                yield {name: value for name, value in answer.items() if name != "error"}
                raise KsoptError(f"{device}: {answer['error']}")
            if "ended" in answer:
                code = answer["ended"]
                raise KsoptError(f"{device}: the process that measured on it {ended(code)}")
            yield answer
            if left and not is_over():
                processes[number].send(left.pop())
            else:
                working.remove(number)


def _started(
    module: str, number: int, received: queue.Queue[tuple[int, Mapping[str, Any]]]
) -> WorkerProcess:
    """A started worker, whose answers go to the queue."""
    return WorkerProcess(module, lambda answer: received.put((number, answer)))


class TaskRunner(Protocol):
    """The work of one worker process."""

    @property
    def device(self) -> torch.device:
        """The device that it measures on."""

    @property
    def ready(self) -> Mapping[str, Any]:
        """What the worker answers before its first task."""

    def compile_ahead(self, tasks: Sequence[Task], compilers: Compilers) -> None:
        """Queue the kernels of tasks for compilation, in order."""

    def run(self, task: Task) -> Mapping[str, Any]:
        """Measure a task. The answer has its measurements as "result".

        Raises:
            DeviceLostError: the device no longer works.
        """


def serve(start: Callable[[Mapping[str, Any], str], TaskRunner]) -> int:
    """Run the tasks that the parent's `answers` sends; return the exit code of this process.

    Args:
        start: (options of the benchmark, torch's name of the device) -> what runs the tasks.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends this
    answer = worker_process.answers()
    first = worker_process.first_task()
    if first is None:
        return 0  # the parent has ended
    tasks = worker_process.listen()
    task: Task = {}
    try:
        runner = start(first["options"], first["device"])
        with Compilers(Target.of(runner.device), affordable(first["workers"])) as compilers:
            runner.compile_ahead(first["ahead"], compilers)
            answer(runner.ready)
            while True:
                task = tasks.get()
                answer({**task, **runner.run(task)})
    except DeviceLostError as error:
        rows = [row.to_json() for row in error.rows]
        answer({"error": str(error), **({**task, "result": rows} if rows else {})})
    except Exception as error:  # the parent tells the user
        answer({"error": f"{type(error).__name__}: {error}"})
    return 1
