"""Runs `ksopt bench paper`: measures the pieces that its folders lack, and stores each one."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from ksopt.bench import run as kernels
from ksopt.bench.prepared_ways import DeviceLost
from ksopt.bench.reproduction import book, station, worker
from ksopt.bench.reproduction.catalogue import ENERGY, PRODUCTS
from ksopt.bench.reproduction.pieces import Piece, in_turns
from ksopt.bench.reproduction.request import PaperRequest, Part
from ksopt.bench.reproduction.station import Answer, Station
from ksopt.bench.request import BenchRequest
from ksopt.errors import InvalidInputError
from ksopt.kernels.compile_ahead import Compilers, Target
from ksopt.measure import device as devices
from ksopt.measure.energy import Meter
from ksopt.system import limits

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        left: names of the incomplete parts.
        is_interrupted: whether Ctrl-C ended it.
        remarks: parts that could not be measured, each with the reason.
        failures: pieces that could not be measured, each with the reason.
    """

    left: tuple[str, ...]
    is_interrupted: bool
    remarks: tuple[str, ...]
    failures: tuple[str, ...] = ()


def run_paper(
    request: PaperRequest,
    out: Path,
    *,
    workers: int = 1,
    minutes: float | None = None,
    progress: Progress = lambda _: None,
) -> Outcome:
    """Measure the pieces that the folders do not hold yet.

    Args:
        request: the parts to measure.
        out: the folder, with a subfolder for each part.
        workers: GPUs to measure on at once, with a process for each.
        minutes: after which no further piece begins.
        progress: called with a line of text after each piece.

    Raises:
        InvalidInputError: a folder holds other measurements, or there are fewer GPUs than workers.
        KsoptError: a device or a worker no longer works.
    """
    began = time.monotonic()
    limits.check_workers(workers)
    names = kernels.devices_of(request.device, workers)
    parts, remarks = _measurable(request)
    with ExitStack() as stack:
        record = devices.record(request.device)
        books = {
            part: stack.enter_context(book.opened(request, part, record, out)) for part in parts
        }
        left = in_turns(request, [piece for one in books.values() for piece in one.missing])
        for part in dict.fromkeys(piece.part for piece in left):
            books[part].begin_run()

        def is_over() -> bool:
            return minutes is not None and time.monotonic() - began >= 60 * minutes

        if workers == 1 or not left:
            answers = _here(request, left, is_over)
        else:
            answers = worker.measure_with(request, left, names, is_over)
        is_interrupted, failures = False, []
        try:
            for done, answer in enumerate(answers, 1):
                one = books[answer.piece.part]
                if answer.failure:
                    failures.append(f"{answer.piece}: {answer.failure}")
                else:
                    one.add(answer)
                left_s = (time.monotonic() - began) / done * (len(left) - done)
                progress(
                    f"{answer.piece} ({one.measured} of {one.total}); all: {done} of {len(left)}, "
                    f"{left_s / 60:.1f} min left"
                )
        except KeyboardInterrupt:
            is_interrupted = True
        finally:
            answers.close()
        incomplete = tuple(part.name for part, one in books.items() if one.missing)
    return Outcome(incomplete, is_interrupted, remarks, tuple(failures))


def _measurable(request: PaperRequest) -> tuple[list[Part], tuple[str, ...]]:
    """The parts that can be measured, and the reason for each other one."""
    parts, remarks = list(request.parts), []
    for part in request.parts:
        if part.kind == ENERGY:
            try:
                Meter(torch.device(request.device))
            except InvalidInputError as error:  # a GPU without a counter, or without NVML
                parts.remove(part)
                remarks.append(f"{part.name}: {error}")
        elif part.kind == PRODUCTS:
            kernels.check_memory(BenchRequest.of(request.bench_options(part)))
    return parts, tuple(remarks)


def _here(
    request: PaperRequest, pieces: Sequence[Piece], is_over: Callable[[], bool]
) -> Generator[Answer, None, None]:
    """Measure in this process."""
    bench = Station(request, request.device)
    with Compilers(Target.of(torch.device(request.device)) if pieces else None) as compilers:
        station.compile_for(request, pieces, compilers)
        for piece in pieces:
            if is_over():
                return
            try:
                answer = bench.measure(piece)
            except DeviceLost as error:
                if error.rows:
                    yield Answer(piece, [row.to_json() for row in error.rows])
                raise
            yield answer
