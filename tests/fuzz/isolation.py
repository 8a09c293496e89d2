"""Run a function in a separate process, forked from this one.

What is compiled there does not stay in memory, and what torch is left in by a failure hurts nobody.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any


class DiedError(Exception):
    """The process ended without an answer; the text says how."""


def apart(function: Callable[[], Any], seconds: float) -> Any:
    """The result of a function, run in a separate process.

    Args:
        function: its result is pickled.
        seconds: how long to wait.

    Raises:
        DiedError: it crashed, raised, or took too long.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _answer(function, writer)
    os.close(writer)
    try:
        answer = _read(reader, time.monotonic() + seconds)
    finally:
        os.close(reader)
        if stuck := not _has_ended(child):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if not answer:
        how = f"took more than {seconds:.0f} s" if stuck else "crashed"
        raise DiedError(f"the process {how}")
    result, error = pickle.loads(answer)
    if error:
        raise DiedError(error)
    return result


def _answer(function: Callable[[], Any], writer: int) -> None:
    """Write the answer and end at once: nothing of the other process's may run here."""
    try:
        try:
            answer = pickle.dumps((function(), ""))
        except Exception:
            answer = pickle.dumps((None, traceback.format_exc()))
        with os.fdopen(writer, "wb") as stream:
            stream.write(answer)
    finally:
        os._exit(0)


def _read(reader: int, end: float) -> bytes:
    """All that is written until the other end closes; nothing if time runs out."""
    parts = []
    while True:
        ready, _, _ = select.select([reader], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return b""
        part = os.read(reader, 1 << 16)
        if not part:
            return b"".join(parts)
        parts.append(part)


def _has_ended(child: int) -> bool:
    """Whether a process that has answered ends, as it should, soon."""
    for _ in range(200):
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(0.01)
    return False
