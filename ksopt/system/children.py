"""Command lines of processes that end with their parent, however it ends, from their first moment.

A process that waits for the end of its input sees its parent's end only once it reads, and imports
take seconds, on a busy machine tens of them. On Linux the system can be asked for a signal instead.
It comes when the thread that started the process ends, so that thread has to wait for it. On other
systems these are plain command lines.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

# The parent may have ended before the system was asked.
_ASK = """
import ctypes, os, sys
parent, number = map(int, sys.argv[1:3])
del sys.argv[1:3]
ctypes.CDLL(None).prctl(1, number, 0, 0, 0)  # PR_SET_PDEATHSIG
if os.getppid() != parent:
    os._exit(1)
"""
_RUN = "import runpy\nrunpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)\n"
_BECOME = "os.execvp(sys.argv[1], sys.argv[1:])\n"


def module(name: str) -> list[str]:
    """As ``python -m``: runs a module, and is killed when its parent ends.

    Args:
        name: The module's.
    """
    if sys.platform != "linux":
        return [sys.executable, "-m", name]
    return [sys.executable, "-c", _ASK + _RUN, *_parent(signal.SIGKILL), name]


def program(words: Sequence[str]) -> list[str]:
    """As the words alone: runs a program, which is terminated (SIGTERM) when its parent ends."""
    if sys.platform != "linux":
        return list(words)
    plain = ("-I", "-S")  # nothing of the user's Python is wanted
    return [sys.executable, *plain, "-c", _ASK + _BECOME, *_parent(signal.SIGTERM), *words]


def end_all_in(folder: Path) -> None:
    """Kill the processes that run in a folder, which nobody else's do.

    A program that is killed leaves those that it has started, a compiler's for the time that they
    take.
    """
    while found := list(_running_in(folder)):
        for number in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        time.sleep(0.01)


def _running_in(folder: Path) -> Iterator[int]:
    place = folder.resolve()
    for entry in Path("/proc").glob("[0-9]*"):  # none but on Linux
        with contextlib.suppress(OSError):
            if (entry / "cwd").readlink() == place and int(entry.name) != os.getpid():
                yield int(entry.name)


def _parent(number: signal.Signals) -> list[str]:
    return [str(os.getpid()), str(int(number))]
