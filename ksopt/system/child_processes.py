"""Command lines of processes that end with their parent, from their start and however it ends.

A process that detects its parent's end by the end of its input does so only once it reads, and its
imports take seconds, on a busy machine tens of seconds. Linux can send a signal instead. The signal
comes when the thread that started the process ends, so that thread must wait for the process. On
other systems these are plain command lines.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

# The parent may have ended before prctl was called.
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
    """The command line that runs a module, as ``python -m``, and is killed when its parent ends.

    Args:
        name: Of the module.
    """
    if sys.platform != "linux":
        return [sys.executable, "-m", name]
    return [sys.executable, "-c", _ASK + _RUN, *_parent(signal.SIGKILL), name]


def program(words: Sequence[str]) -> list[str]:
    """The command line that runs a program and terminates it (SIGTERM) when its parent ends."""
    if sys.platform != "linux":
        return list(words)
    plain = ("-I", "-S")  # without the user's Python settings
    return [sys.executable, *plain, "-c", _ASK + _BECOME, *_parent(signal.SIGTERM), *words]


def end_all_in(folder: Path) -> None:
    """Kill the processes that run in a folder, which must be private to the caller.

    A killed program leaves the processes that it started, such as a compiler's, until they finish.
    """
    while numbers := list(_running_in(folder)):
        for number in numbers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        time.sleep(0.01)


def _running_in(folder: Path) -> Iterator[int]:
    place = folder.resolve()
    for entry in Path("/proc").glob("[0-9]*"):  # empty except on Linux
        with contextlib.suppress(OSError):
            if (entry / "cwd").readlink() == place and int(entry.name) != os.getpid():
                yield int(entry.name)


def _parent(number: signal.Signals) -> list[str]:
    return [str(os.getpid()), str(int(number))]
