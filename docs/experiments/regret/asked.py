"""The processes of the devices, as the one that asks them sees them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from ksopt.errors import KsoptError

_WORKER = Path(__file__).with_name("worker.py")


class ProcessEndedError(KsoptError, RuntimeError):
    """A device's process is gone; another may take its place.

    Args:
        sentence: What happened.
        blames: Whether what it was doing may be why: not where it said so and ended by itself.
    """

    def __init__(self, sentence: str, blames: bool = True) -> None:
        super().__init__(sentence)
        self.blames = blames


class Asked:
    """A process on a device that answers questions (`worker.py`).

    Args:
        device: torch's name of it.
        cores: It may use these; all of them if empty.
        folder: Of what searches keep.
    """

    def __init__(self, device: str, cores: list[int], folder: str) -> None:
        self.device = device
        self._first = {"device": device, "cores": cores, "folder": folder}
        self._process = self._started()

    def hello(self) -> dict[str, Any]:
        """What it says of itself once it is ready.

        Raises:
            KsoptError: It failed, or ended.
        """
        return self.answer()

    def again(self) -> None:
        """Start another process in the place of one that ended, and wait until it is ready.

        Raises:
            KsoptError: That one failed, or ended, too.
        """
        self.end()
        self._process.wait()
        self._process = self._started()
        self.hello()

    def ask(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """What it answers.

        Raises:
            KsoptError: It failed, or ended.
        """
        self._send(task)
        return self.answer()

    def ask_for_some(self, task: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """What it says of each chain, as it comes.

        Raises:
            KsoptError: It failed, or ended.
        """
        self._send(task)
        while "row" in (found := self.answer()):
            yield found

    def answer(self) -> dict[str, Any]:
        """Its next answer.

        Raises:
            KsoptError: It failed, or ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith("\n"):
            raise self._ended()
        found: dict[str, Any] = json.loads(line)
        if "lost" in found:
            raise ProcessEndedError(f"{self.device}: {found['lost']}", blames=False)
        if "error" in found:
            raise KsoptError(f"{self.device}: {found['error']}")
        return found

    def end(self) -> None:
        """End the process; what it was doing is done again."""
        self._process.terminate()

    def _ended(self) -> ProcessEndedError:
        code = self._process.wait()
        asked_to = -code in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit status {code}"
        return ProcessEndedError(f"the process on {self.device} {how}", blames=not asked_to)

    def _started(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for this process, which then ends them
        )
        self._tell(process, self._first)
        return process

    def _send(self, value: Mapping[str, Any]) -> None:
        if not self._tell(self._process, value):
            raise self._ended()

    @staticmethod
    def _tell(process: subprocess.Popen[str], value: Mapping[str, Any]) -> bool:
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(value) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            return False
        return True

    def __enter__(self) -> Asked:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()
        self._process.wait()
