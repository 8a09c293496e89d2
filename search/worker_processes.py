"""The processes that measure for a search: started, heard, replaced when killed, and ended."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch

from ksopt.errors import KsoptError
from ksopt.system.worker_process import Answer, WorkerProcess, ended

# Times that a killed process is replaced, in all: chains that kill are given up before.
_MOST_REPLACED = 10


def _worker(task: Mapping[str, Any] | None, hear: Answer) -> WorkerProcess:
    """A process that does a task of `ksopt.search.worker`, which None says will be sent later."""
    # Ctrl-C is for the parent: one that waits for its task does not hear it.
    worker = WorkerProcess("ksopt.search.worker", hear, own_session=task is None, patience_s=20.0)
    if task is not None:
        worker.send(task)
    return worker


def run(
    tasks: Sequence[Mapping[str, Any]],
    on_trial: Callable[[int, int], None],
    note: Callable[[str], None],
) -> bool:
    """Let a process do each task of trials, and replace those that are killed.

    Args:
        tasks: One for each process.
        on_trial: Called with the place of its share in the tasks and its number for each trial that
            ended.
        note: Called with what a person should know.

    Returns:
        Whether all trials were done in time.

    Raises:
        KsoptError: A process failed, or too many were killed.
        KeyboardInterrupt: Ctrl-C; the processes have ended.
    """
    answers: queue.Queue[tuple[int, Mapping[str, Any]]] = queue.Queue()
    in_time, replaced, working = True, 0, set(range(len(tasks)))
    with ExitStack() as stack:

        def start(slot: int) -> None:
            stack.enter_context(_worker(tasks[slot], lambda answer: answers.put((slot, answer))))

        for slot in working:
            start(slot)
        while working:
            slot, answer = answers.get()
            if "trial" in answer:
                on_trial(answer["share"], answer["trial"])
            elif "in_time" in answer:
                in_time &= answer["in_time"]
            elif "error" in answer:
                raise KsoptError(f"worker {slot + 1} on {tasks[slot]['device']}: {answer['error']}")
            elif answer["ended"] == 0:
                working.remove(slot)
            elif replaced < _MOST_REPLACED:
                replaced += 1
                note(f"worker {slot + 1} {ended(answer['ended'])}; another takes its place")
                start(slot)
            else:
                raise KsoptError(
                    f"{_MOST_REPLACED} workers were replaced, and one more "
                    f"{ended(answer['ended'])}: the study is kept, the same command goes on"
                )
    return in_time


class Spare:
    """A fresh process for one task, which may be started before the task is known.

    Args:
        early: Start it at once: its imports, some seconds, are then done when the task comes.
    """

    def __init__(self, early: bool = False) -> None:
        self._answers: queue.Queue[Mapping[str, Any]] = queue.Queue()
        self._worker = _worker(None, self._answers.put) if early else None

    @classmethod
    def of(cls, device: torch.device) -> Spare:
        """Started early where that does not take a core from what is measured: for a GPU."""
        return cls(early=device.type == "cuda")

    def ask(self, task: Mapping[str, Any]) -> Mapping[str, Any]:
        """The answer of the task.

        Raises:
            KsoptError: Its process failed.
        """
        if self._worker is None:
            self._worker = _worker(None, self._answers.put)
        self._worker.send(task)
        answer = self._answers.get()
        if "ended" in answer:
            raise KsoptError(f"the process of the {task['task']} {ended(answer['ended'])}")
        if "error" in answer:
            raise KsoptError(f"the {task['task']}: {answer['error']}")
        return answer

    def close(self) -> None:
        """End it."""
        if self._worker is not None:
            self._worker.close()

    def __enter__(self) -> Spare:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
