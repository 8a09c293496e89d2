"""``python -m ksopt.bench.reproduction.worker``: measures tasks on the GPU that its parent names.

It reads JSON lines from stdin, first a request and then one task per line. It answers with JSON
lines, an empty one once it is ready. Only the parent writes to disk. The worker ends when stdin
does, so it does not outlive its parent.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from ksopt.bench import pool
from ksopt.bench.errors import DeviceLost
from ksopt.bench.pool import Worker
from ksopt.bench.reproduction import measuring
from ksopt.bench.reproduction.measuring import Answer, PaperBench
from ksopt.bench.reproduction.options import PaperOptions
from ksopt.bench.reproduction.request import PaperRequest
from ksopt.bench.reproduction.tasks import Task
from ksopt.kernels.compile_ahead import Compilers, Target, affordable
from ksopt.system import worker_process


def measure_with(
    request: PaperRequest,
    tasks: Sequence[Task],
    devices: Sequence[str],
    is_over: Callable[[], bool],
) -> Generator[Answer, None, None]:
    """Measure each task once, on several devices at once, with a process for each device.

    Args:
        request: of the run.
        tasks: in the order to begin them.
        devices: torch's names; one process each.
        is_over: whether to begin no further task; those already begun are waited for.

    Raises:
        KsoptError: a process failed.
    """
    workers = [
        Worker(
            "ksopt.bench.reproduction.worker",
            device,
            {
                "options": asdict(request.options),
                "device": device,
                # The shares are about even, and each kernel is compiled once, by any of them.
                "ahead": [_to_json(task) for task in tasks[number :: len(devices)]],
                "workers": len(devices),
            },
        )
        for number, device in enumerate(devices)
    ]
    parts = {part.name: part for part in request.parts}
    for answer in pool.answers(workers, [_to_json(task) for task in tasks], is_over):
        if "result" in answer:
            task = Task(parts[answer["part"]], answer["name"])
            yield Answer(task, answer["result"], answer.get("roofline"), answer.get("failure", ""))


def _to_json(task: Task) -> dict[str, str]:
    return {"part": task.part.name, "name": task.name}


def main() -> int:
    """Measure the tasks from stdin until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends this
    answer = worker_process.answers()
    first = worker_process.first_task()
    if first is None:
        return 0  # the parent has ended
    lines = worker_process.listen()
    task: dict[str, Any] = {}
    try:
        request = PaperRequest.of(PaperOptions(**first["options"]))
        parts = {part.name: part for part in request.parts}
        ahead = [Task(parts[one["part"]], one["name"]) for one in first["ahead"]]
        device = torch.device(first["device"])
        if device.type == "cuda":
            torch.cuda.set_device(device)
        bench = PaperBench(request, str(device))
        with Compilers(Target.of(device), affordable(first["workers"])) as compilers:
            measuring.compile_for(request, ahead, compilers)
            answer({})
            while True:
                task = lines.get()
                measured = bench.measure(Task(parts[task["part"]], task["name"]))
                more = {"roofline": measured.roofline, "failure": measured.failure}
                answer({**task, "result": measured.result, **more})
    except DeviceLost as error:
        rows = [row.to_json() for row in error.rows]
        answer({"error": str(error), **({**task, "result": rows} if rows else {})})
    except Exception as error:  # the parent tells the user
        answer({"error": f"{type(error).__name__}: {error}"})
    return 1


if __name__ == "__main__":
    sys.exit(main())
