"""Runs `ksopt bench paper`: measures the tasks that its folders lack, and stores each one."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from ksopt.bench import run as kernels
from ksopt.bench.reproduction import part_log, worker
from ksopt.bench.reproduction.measuring import Answer, PaperBench
from ksopt.bench.reproduction.request import PaperRequest, Part
from ksopt.bench.reproduction.tables_and_figures import ENERGY, PRODUCTS
from ksopt.bench.reproduction.tasks import Task, in_turns
from ksopt.bench.request import BenchRequest
from ksopt.errors import InvalidInputError
from ksopt.kernels.compile_ahead import Compilers, Target
from ksopt.measure import device as devices
from ksopt.measure.device_health import DeviceLostError
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
        failures: tasks that could not be measured, each with the reason.
    """

    left: tuple[str, ...]
    is_interrupted: bool
    remarks: tuple[str, ...]
    failures: tuple[str, ...] = ()


def gpus_of(device: str) -> int:
    """The number of GPUs that a value of ``--device`` stands for; 1 where it names one device.

    Example:
        >>> gpus_of("cuda:1"), gpus_of("cpu")
        (1, 1)
    """
    return max(1, torch.cuda.device_count()) if device in ("auto", "cuda") else 1


def run_paper(
    request: PaperRequest,
    out: Path,
    *,
    workers: int = 1,
    minutes: float | None = None,
    progress: Progress = lambda _: None,
) -> Outcome:
    """Measure the tasks that the folders do not hold yet.

    Args:
        request: the parts to measure.
        out: the folder, with a subfolder for each part.
        workers: GPUs to measure on at once, with a process for each.
        minutes: after which no further task begins.
        progress: called with a line of text after each task.

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
        logs = {
            part: stack.enter_context(part_log.opened(request, part, record, out)) for part in parts
        }
        left = in_turns(request, [task for one in logs.values() for task in one.missing])
        for part in dict.fromkeys(task.part for task in left):
            logs[part].begin_run()

        def is_over() -> bool:
            return minutes is not None and time.monotonic() - began >= 60 * minutes

        if workers == 1 or not left:
            answers = _here(request, left, is_over)
        else:
            answers = worker.measure_with(request, left, names, is_over)
        is_interrupted, failures = False, []
        try:
            for done, answer in enumerate(answers, 1):
                one = logs[answer.task.part]
                if answer.failure:
                    failures.append(f"{answer.task}: {answer.failure}")
                else:
                    one.add(answer)
                left_s = (time.monotonic() - began) / done * (len(left) - done)
                progress(
                    f"{answer.task} ({one.measured} of {one.total}); all: {done} of {len(left)}, "
                    f"{left_s / 60:.1f} min left"
                )
        except KeyboardInterrupt:
            is_interrupted = True
        finally:
            answers.close()
        incomplete = tuple(part.name for part, one in logs.items() if one.missing)
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
    request: PaperRequest, tasks: Sequence[Task], is_over: Callable[[], bool]
) -> Generator[Answer, None, None]:
    """Measure in this process."""
    bench = PaperBench(request, request.device)
    with Compilers(Target.of(torch.device(request.device)) if tasks else None) as compilers:
        bench.compile_ahead(tasks, compilers)
        for task in tasks:
            if is_over():
                return
            try:
                answer = bench.measure(task)
            except DeviceLostError as error:
                if error.rows:
                    yield Answer(task, [row.to_json() for row in error.rows])
                raise
            yield answer
