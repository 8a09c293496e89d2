"""Worker processes of a search: start, communication, replacement if killed, and end."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch

from ksopt.errors import KsoptError
from ksopt.system.worker_process import Answer, WorkerProcess, ended

# Total replacements of killed processes: chains that kill are excluded earlier.
_MOST_REPLACED = 10


def _worker(task: Mapping[str, Any] | None, hear: Answer) -> WorkerProcess:
    """A process for a task of `ksopt.search.worker`; None: the task will be sent later."""
    # The parent handles Ctrl-C: a process that waits for its task must not receive it.
    worker = WorkerProcess("ksopt.search.worker", hear, own_session=task is None, patience_s=20.0)
    if task is not None:
        worker.send(task)
    return worker


def run(
    tasks: Sequence[Mapping[str, Any]],
    on_trial: Callable[[int, int], None],
    note: Callable[[str], None],
) -> bool:
    """Run each task of trials in a process, and replace killed processes.

    Args:
        tasks: One for each process.
        on_trial: Called with the index of its share and its number for each ended trial.
        note: Called with messages for the user.

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


class SpareProcess:
    """A fresh process for one task, which may be started before the task is known.

    Args:
        early: Start it at once: its imports, some seconds, are then complete when the task arrives.
    """

    def __init__(self, early: bool = False) -> None:
        self._answers: queue.Queue[Mapping[str, Any]] = queue.Queue()
        self._worker = _worker(None, self._answers.put) if early else None

    @classmethod
    def of(cls, device: torch.device) -> SpareProcess:
        """A process that is started early for a GPU, where it takes no core from measurements."""
        return cls(early=device.type == "cuda")

    def ask(self, task: Mapping[str, Any]) -> Mapping[str, Any]:
        """The answer to the task.

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
        """End the process."""
        if self._worker is not None:
            self._worker.close()

    def __enter__(self) -> SpareProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
