"""Whether a process of this machine still lives, told by its number, its start, and the boot.

A number alone is not enough: the system gives it to another process after a while, and a container
counts its processes anew.
"""

from __future__ import annotations

import hashlib
import os
import re
from functools import cache
from pathlib import Path

_NAME = re.compile(r"([0-9]+)-([0-9a-f]{8})-([0-9]+)-[0-9a-f]+")


def name(letters: str) -> str:
    """Of this process, as no other has it: made of its number, where and when it began, and chance.

    Args:
        letters: Random hexadecimal digits.
    """
    pid = os.getpid()
    place, start = _place(), _start(pid)
    return (
        f"{pid}-{letters}" if place is None or start is None else f"{pid}-{place}-{start}-{letters}"
    )


def has_ended(name: str) -> bool | None:
    """Whether the process of a name has ended; None if that cannot be told from here."""
    match = _NAME.fullmatch(name)
    if match is None or match[2] != _place():
        return None
    pid = int(match[1])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # it is there, and another user's
    start = _start(pid)
    return None if start is None else start != match[3]


@cache
def _place() -> str | None:
    """Eight hexadecimal digits for this boot of this machine, and for the container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        space = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return None
    return hashlib.sha256(f"{boot} {space}".encode()).hexdigest()[:8]


def _start(pid: int) -> str | None:
    """When a process began, in ticks since the boot; None where the system does not tell.

    What has ended and waits for its parent has no start: it does nothing any more.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field, the command, may hold spaces and brackets.
    fields = text.rpartition(")")[2].split()
    return "ended" if fields[0] in "ZX" else fields[19]
