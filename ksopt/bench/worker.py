"""``python -m ksopt.bench.worker``: measures on one GPU the subjects that its parent sends.

It reads JSON lines from stdin, first a request and then one subject per line. It answers with JSON
lines: the roofline, then each subject's rows. Only the parent writes to disk. The worker ends when
stdin does, so it does not outlive its parent.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict

from ksopt import precision
from ksopt.bench import pool
from ksopt.bench.benchmark import Bench
from ksopt.bench.errors import DeviceLost
from ksopt.bench.options import BenchOptions
from ksopt.bench.pool import Worker
from ksopt.bench.request import BenchRequest, Subject
from ksopt.bench.rows import Row
from ksopt.kernels.compile_ahead import Compilers, Target, affordable
from ksopt.measure.roofline import Roofline
from ksopt.reference import is_batch_last
from ksopt.system import worker_process

Progress = Roofline | list[Row]


def measure_with(
    request: BenchRequest,
    subjects: Sequence[Subject],
    devices: Sequence[str],
    is_over: Callable[[], bool],
) -> Generator[Progress, None, None]:
    """Measure each subject once, on several devices concurrently, with a process for each device.

    Args:
        request: of the benchmark.
        subjects: the request's remaining ones, in the order to measure.
        devices: torch's names; one process each.
        is_over: whether to start no further subject; those already started are waited for.

    Yields:
        The Roofline of each device, and the rows of each subject, as they come.

    Raises:
        KsoptError: a process failed.
    """
    workers = [
        Worker(
            "ksopt.bench.worker",
            device,
            {
                "options": asdict(request.options),
                "device": device,
                # The shares are about even, and each kernel is compiled once, by any of them.
                "ahead": [[str(s.chain), s.batch] for s in subjects[number :: len(devices)]],
                "workers": len(devices),
            },
        )
        for number, device in enumerate(devices)
    ]
    tasks = [{"chain": str(subject.chain), "batch": subject.batch} for subject in subjects]
    for answer in pool.answers(workers, tasks, is_over):
        if "roofline" in answer:
            yield Roofline(**answer["roofline"])
        elif answer.get("rows"):
            yield [Row.from_json(row) for row in answer["rows"]]


def compile_for(subjects: Sequence[Subject], request: BenchRequest, compilers: Compilers) -> None:
    """Queue the kernels of subjects for compilation, in order."""
    with precision.fp32_products(request.fp32_products):
        for subject in subjects:
            for layout in request.layouts:
                last = is_batch_last(layout)
                compilers.soon([subject.chain], request.torch_name, last, subject.batch)


def main() -> int:
    """Measure the subjects from stdin until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends this
    answer = worker_process.answers()
    first = worker_process.first_task()
    if first is None:
        return 0  # the parent has ended
    lines = worker_process.listen()
    try:
        request = BenchRequest.of(BenchOptions(**first["options"]))
        by_name = {str(subject): subject for subject in request.subjects}
        coming = [by_name[f"{chain} batch {batch}"] for chain, batch in first["ahead"]]
        bench = Bench(request, first["device"])
        answer({"roofline": asdict(bench.roofline)})
        count = affordable(first["workers"])
        with Compilers(Target.of(bench.device), count) as compilers:
            compile_for(coming, request, compilers)
            while True:
                task = lines.get()
                rows = bench.measure(by_name[f"{task['chain']} batch {task['batch']}"])
                answer({"rows": [row.to_json() for row in rows]})
    except DeviceLost as error:
        answer({"error": str(error), "rows": [row.to_json() for row in error.rows]})
    except Exception as error:  # the parent tells the user
        answer({"error": f"{type(error).__name__}: {error}"})
    return 1


if __name__ == "__main__":
    sys.exit(main())
