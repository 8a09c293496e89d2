"""Worker processes: modules that read tasks from stdin and answer on stdout, in JSON lines.

The parent holds a `WorkerProcess`; the module uses `first_task`, `listen` and `answers`. A worker
ends with its parent, however the parent ends (`ksopt.system.child_processes`).
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from ksopt.system import child_processes

Answer = Callable[[Mapping[str, Any]], None]
"""(answer) -> None."""


class WorkerProcess:
    """The parent's handle of a worker.

    Args:
        module: The worker's module.
        hear: Called from another thread with each answer, and at last with ``{"ended": exit
            code}``. None for a worker that does not answer: its output is dropped.
        own_session: Whether Ctrl-C in the terminal reaches only the parent.
        patience_s: Seconds that a closed worker has to end by itself; 0 kills it at once.
        folder: The folder of the module, if it is not installed.
    """

    def __init__(
        self,
        module: str,
        hear: Answer | None = None,
        own_session: bool = False,
        patience_s: float = 0.0,
        folder: Path | None = None,
    ) -> None:
        paths = [str(folder or ""), os.environ.get("PYTHONPATH", "")]
        added = {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
        self._patience_s = patience_s
        self._process = subprocess.Popen(
            child_processes.module(module),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL if hear is None else subprocess.PIPE,
            stderr=subprocess.DEVNULL if hear is None else None,
            text=True,
            start_new_session=own_session,
            env=None if folder is None else {**os.environ, **added},
        )
        if hear is not None:
            threading.Thread(target=self._listen, args=(hear,), daemon=True).start()

    def send(self, value: object) -> None:
        """Send a line; a worker that has ended ignores it, and its last answer reports its end."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(value) + "\n")
            self._process.stdin.flush()  # stdin stays open: its end signals the parent's end

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def close(self) -> None:
        """End the process."""
        if self._patience_s > 0:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(self._patience_s)
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _listen(self, hear: Answer) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):  # it was killed while answering
                hear(json.loads(line))
        hear({"ended": self._process.wait()})


def ended(code: int) -> str:
    """The end of a process, in words.

    Example:
        >>> ended(-9)
        'was ended by signal 9'
    """
    return f"was ended by signal {-code}" if code < 0 else f"ended with exit status {code}"


def answers() -> Answer:
    """A function that answers the parent; redirects the output of libraries to stderr."""
    to_parent = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def answer(value: Mapping[str, Any]) -> None:
        to_parent.write(json.dumps(value) + "\n")
        to_parent.flush()

    return answer


def first_task() -> Any | None:
    """The first task from the parent; None if it sends none."""
    line = sys.stdin.readline()
    return json.loads(line) if line else None


def listen(code: int = 0) -> queue.SimpleQueue[Any]:
    """A queue of the parent's further tasks.

    Args:
        code: The exit status of this process once the parent has ended or is done.
    """
    lines: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(json.loads(line))
        os._exit(code)

    threading.Thread(target=read, daemon=True).start()
    return lines
