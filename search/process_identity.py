"""Identity of a process of this machine: its number, its start, and the boot.

A number alone is not enough: the system reuses it after a while, and a container has numbers of its
own.
"""

from __future__ import annotations

import hashlib
import os
import re
from functools import cache
from pathlib import Path

_NAME = re.compile(r"([0-9]+)-([0-9a-f]{8})-([0-9]+)-[0-9a-f]+")


def name(letters: str) -> str:
    """A unique name of this process, from its number, place and start, and random digits.

    Args:
        letters: Random hexadecimal digits.
    """
    pid = os.getpid()
    place, start = _place(), _start(pid)
    return (
        f"{pid}-{letters}" if place is None or start is None else f"{pid}-{place}-{start}-{letters}"
    )


def has_ended(name: str) -> bool | None:
    """Whether the process of a name has ended; None if that is unknown on this machine."""
    match = _NAME.fullmatch(name)
    if match is None or match[2] != _place():
        return None
    pid = int(match[1])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # it exists, and is another user's
    start = _start(pid)
    return None if start is None else start != match[3]


@cache
def _place() -> str | None:
    """Eight hexadecimal digits that identify this boot of this machine and the container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        space = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return None
    return hashlib.sha256(f"{boot} {space}".encode()).hexdigest()[:8]


def _start(pid: int) -> str | None:
    """Start of a process, in ticks since the boot; None if unknown.

    "ended" for a process that has ended and waits for its parent.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field, the command, may hold spaces and brackets.
    fields = text.rpartition(")")[2].split()
    return "ended" if fields[0] in "ZX" else fields[19]
