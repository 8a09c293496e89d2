"""Processes that are killed on purpose: started apart, seen through /proc with all they start."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

# A variable that children inherit, in any session and under any parent.
_MARK = "VICTIM_MARK"
_LOOKS_S = 0.02


class Victim:
    """A command that runs, and every process that it starts.

    Args:
        arguments: After ``python``.
        environment: Of the command, besides a mark that says which processes are its own.
        log: A file that gets what the command prints.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._mark = f"{_MARK}={secrets.token_hex(8)}".encode()
        name, _, value = self._mark.decode().partition("=")
        self._log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                env={**environment, name: value},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The ID of the command's process."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether the command has ended without being killed."""
        return self._process.poll() is not None

    def wait(self, seconds: float) -> int:
        """The exit code; killed, and an error, if it takes longer."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill_all()
            raise AssertionError(f"it ran for more than {seconds:.0f} s: see {self._log}") from None

    def ends_within(self, seconds: float) -> bool:
        """Whether the command ends within that time, for which this waits at most."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self, pid: int | None = None) -> None:
        """SIGKILL to the command, or to one of the processes that it started."""
        try:
            os.kill(self.pid if pid is None else pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # it has ended meanwhile
        if pid is None:
            self._process.wait()

    def kill_all(self) -> None:
        """SIGKILL to the command and all that it started."""
        for pid in [self.pid, *self.others()]:
            self.kill(pid)
        self._process.wait()

    def others(self) -> list[int]:
        """The running processes that the command started, without itself."""
        numbers = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) not in (os.getpid(), self.pid):
                try:
                    if self._mark in (entry / "environ").read_bytes().split(b"\0"):
                        numbers.append(int(entry.name))
                except OSError:  # it has ended, or is another user's
                    continue
        return numbers

    def orphans(self, seconds: float) -> tuple[list[str], float]:
        """What is left of a command that was killed, after at most so many seconds, and how long.

        Returns:
            The command lines of the processes that are still there, and the seconds that passed
            until there were none.
        """
        began = time.monotonic()
        while (left := self.others()) and time.monotonic() - began < seconds:
            time.sleep(_LOOKS_S)
        took = time.monotonic() - began
        lines = []
        for pid in left:
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
            except OSError:
                continue
            lines.append(f"{pid} {words.decode(errors='replace').strip()}")
        for pid in left:
            self.kill(pid)
        return lines, took

    def printed(self) -> str:
        """The end of its output."""
        return self._log.read_text(encoding="utf-8", errors="replace")[-3000:]
