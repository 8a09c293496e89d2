"""Processes that compile the kernels of the chains that come next, while the device is busy.

A first look at a chain compiles some ten kernels a factor, a third of a second each: without help
that is most of a search's time on a GPU. What comes next is known a few chains ahead
(`ksopt.search.trial_loop`), so these processes fill the cache of compiled code on disk, and the
process that measures finds it full. They are processes, because ranking tiles in the one that
measures would take the interpreter from it in the middle of a sample. They end with it.

Whatever goes wrong here is met again, and reported, where the kernel is used.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ksopt import precision
from ksopt.errors import KsoptError
from ksopt.jit import nvrtc
from ksopt.kernels.problem import DeviceSpec, Problem
from ksopt.patterns.chain import Chain, Pattern
from ksopt.search.layer_request import LayerRequest
from ksopt.system import children

CHAINS_AHEAD = 4
"""Chains that are known before they are measured: some ten factors are compiled side by side."""
# NVRTC gives up the interpreter while it compiles: threads share a process's imports.
_THREADS = 4
_MOST_PROCESSES = 8
# On fewer cores they would take from the process that measures, which compiles by itself.
_FEWEST_CORES = 4


@dataclass(frozen=True)
class Target:
    """What kernels are compiled for.

    Args:
        machine: What their tiles are ranked for.
        arch: NVRTC's name of it, such as "sm_90a".
    """

    machine: DeviceSpec
    arch: str

    @classmethod
    def of(cls, device: torch.device) -> Target | None:
        """That of a device; None where nothing is compiled: on a CPU, or without a driver."""
        if device.type != "cuda":
            return None
        from ksopt.jit import arch

        index = torch.cuda.current_device() if device.index is None else device.index
        try:
            return cls(DeviceSpec.of_device(index), arch.of_device(index))
        except KsoptError:  # the product says so once, and takes PyTorch's ways
            return None

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {"machine": asdict(self.machine), "arch": self.arch}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Target:
        """What `to_json` wrote."""
        machine = value["machine"] | {"capability": tuple(value["machine"]["capability"])}
        return cls(DeviceSpec(**machine), value["arch"])


@dataclass
class Compilers:
    """Processes that compile for one target; to be closed, or used as a context.

    Args:
        target: What for; None to do nothing.
        count: How many processes; None for what the machine's cores allow.
    """

    target: Target | None = None
    count: int | None = None
    _queued: set[Problem] = field(default_factory=set)
    _processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.target is None:
            return
        count = affordable() if self.count is None else self.count
        self._processes = [_started(self.target) for _ in range(count)]
        self._turns = itertools.cycle(self._processes)

    def soon(self, chains: Iterable[Chain], request: LayerRequest) -> None:
        """Compile for the chains of a request with its batch resolved, in order.

        What was asked for before is left out.
        """
        batch_last = request.layout == "batch_last"
        for chain in chains if self._processes else ():
            for pattern in chain:
                exact = request.dtype != "float32" or precision.is_exact()
                problem = Problem(pattern, request.dtype, batch_last, exact)
                if problem not in self._queued:
                    self._queued.add(problem)
                    job = asdict(problem) | {
                        "pattern": pattern.weight_shape,
                        "batch": request.batch,
                    }
                    _send(next(self._turns), job)

    @property
    def at_work(self) -> bool:
        """Whether there are any."""
        return bool(self._processes)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.wait()
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
        self._processes = []

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def affordable(workers: int = 1) -> int:
    """Processes for each of so many workers that leave a core to the one that measures.

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


def sources(problem: Problem, batch: int, machine: DeviceSpec) -> Sequence[str]:
    """Sources of the kernels that a first look times for a problem, best predicted first."""
    from ksopt.bench import compile_ahead

    return list(dict.fromkeys(compile_ahead.sources(problem, batch, machine)))


def _started(target: Target) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        children.module("ksopt.search.compile_ahead"),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # Ctrl-C is for the parent, which then ends this
    )
    _send(process, target.to_json())
    return process


def _send(process: subprocess.Popen[str], value: object) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError, ValueError):  # it has ended: the parent compiles by itself
        process.stdin.write(json.dumps(value) + "\n")
        process.stdin.flush()


def _compile(source: str, arch: str) -> None:
    with contextlib.suppress(KsoptError):
        nvrtc.cubin(source, arch)


def main() -> int:
    """Compile for the problems that stdin holds, one a line, after a line that says for what."""
    target = Target.from_json(json.loads(sys.stdin.readline()))
    jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            jobs.put(json.loads(line))
        os._exit(0)  # the parent has ended, or is done

    threading.Thread(target=listen, daemon=True).start()
    with ThreadPoolExecutor(_THREADS) as pool:
        while True:
            job = jobs.get()
            batch, pattern = job.pop("batch"), Pattern(*job.pop("pattern"))
            kernels: Sequence[str] = ()
            with contextlib.suppress(Exception):
                kernels = sources(Problem(pattern, **job), batch, target.machine)
            for source in kernels:
                pool.submit(_compile, source, target.arch)


if __name__ == "__main__":
    sys.exit(main())
