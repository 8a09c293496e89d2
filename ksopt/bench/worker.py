"""``python -m ksopt.bench.worker``: measures on one GPU what its parent deals out.

It reads JSON lines from stdin, a request first and then one subject a line, and answers with JSON
lines: the roofline, then each subject's rows. The parent alone writes to disk. It ends when stdin
does, so it does not outlive its parent.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

from ksopt.bench.benchmark import Bench, DeviceLost
from ksopt.bench.request import BenchRequest, Subject
from ksopt.bench.rows import Row
from ksopt.errors import KsoptError
from ksopt.kernels.compile_ahead import Compilers, Target, affordable
from ksopt.measure.roofline import Roofline
from ksopt.reference import is_batch_last
from ksopt.system import children

Told = Roofline | list[Row]


def measure_with(
    request: BenchRequest,
    subjects: Sequence[Subject],
    devices: Sequence[str],
    is_over: Callable[[], bool],
) -> Generator[Told, None, None]:
    """Measure subjects on several devices at once, a process each; each subject once.

    Args:
        request: what is measured.
        subjects: those of the request that are left, dealt out in order.
        devices: torch's names; one process each.
        is_over: whether to deal out no more; what is under way is still waited for.

    Yields:
        The Roofline of each device, and the rows of each subject, as they come.

    Raises:
        KsoptError: a process failed.
    """
    answers: queue.Queue[tuple[int, dict[str, Any]]] = queue.Queue()
    left = list(reversed(subjects))
    with ExitStack() as stack:
        processes = [
            stack.enter_context(_process(number, request, device, subjects, len(devices), answers))
            for number, device in enumerate(devices)
        ]
        working = set(range(len(processes)))
        while working:
            number, answer = answers.get()
            if "error" in answer:
                if answer.get("rows"):
                    yield [Row.from_json(row) for row in answer["rows"]]
                raise KsoptError(f"{devices[number]}: {answer['error']}")
            if "roofline" in answer:
                yield Roofline(**answer["roofline"])
            else:
                yield [Row.from_json(row) for row in answer["rows"]]
            if left and not is_over():
                subject = left.pop()
                _tell(processes[number], {"chain": str(subject.chain), "batch": subject.batch})
            else:
                working.remove(number)


@contextmanager
def _process(
    number: int,
    request: BenchRequest,
    device: str,
    subjects: Sequence[Subject],
    workers: int,
    answers: queue.Queue[tuple[int, dict[str, Any]]],
) -> Iterator[subprocess.Popen[str]]:
    """A worker that is at work, its answers on the way to the queue; ended on the way out."""
    process = subprocess.Popen(
        children.module("ksopt.bench.worker"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def listen() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            answers.put((number, json.loads(line)))
        answers.put(
            (number, {"error": f"the process that measured on it ended ({process.wait()})"})
        )

    threading.Thread(target=listen, daemon=True).start()
    try:
        first = {
            "words": dict(request.words),
            "device": device,
            # Every worker's share comes out about even, and a kernel is compiled once whoever asks.
            "ahead": [[str(s.chain), s.batch] for s in subjects[number::workers]],
            "workers": workers,
        }
        _tell(process, first)
        yield process
    finally:
        process.kill()
        process.wait()


def _tell(process: subprocess.Popen[str], value: Mapping[str, Any]) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(value) + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        pass  # it has ended, and the thread that listens says so


def compile_for(subjects: Sequence[Subject], request: BenchRequest, compilers: Compilers) -> None:
    """Have the kernels of subjects compiled, in order."""
    last = is_batch_last(request.layout)
    for subject in subjects:
        compilers.soon([subject.chain], request.dtype, last, subject.batch)


def request_of(words: Mapping[str, str]) -> BenchRequest:
    """The request that a request's ``words`` were made from."""
    import shlex

    return BenchRequest.of(
        patterns=shlex.split(words.get("patterns", "")),
        chains=shlex.split(words.get("chain", "")),
        dtype=words["dtype"],
        layout=words["layout"],
        batch=words["batch"],
        against=words["against"],
        device=words["device"],
        graph="graph" in words,
        inductor_sample=int(words["inductor-sample"]),
        seed=int(words["seed"]),
    )


def main() -> int:
    """Measure what stdin says, until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends this
    answer_to = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer

    def answer(value: Mapping[str, Any]) -> None:
        answer_to.write(json.dumps(value) + "\n")
        answer_to.flush()

    first = json.loads(sys.stdin.readline())
    lines: queue.Queue[str] = queue.Queue()

    def listen() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    try:
        request = request_of(first["words"])
        by_name = {str(subject): subject for subject in request.subjects}
        coming = [by_name[f"{chain} batch {batch}"] for chain, batch in first["ahead"]]
        bench = Bench(request, first["device"])
        answer({"roofline": asdict(bench.roofline)})
        count = affordable(first["workers"])
        with Compilers(Target.of(bench.device), count) as compilers:
            compile_for(coming, request, compilers)
            while True:
                asked = json.loads(lines.get())
                rows = bench.measure(by_name[f"{asked['chain']} batch {asked['batch']}"])
                answer({"rows": [row.to_json() for row in rows]})
    except DeviceLost as error:
        answer({"error": str(error), "rows": [row.to_json() for row in error.rows]})
    except Exception as error:  # the parent tells the user
        answer({"error": f"{type(error).__name__}: {error}"})
    return 1


if __name__ == "__main__":
    sys.exit(main())
