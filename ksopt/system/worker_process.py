"""Worker processes: a module that reads tasks from stdin and answers on stdout, as JSON lines.

The parent holds a `WorkerProcess`; the module uses `first_task`, `listen` and `answers`. A worker
ends with its parent, however that ends (`ksopt.system.children`).
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

from ksopt.system import children

Answer = Callable[[Mapping[str, Any]], None]
"""Takes an answer."""


class WorkerProcess:
    """A worker, as its parent sees it.

    Args:
        module: The worker's module.
        hear: Called from another thread with each answer, and at last with ``{"ended": exit
            code}``. None for a worker that answers nothing: what it prints is dropped.
        own_session: Whether Ctrl-C in the terminal reaches the parent alone.
        patience_s: Seconds that a worker has to end by itself when it is closed; 0 to kill it at
            once.
        folder: Where the module is, if it is not one that is installed.
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
            children.module(module),
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
        """Send a line. A worker that has ended takes none, and says so by its last answer."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(value) + "\n")
            self._process.stdin.flush()  # and stays open: its end is the parent's

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone."""
        return self._process.poll() is not None

    def close(self) -> None:
        """End it."""
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
            with contextlib.suppress(ValueError):  # it was killed in the midst of an answer
                hear(json.loads(line))
        hear({"ended": self._process.wait()})


def ended(code: int) -> str:
    """A process's end, in words.

    Example:
        >>> ended(-9)
        'was ended by signal 9'
    """
    return f"was ended by signal {-code}" if code < 0 else f"ended with exit status {code}"


def answers() -> Answer:
    """What answers the parent. What libraries print goes to stderr from now on."""
    to_parent = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def answer(value: Mapping[str, Any]) -> None:
        to_parent.write(json.dumps(value) + "\n")
        to_parent.flush()

    return answer


def first_task() -> Any | None:
    """The first line that the parent sends; None if it sends none."""
    line = sys.stdin.readline()
    return json.loads(line) if line else None


def listen(code: int = 0) -> queue.SimpleQueue[Any]:
    """The lines that the parent sends from now on.

    Args:
        code: What the process exits with when the parent has ended, or is done.
    """
    lines: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(json.loads(line))
        os._exit(code)

    threading.Thread(target=read, daemon=True).start()
    return lines
