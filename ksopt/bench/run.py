"""A benchmark from request to files: measure what is missing, keep each subject, report."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ksopt.bench import results_folder, worker
from ksopt.bench.benchmark import Bench
from ksopt.bench.prepared_ways import DeviceLost
from ksopt.bench.request import BenchRequest, Subject
from ksopt.bench.rows import Line
from ksopt.errors import InvalidInputError
from ksopt.kernels.compile_ahead import Compilers, Target
from ksopt.measure import device as devices
from ksopt.measure.roofline import Roofline
from ksopt.system import limits

Progress = Callable[[int, int, Line], None]
"""(subjects done, subjects in all, the line just measured) -> nothing."""


@dataclass(frozen=True)
class Outcome:
    """What a run left.

    Attributes:
        folder: where.
        stopped: "" if every subject is measured, else "timeout" or "interrupted".
        measured: subjects measured in this run.
    """

    folder: Path
    stopped: str
    measured: int


def run_bench(
    request: BenchRequest,
    out: Path,
    *,
    workers: int = 1,
    timeout_s: float | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Measure what the folder does not hold yet.

    Args:
        request: what to measure.
        out: the folder; a run of the same request in the same folder goes on.
        workers: processes that measure at once, each on a GPU of its own; on a CPU they disturb
            each other.
        timeout_s: seconds after which no further subject is begun.
        progress: called after each subject.

    Returns:
        What was done. Ctrl-C ends it early, and loses the subject under way only.

    Raises:
        InvalidInputError: the folder holds something else, there are fewer GPUs than workers, or
            a product does not fit the memory.
        DeviceLost, KsoptError: a device or a worker no longer works.
    """
    began = time.monotonic()
    limits.check_workers(workers)
    names = _devices(request, workers)
    _check_memory(request)
    with results_folder.opened(out, request, devices.record(request.device)) as book:
        missing = [subject for subject in request.subjects if subject not in book.measured]
        measured, stopped = 0, ""
        if not missing:
            return Outcome(out, stopped, measured)
        results_folder.begin_run(book, request, devices.record(request.device))

        def is_over() -> bool:
            return timeout_s is not None and time.monotonic() - began >= timeout_s

        if workers == 1:
            answers = _here(request, missing, is_over)
        else:
            answers = worker.measure_with(request, missing, names, is_over)
        try:
            for answer in answers:
                if isinstance(answer, Roofline):
                    results_folder.add_roofline(book, answer)
                    continue
                book.add(tuple(answer))
                measured += 1
                if progress is not None:
                    progress(len(book.measured), len(request.subjects), Line.of(answer))
            stopped = "timeout" if measured < len(missing) else ""
        except KeyboardInterrupt:
            stopped = "interrupted"
        except DeviceLost as error:
            book.add(tuple(error.rows))
            raise
        finally:
            answers.close()
    return Outcome(out, stopped, measured)


def _here(
    request: BenchRequest, subjects: Sequence[Subject], is_over: Callable[[], bool]
) -> Generator[worker.Progress, None, None]:
    """Measure in this process."""
    bench = Bench(request)
    yield bench.roofline
    with Compilers(Target.of(bench.device)) as compilers:
        worker.compile_for(subjects, request, compilers)
        for subject in subjects:
            if is_over():
                return
            yield bench.measure(subject)


def _check_memory(request: BenchRequest) -> None:
    """Refuse what would end the process: on a GPU a product that does not fit gets a row that says
    so, and the next is measured."""
    if torch.device(request.device).type != "cpu":
        return
    for one in request.subjects:
        features = (one.chain.in_features, one.chain.out_features)
        sizes = (features, one.chain.nnz, one.batch, request.dtype, request.device)
        limits.check_product(*sizes, f"chain {one.chain}")


def _devices(request: BenchRequest, workers: int) -> list[str]:
    """One device a worker, from the request's own on."""
    first = torch.device(request.device)
    if workers < 1:
        raise InvalidInputError(f"workers must be at least 1, got {workers}")
    if first.type == "cpu":
        return [request.device] * workers
    start, here = first.index or 0, torch.cuda.device_count()
    if start + workers > here:
        raise InvalidInputError(
            f"workers {workers}: from {request.device} on there are {here - start} GPUs, and each "
            "worker takes one of its own"
        )
    return [f"cuda:{index}" for index in range(start, start + workers)]
