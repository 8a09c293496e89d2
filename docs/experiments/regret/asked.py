"""The processes of the devices, as the one that asks them sees them."""

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
        self._start()

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
        self._start()
        self.hello()

    def ask(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """What it answers.

        Raises:
            KsoptError: It failed, or ended.
        """
        self._worker.send(task)
        return self.answer()

    def ask_for_some(self, task: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """What it says of each chain, as it comes.

        Raises:
            KsoptError: It failed, or ended.
        """
        self._worker.send(task)
        while "row" in (answer := self.answer()):
            yield answer

    def answer(self) -> dict[str, Any]:
        """Its next answer.

        Raises:
            KsoptError: It failed, or ended.
        """
        answer: dict[str, Any] = self._answers.get()
        if "ended" in answer:
            self._answers.put(answer)  # for whoever asks again
            code = answer["ended"]
            asked_to = -code in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
            raise ProcessEndedError(
                f"the process on {self.device} {worker_process.ended(code)}", blames=not asked_to
            )
        if "lost" in answer:
            raise ProcessEndedError(f"{self.device}: {answer['lost']}", blames=False)
        if "error" in answer:
            raise KsoptError(f"{self.device}: {answer['error']}")
        return answer

    def end(self) -> None:
        """End the process; what it was doing is done again."""
        self._worker.close()

    def _start(self) -> None:
        self._answers: queue.Queue[Any] = queue.Queue()
        # Ctrl-C is for this process, which then ends them.
        self._worker = WorkerProcess(
            MODULE, self._answers.put, own_session=True, patience_s=10.0, folder=FOLDER
        )
        self._worker.send(self._first)

    def __enter__(self) -> Asked:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()
