"""The parent's handles of the processes that measure, one per device."""

from __future__ import annotations

import queue
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from ksopt.errors import KsoptError
from ksopt.system import worker_process
from ksopt.system.worker_process import WorkerProcess

MODULE = "regret.worker"
FOLDER = Path(__file__).parents[1]


class ProcessEndedError(KsoptError, RuntimeError):
    """A device's process has ended; another may replace it.

    Args:
        sentence: The cause.
        blames: Whether its task may be the cause: not if it reported a failure and ended by itself.
    """

    def __init__(self, sentence: str, blames: bool = True) -> None:
        super().__init__(sentence)
        self.blames = blames


class DeviceProcess:
    """A process on a device that runs tasks (`worker.py`).

    Args:
        device: torch's name.
        cores: The cores that it may use; all of them if empty.
        folder: Of the searches' files.
    """

    def __init__(self, device: str, cores: list[int], folder: str) -> None:
        self.device = device
        self._first = {"device": device, "cores": cores, "folder": folder}
        self._start()

    def hello(self) -> dict[str, Any]:
        """Wait until the process is ready; its description of the device.

        Raises:
            KsoptError: It failed, or ended.
        """
        return self.answer()

    def again(self) -> None:
        """Start another process in place of one that ended, and wait until it is ready.

        Raises:
            KsoptError: The new one failed or ended, too.
        """
        self.end()
        self._start()
        self.hello()

    def ask(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """Run a task, and return its answer.

        Raises:
            KsoptError: It failed, or ended.
        """
        self._worker.send(task)
        return self.answer()

    def ask_for_some(self, task: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Run a task over chains, and yield the answer for each chain as it comes.

        Raises:
            KsoptError: It failed, or ended.
        """
        self._worker.send(task)
        while "row" in (answer := self.answer()):
            yield answer

    def answer(self) -> dict[str, Any]:
        """Wait for the next answer.

        Raises:
            KsoptError: It failed, or ended.
        """
        answer: dict[str, Any] = self._answers.get()
        if "ended" in answer:
            self._answers.put(answer)  # for later calls
            code = answer["ended"]
            requested = -code in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
            raise ProcessEndedError(
                f"the process on {self.device} {worker_process.ended(code)}", blames=not requested
            )
        if "lost" in answer:
            raise ProcessEndedError(f"{self.device}: {answer['lost']}", blames=False)
        if "error" in answer:
            raise KsoptError(f"{self.device}: {answer['error']}")
        return answer

    def end(self) -> None:
        """End the process; its task must be run again."""
        self._worker.close()

    def _start(self) -> None:
        self._answers: queue.Queue[Any] = queue.Queue()
        # Ctrl-C reaches only this process, which then ends the worker.
        self._worker = WorkerProcess(
            MODULE, self._answers.put, own_session=True, patience_s=10.0, folder=FOLDER
        )
        self._worker.send(self._first)

    def __enter__(self) -> DeviceProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()
