"""Runs `ksopt bench paper`: each part measures the subjects missing from its folder."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ksopt.bench import run as kernels
from ksopt.bench.reproduction import cases, energy, models
from ksopt.bench.reproduction.catalogue import ENERGY, PRODUCTS
from ksopt.bench.reproduction.energy import EnergyBench
from ksopt.bench.reproduction.models import Subject
from ksopt.bench.reproduction.request import PaperRequest, Part
from ksopt.bench.request import BenchRequest
from ksopt.errors import InvalidInputError
from ksopt.measure import device as devices

Progress = Callable[[str], None]


class Clock:
    """The remaining time, divided evenly among the remaining parts.

    Args:
        seconds: in all; None for no limit.
        parts: number of parts.
    """

    def __init__(self, seconds: float | None, parts: int) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds
        self._parts = parts

    def next_share_s(self) -> float | None:
        """Seconds of the next part: the remaining time over the number of remaining parts."""
        if self._end is None:
            return None
        share = max(self._end - time.monotonic(), 0.0) / max(self._parts, 1)
        self._parts -= 1
        return share


class Eta:
    """Reports the remaining minutes of a part, assuming equal time per piece."""

    def __init__(self, name: str, progress: Progress) -> None:
        self._name, self._progress = name, progress
        self._began, self._done = time.monotonic(), 0

    def __call__(self, done: int, total: int, what: str) -> None:
        """Report one finished piece."""
        self._done += 1
        left_s = (time.monotonic() - self._began) / self._done * (total - done)
        self._progress(f"{self._name}: {done} of {total}, {left_s / 60:.1f} min left: {what}")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        left: names of the incomplete parts.
        is_interrupted: whether Ctrl-C ended it.
        remarks: parts that could not be measured, each with the reason.
    """

    left: tuple[str, ...]
    is_interrupted: bool
    remarks: tuple[str, ...]


def run_paper(
    request: PaperRequest,
    out: Path,
    *,
    workers: int = 1,
    minutes: float | None = None,
    progress: Progress = lambda _: None,
) -> Outcome:
    """Measure the subjects that the folders do not hold yet.

    Args:
        request: the parts to measure.
        out: the folder, with a subfolder for each part.
        workers: GPUs on which products are measured concurrently.
        minutes: in all; the unused time of a part goes to later ones.
        progress: called with a line of text after each piece.

    Raises:
        InvalidInputError: a folder holds other measurements, or there are fewer GPUs than workers.
        KsoptError: a device or a worker no longer works.
    """
    clock = Clock(None if minutes is None else 60 * minutes, len(request.parts))
    left, remarks = [], []
    try:
        for part in request.parts:
            seconds = clock.next_share_s()
            if part.kind == PRODUCTS:
                is_done = _products(request, part, out / part.name, workers, seconds, progress)
            elif part.kind == ENERGY:
                try:
                    meter = EnergyBench(BenchRequest.of(request.bench_options(part)))
                except InvalidInputError as error:  # a GPU without a counter, or without NVML
                    remarks.append(f"{part.name}: {error}")
                    continue
                is_done = _energy(request, part, meter, out / part.name, seconds, progress)
            else:
                is_done = _models(request, part, out / part.name, seconds, progress)
            if not is_done:
                left.append(part.name)
    except KeyboardInterrupt:
        return Outcome((*left, part.name), True, tuple(remarks))
    return Outcome(tuple(left), False, tuple(remarks))


def _products(
    request: PaperRequest,
    part: Part,
    folder: Path,
    workers: int,
    seconds: float | None,
    progress: Progress,
) -> bool:
    eta = Eta(part.name, progress)
    done = kernels.run_bench(
        BenchRequest.of(request.bench_options(part)),
        folder,
        workers=workers,
        timeout_s=seconds,
        progress=lambda done, total, line: eta(done, total, str(line.subject)),
    )
    if done.stopped == "interrupted":
        raise KeyboardInterrupt
    return not done.stopped


def _energy(
    request: PaperRequest, part: Part, bench: EnergyBench, folder: Path, seconds: float | None,
    progress: Progress,
) -> bool:  # fmt: skip
    kernels_request = BenchRequest.of(request.bench_options(part))
    eta, began = Eta(part.name, progress), time.monotonic()
    with energy.opened(folder, kernels_request) as book:
        missing = [subject for subject in kernels_request.subjects if subject not in book.measured]
        if missing:
            book.begin_run(request.command, devices.record(request.device))
        for place, subject in enumerate(missing):
            if seconds is not None and time.monotonic() - began >= seconds:
                return False
            book.add(bench.measure(subject))
            done = len(kernels_request.subjects) - len(missing) + place + 1
            eta(done, len(kernels_request.subjects), str(subject))
    return True


def _models(
    request: PaperRequest, part: Part, folder: Path, seconds: float | None, progress: Progress
) -> bool:
    subjects = [Subject(name, part.dtype) for name in cases.names(part.kind)]
    eta, began = Eta(part.name, progress), time.monotonic()
    with models.opened(folder, request) as book:
        missing = [subject for subject in subjects if subject not in book.measured]
        if missing:
            book.begin_run(request.command, devices.record(request.device))
        for place, subject in enumerate(missing):
            if seconds is not None and time.monotonic() - began >= seconds:
                return False
            book.add(models.measure_case(request, subject))
            eta(len(subjects) - len(missing) + place + 1, len(subjects), subject.name)
    return True
