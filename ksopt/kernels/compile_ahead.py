"""Processes that compile kernels before they are measured, while the device is busy.

The first product of a problem compiles some ten kernels, a third of a second each: without help
that is most of a search's or a benchmark's time on a GPU. Both know what comes next, so these
processes fill the cache of compiled code on disk, from which the process that measures then reads.
They are processes, not threads: ranking tiles in the process that measures would take the
interpreter lock in the middle of a sample. They end with that process.

An error here occurs again where the kernel is used, and is reported there.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ksopt.errors import KsoptError
from ksopt.jit import arch, nvrtc
from ksopt.kernels import registry
from ksopt.kernels.problem import DeviceSpec, Problem, ProblemKey
from ksopt.system import worker_process
from ksopt.system.worker_process import WorkerProcess

# NVRTC gives up the interpreter while it compiles: threads share a process's imports.
_THREADS = 4
_MOST_PROCESSES = 8
_NICENESS = 15
# On fewer cores they would take from the process that measures, which compiles by itself.
_FEWEST_CORES = 4


@dataclass(frozen=True)
class Target:
    """The GPU that kernels are compiled for.

    Args:
        spec: The GPU that tiles are ranked for.
        arch: NVRTC's name of it, such as "sm_90a".
    """

    spec: DeviceSpec
    arch: str

    @classmethod
    def of(cls, device: torch.device) -> Target | None:
        """The target of a device; None where nothing is compiled: on a CPU, or without a driver."""
        if device.type != "cuda":
            return None
        index = torch.cuda.current_device() if device.index is None else device.index
        try:
            return cls(DeviceSpec.of_device(index), arch.of_device(index))
        except KsoptError:  # the product warns once, and runs by PyTorch
            return None

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Target:
        """The target from the JSON of its `dataclasses.asdict`."""
        spec = value["spec"] | {"capability": tuple(value["spec"]["capability"])}
        return cls(DeviceSpec(**spec), value["arch"])


@dataclass
class Compilers:
    """Processes that compile for one target; to be closed, or used as a context.

    Args:
        target: The GPU to compile for; None to do nothing.
        count: The number of processes; None for as many as the machine's cores allow.
    """

    target: Target | None = None
    count: int | None = None
    _queued: set[tuple[Problem, int]] = field(default_factory=set)
    _processes: list[WorkerProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.target is None:
            return
        count = affordable() if self.count is None else self.count
        self._processes = [_started(self.target) for _ in range(count)]
        self._turns = itertools.cycle(self._processes)

    def soon(self, problems: Iterable[Problem], batch: int) -> None:
        """Queue problems for compilation, in order, without those queued before.

        The factors of a problem come first: their kernels are chosen before they race with a launch
        that computes all of it.

        Args:
            problems: What will be measured.
            batch: Rows of x.
        """
        every = (one for whole in problems for one in (*whole.factors(), whole))
        for problem in every if self._processes else ():
            if (problem, batch) not in self._queued:
                self._queued.add((problem, batch))
                key = ProblemKey.of_problem(problem, batch)
                next(self._turns).send({"key": key.to_json(), "batch": batch})

    @property
    def at_work(self) -> bool:
        """Whether any process is running."""
        return bool(self._processes)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.close()
        self._processes = []

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def affordable(workers: int = 1) -> int:
    """The number of processes per worker that leaves a core to the one that measures.

    Example:
        >>> affordable(workers=10_000)
        0
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    cores //= workers
    return 0 if cores < _FEWEST_CORES else min(_MOST_PROCESSES, -(-(cores - 1) // _THREADS))


def sources(problem: Problem, batch: int, spec: DeviceSpec) -> list[str]:
    """Sources of the kernels that are timed for a problem, best predicted first.

    Args:
        problem: The problem to compute.
        batch: Rows of x.
        spec: Of the device that the kernels run on.
    """
    candidates = registry.candidates(problem, batch, spec)
    return list(dict.fromkeys(source for one in candidates for source in one.sources()))


def _started(target: Target) -> WorkerProcess:
    worker = WorkerProcess("ksopt.kernels.compile_ahead", own_session=True)
    worker.send(asdict(target))
    return worker


def _compile(source: str, target: Target) -> None:
    with contextlib.suppress(KsoptError):
        nvrtc.cubin(source, target.arch)


def main() -> int:
    """Compile for the problems on stdin, one per line, after a line with the target."""
    first = worker_process.first_task()
    if first is None:
        return 0  # the parent has ended
    if hasattr(os, "nice"):  # the process that measures goes first
        os.nice(_NICENESS)
    target = Target.from_json(first)
    jobs = worker_process.listen()
    with ThreadPoolExecutor(_THREADS) as pool:
        while True:
            job = jobs.get()
            kernels: list[str] = []
            with contextlib.suppress(Exception):
                problem = ProblemKey.from_json(job["key"]).problem
                kernels = sources(problem, job["batch"], target.spec)
            for source in kernels:
                pool.submit(_compile, source, target)


if __name__ == "__main__":
    sys.exit(main())
