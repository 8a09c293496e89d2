"""Runs `ksopt bench kernels`: measures the missing subjects and stores each one."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ksopt.bench import results_folder, worker
from ksopt.bench.benchmark import Bench
from ksopt.bench.request import BenchRequest, Subject
from ksopt.bench.results import Line
from ksopt.errors import InvalidInputError
from ksopt.kernels.compile_ahead import Compilers, Target
from ksopt.measure import device as devices
from ksopt.measure.device_health import DeviceLostError
from ksopt.measure.roofline import Roofline
from ksopt.system import limits
from ksopt.system.plurals import counted

Progress = Callable[[int, int, Line], None]
"""(subjects done, subjects in all, the line just measured) -> None."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        folder: of the results.
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
    """Measure the subjects that the folder does not hold yet.

    Args:
        request: the subjects to measure.
        out: the folder; another run of the same request in it continues.
        workers: concurrent processes, each on its own GPU; on a CPU they disturb each other.
        timeout_s: seconds after which no further subject starts.
        progress: called after each subject.

    Returns:
        The outcome. Ctrl-C ends the run early and loses only the subject being measured.

    Raises:
        InvalidInputError: the folder holds other measurements, there are fewer GPUs than workers,
            or a product does not fit the memory.
        DeviceLostError, KsoptError: a device or a worker no longer works.
    """
    began = time.monotonic()
    limits.check_workers(workers)
    names = devices_of(request.device, workers)
    check_memory(request)
    with results_folder.opened(out, request, devices.record(request.device)) as results:
        missing = [subject for subject in request.subjects if subject not in results.measured]
        measured, stopped = 0, ""
        if not missing:
            return Outcome(out, stopped, measured)
        results_folder.begin_run(results, request, devices.record(request.device))

        def is_over() -> bool:
            return timeout_s is not None and time.monotonic() - began >= timeout_s

        if workers == 1:
            answers = _here(request, missing, is_over)
        else:
            answers = worker.measure_with(request, missing, names, is_over)
        try:
            for answer in answers:
                if isinstance(answer, Roofline):
                    results_folder.add_roofline(results, answer)
                    continue
                results.add(tuple(answer))
                measured += 1
                if progress is not None:
                    progress(len(results.measured), len(request.subjects), Line.of(answer))
            stopped = "timeout" if measured < len(missing) else ""
        except KeyboardInterrupt:
            stopped = "interrupted"
        except DeviceLostError as error:
            results.add(tuple(error.rows))
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


def check_memory(request: BenchRequest) -> None:
    """Raise for a product that does not fit a CPU's memory, which would end the process.

    On a GPU such a product gets a row with the reason, and the next is measured."""
    if torch.device(request.device).type != "cpu":
        return
    for one in request.subjects:
        outputs = one.problem(request.torch_name, batch_last=False).out_features
        features = (one.chain.in_features, outputs * (1 + one.epilogue.residual))
        weights = one.around.siblings * one.chain.nnz
        sizes = (features, weights, one.batch, request.dtype, request.device)
        limits.check_product(*sizes, f"chain {one.layer}")


def devices_of(device: str, workers: int) -> list[str]:
    """One device per worker, starting with the request's own.

    Args:
        device: of the request.
        workers: concurrent processes.

    Raises:
        InvalidInputError: there are fewer devices of its type than workers.
    """
    first = torch.device(device)
    if workers < 1:
        raise InvalidInputError(f"workers must be at least 1, got {workers}")
    if first.type == "cpu":
        return [device] * workers
    if first.type != "cuda":
        return _others_of(first, workers)
    start, here = first.index or 0, torch.cuda.device_count()
    if start + workers > here:
        raise InvalidInputError(
            f"workers {workers}: from {device} on there {_are(here - start, 'GPU')}, and each "
            "worker takes one of its own"
        )
    return [f"cuda:{index}" for index in range(start, start + workers)]


def _are(count: int, noun: str) -> str:
    return f"{'is' if count == 1 else 'are'} {counted(count, noun)}"


def _others_of(first: torch.device, workers: int) -> list[str]:
    """`devices_of` for a device that is neither a CPU nor a CUDA device."""
    several = [one for one in devices.available() if torch.device(one).type == first.type]
    several = several[several.index(str(first)) :]
    if workers > len(several):
        raise InvalidInputError(
            f"workers {workers}: from {first} on there {_are(len(several), 'device')}, and each "
            "worker takes one of its own"
        )
    return several[:workers]
