"""Commands of the machine that report something."""

from __future__ import annotations

import subprocess


def first_line_of(*command: str) -> str | None:
    """The first line that a command prints; None if it cannot run, fails or prints nothing."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(ran.stdout.splitlines()), None)
