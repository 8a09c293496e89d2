"""Compile the kernels that the next products will choose from, while the device is busy.

``python -m ksopt.bench.compile_ahead`` runs as a process of its own, because ranking tiles in the
process that measures would take the interpreter from it in the middle of a sample. It fills the
cache of compiled code on disk and says nothing. Whatever goes wrong here is met again, and
reported, where the kernel is used. It ends when its work is done or its parent ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

import torch

from ksopt.bench.request import Subject
from ksopt.errors import KsoptError
from ksopt.jit import arch, nvrtc
from ksopt.kernels import registry
from ksopt.kernels.problem import DeviceSpec, Problem
from ksopt.patterns.chain import Pattern
from ksopt.system import children

_MOST_PROCESSES = 12


def sources(problem: Problem, batch: int, spec: DeviceSpec) -> list[str]:
    """Sources of the kernels that ksopt's operator times for a problem, best predicted first.

    Args:
        problem: what is computed.
        batch: rows of x.
        spec: of the device that the kernels run on.
    """
    candidates = registry.candidates(problem, batch, spec)
    return list(dict.fromkeys(source for one in candidates for source in one.sources()))


@contextmanager
def compiling(
    subjects: Sequence[Subject], dtype: str, batch_last: bool, device: torch.device, processes: int
) -> Iterator[None]:
    """Keep processes compiling for the subjects, in order, while the block runs.

    Args:
        subjects: what will be measured.
        dtype: torch's name of the element type.
        batch_last: the layout.
        device: a GPU; on a CPU nothing is compiled.
        processes: how many.
    """
    count = min(processes, _MOST_PROCESSES, len(subjects))
    if device.type != "cuda" or count < 1:
        yield
        return
    try:
        spec, target = DeviceSpec.of_device(device.index), arch.of_device(device.index)
    except KsoptError:  # no bindings: the operator says so once and takes PyTorch's ways
        yield
        return
    problems = list(dict.fromkeys((p.weight_shape, s.batch) for s in subjects for p in s.chain))
    started = []
    try:
        for index in range(count):
            job = {
                "problems": problems[index::count],
                "dtype": dtype,
                "batch_last": batch_last,
                "spec": asdict(spec),
                "target": target,
            }
            started.append(_start(job))
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()


def _start(job: dict[str, object]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        children.module("ksopt.bench.compile_ahead"),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # Ctrl-C is for the parent, which then ends this
    )
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()  # and stays open: its end is the parent's
    return process


def main() -> int:
    """Read a job from stdin and compile; stop when stdin ends."""
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    described = job["spec"] | {"capability": tuple(job["spec"]["capability"])}
    spec = DeviceSpec(**described)
    for shape, batch in job["problems"]:
        problem = Problem(Pattern(*shape), job["dtype"], job["batch_last"])
        found: list[str] = []
        with contextlib.suppress(Exception):
            found = sources(problem, batch, spec)
        for source in dict.fromkeys(found):
            with contextlib.suppress(KsoptError):
                nvrtc.cubin(source, job["target"])
    return 0


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
