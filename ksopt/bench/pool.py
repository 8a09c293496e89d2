"""Processes that measure on several devices at once; they get their tasks from one queue."""

from __future__ import annotations

import queue
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ksopt.errors import KsoptError
from ksopt.system.worker_process import WorkerProcess, ended


@dataclass(frozen=True)
class Worker:
    """A process to start.

    Attributes:
        module: its module (`ksopt.system.worker_process`). It answers once when it is ready, and
            once for each task; ``{"error": sentence, ...}`` if it can do no more.
        device: torch's name of its device, for messages.
        first: the line that it gets first.
    """

    module: str
    device: str
    first: Mapping[str, Any]


def answers(
    workers: Sequence[Worker], tasks: Sequence[Mapping[str, Any]], is_over: Callable[[], bool]
) -> Generator[Mapping[str, Any], None, None]:
    """Start the workers, and give each the next task as soon as it is free.

    Args:
        workers: one process each.
        tasks: in the order to begin them.
        is_over: whether to begin no further task; those already begun are waited for.

    Yields:
        Every answer, as they come. What else a worker answers beside an error is yielded first.

    Raises:
        KsoptError: a worker failed.
    """
    heard: queue.Queue[tuple[int, Mapping[str, Any]]] = queue.Queue()
    left = list(reversed(tasks))
    with ExitStack() as stack:
        processes = [
            stack.enter_context(_started(number, worker, heard))
            for number, worker in enumerate(workers)
        ]
        working = set(range(len(processes)))
        while working:
            number, answer = heard.get()
            device = workers[number].device
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
    number: int, worker: Worker, heard: queue.Queue[tuple[int, Mapping[str, Any]]]
) -> WorkerProcess:
    """A started worker, whose answers go to the queue."""
    process = WorkerProcess(worker.module, lambda answer: heard.put((number, answer)))
    process.send(worker.first)
    return process
