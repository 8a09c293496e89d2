"""The processes that measure for a search: started, heard, replaced when killed, and ended."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch

from ksopt.errors import KsoptError
from ksopt.system import children

# Times that a killed process is replaced, in all: chains that kill are given up before.
_MOST_REPLACED = 10
_PATIENCE_S = 20.0


class Worker:
    """A process that does a task; its answers go to ``hear``, the last one is ``{"ended": code}``.

    Args:
        task: What `ksopt.search.worker` is to do; None if that is said later, by `begin`.
        hear: Called from another thread with each answer.
    """

    def __init__(
        self, task: Mapping[str, Any] | None, hear: Callable[[Mapping[str, Any]], None]
    ) -> None:
        self._process = subprocess.Popen(
            children.module("ksopt.search.worker"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Ctrl-C is for the parent: one that waits for its task does not hear it.
            start_new_session=task is None,
        )
        self._hear = hear
        if task is not None:
            self.begin(task)
        threading.Thread(target=self._listen, daemon=True).start()

    def begin(self, task: Mapping[str, Any]) -> None:
        """Say what is to be done."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, and the thread that listens says so

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End it: politely, so that it can say that its trial was interrupted."""
        self._process.terminate()
        try:
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):  # it was killed in the midst of an answer
                self._hear(json.loads(line))
        self._hear({"ended": self._process.wait()})


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
            stack.enter_context(Worker(tasks[slot], lambda answer: answers.put((slot, answer))))

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
                note(f"worker {slot + 1} {_ended(answer['ended'])}; another takes its place")
                start(slot)
            else:
                raise KsoptError(
                    f"{_MOST_REPLACED} workers were replaced, and one more "
                    f"{_ended(answer['ended'])}: the study is kept, the same command goes on"
                )
    return in_time


class Spare:
    """A fresh process for one task, which may be started before the task is known.

    Args:
        early: Start it at once: its imports, some seconds, are then done when the task comes.
    """

    def __init__(self, early: bool = False) -> None:
        self._answers: queue.Queue[Mapping[str, Any]] = queue.Queue()
        self._worker = Worker(None, self._answers.put) if early else None

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
            self._worker = Worker(None, self._answers.put)
        self._worker.begin(task)
        answer = self._answers.get()
        if "ended" in answer:
            raise KsoptError(f"the process of the {task['task']} {_ended(answer['ended'])}")
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


def _ended(code: int) -> str:
    return f"was ended by signal {-code}" if code < 0 else f"ended with exit status {code}"
