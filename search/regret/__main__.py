"""``python -m ksopt.search.regret``: measure the search itself against a reference.

Every size is searched as its user would search it; then chains of the same spaces are measured in
the same way, as many as ``--reference`` says, half of them drawn uniformly and half where the best
is to be expected. The best of all, and what the search recommends, are timed in turns in a process
of their own. Rows are kept as they come: the same command goes on where one stopped.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from ksopt.bench import device as devices
from ksopt.errors import InvalidInputError, KsoptError
from ksopt.kernels.families import Machine
from ksopt.search.regret import tables
from ksopt.search.regret.reference import Reference
from ksopt.search.regret.rows import Book, Searched, TimedWay
from ksopt.search.regret.schedule import Schedule, Unit, largest_first
from ksopt.search.request import LADDER, SearchRequest

_SIZES = ("384x384", "384x1536", "768x3072", "1024x4096", "4096x4096", "4096x11008")
_MOST_PREDICTING = 24


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    given = _parser().parse_args(arguments)
    try:
        if given.report is not None:
            _tell(Book.read(Path(given.report)))
            return 0
        return _run(given)
    except InvalidInputError as error:
        print(f"ksopt.search.regret: {error}", file=sys.stderr)
        return 2
    except KsoptError as error:
        print(f"ksopt.search.regret: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ksopt.search.regret", description=__doc__, allow_abbrev=False
    )
    add = parser.add_argument
    add("--dims", nargs="+", default=list(_SIZES), metavar="INxOUT", help="sizes of layers")
    add("--budgets", nargs="+", default=list(LADDER), metavar="SIZE", help="the ladder")
    add("--dtype", default="bfloat16", help="float32, float16 or bfloat16 (default)")
    add("--batch", type=int, metavar="ROWS", help="rows of the input (8192, on a CPU 256)")
    add("--trials", type=int, default=40, help="chains that a search measures (%(default)s)")
    add("--reference", type=int, default=400, help="chains beside them (%(default)s)")
    add("--device", default="auto", help="as for ksopt search; several workers take those after it")
    add("--workers", type=int, default=1, help="devices, a process on each (%(default)s)")
    add("--seed", type=int, default=0, help="of the searches and of the draws (%(default)s)")
    add("--timeout", type=float, metavar="S", help="begin nothing new after so many seconds")
    where = parser.add_mutually_exclusive_group(required=True).add_argument
    where("--out", metavar="FILE", help="rows, a JSON line each; tables lie beside it")
    where(
        "--report",
        metavar="FILE",
        help="write the tables of such a file again, finished or not, and measure nothing",
    )
    return parser


def _run(given: argparse.Namespace) -> int:
    began = time.monotonic()
    path = Path(given.out)
    device = devices.resolve(given.device)
    if given.workers < 1 or given.trials < 1 or given.reference < 0:
        raise InvalidInputError("workers and trials must be at least 1, and reference at least 0")
    requests = [
        SearchRequest(
            dims,
            budgets=tuple(given.budgets),
            batch=given.batch,
            dtype=given.dtype,
            device=device.type,
            trials=given.trials,
            seed=given.seed,
            out=path.with_suffix("") / str(dims),
        )
        for dims in given.dims
    ]
    settings = {
        "dtype": requests[0].dtype,
        "batch": given.batch,
        "budgets": [step.text for step in requests[0].steps],
        "trials": given.trials,
        "seed": given.seed,
    }
    book = Book.open(path, settings)
    with ExitStack() as stack:
        places = _places(str(device), given.workers)
        folder = str(path.with_suffix(""))
        asked = [
            stack.enter_context(_Asked(place, cores, folder))
            for place, cores in zip(places, _cores(len(places)), strict=True)
        ]
        hello = asked[0].answer()
        for other in asked[1:]:
            other.answer()
        machine = _machine(hello["target"])
        pool: Executor | None = None
        if machine is not None:
            workers = min(_MOST_PREDICTING, max(1, (os.cpu_count() or 1) // 2))
            context = multiprocessing.get_context("spawn")
            pool = ProcessPoolExecutor(workers, mp_context=context)
            stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        resolved = [replace(r, batch=r.batch or hello["batch"]) for r in requests]
        ordered = largest_first(resolved)
        # The spaces of several seconds each are listed while the devices search.
        schedule = Schedule(book, ordered, _Listing(ordered, machine, pool, given))
        failures: list[BaseException] = []
        threads = [
            threading.Thread(target=_work, args=(one, schedule, given, began, failures))
            for one in asked
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.5)
        except KeyboardInterrupt:
            schedule.stop()
            for one in asked:
                one.end()
            raise
    for failure in failures:
        raise failure
    _tell(book)
    print(f"this run took {time.monotonic() - began:.0f} s on {len(places)} device(s)")
    return 0


def _tell(book: Book) -> None:
    for written in tables.write(book):
        print(written)
    print()
    print(tables.markdown(book))


class _Listing(Mapping[str, Reference]):
    """References by size, listed meanwhile: spaces of several seconds each."""

    def __init__(
        self,
        requests: Mapping[str, SearchRequest],
        machine: Machine | None,
        pool: Executor | None,
        given: argparse.Namespace,
    ) -> None:
        # With a pool, threads only wait for its processes.
        threads = ThreadPoolExecutor(1 if pool is None else len(requests))
        self._made = {
            dims: threads.submit(
                Reference.of, request, machine, pool, given.reference, given.seed + 1
            )
            for dims, request in requests.items()
        }
        threads.shutdown(wait=False)

    def __getitem__(self, dims: str) -> Reference:
        return self._made[dims].result()

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


def _work(
    asked: _Asked,
    schedule: Schedule,
    given: argparse.Namespace,
    began: float,
    failures: list[BaseException],
) -> None:
    """One device's thread."""
    try:
        while given.timeout is None or time.monotonic() - began < given.timeout:
            unit = schedule.next()
            if unit is None:
                return
            left = None if given.timeout is None else given.timeout - (time.monotonic() - began)
            _do(unit, asked, schedule, left)
        schedule.stop()
    except BaseException as error:  # the main thread tells it
        failures.append(error)
        schedule.stop()


def _do(unit: Unit, asked: _Asked, schedule: Schedule, seconds_left: float | None) -> None:
    request = schedule.requests[unit.dims]
    if unit.kind == "search":
        if seconds_left is not None:  # what it measured until then is kept in its folder
            request = replace(request, timeout_s=max(seconds_left, 1e-3))
        answer = asked.ask({"task": "search", "request": request.to_json()})
        if "stopped" in answer:
            schedule.done(unit)
            schedule.stop()
            return
        rows = [schedule.row(unit.dims, "search", row) for row in answer.pop("trials")]
        ways = [TimedWay(**way) for way in answer.pop("ways")]
        found = Searched(unit.dims, trials=len(rows), **answer)
        schedule.done(unit, [row for row in rows if row is not None], found, ways)
        return
    task: dict[str, Any] = {
        "request": request.to_json(),
        "chains": [str(chain) for chain in unit.chains],
    }
    if unit.kind == "chains":
        following = [str(chain) for chain in schedule.soon(unit)]
        task |= {"task": "chains", "next": following, "seed": unit.seed}
        for answer in asked.ask_for_some(task):
            row = schedule.row(unit.dims, unit.stage, answer["row"])
            ways = [TimedWay(**way) for way in answer["ways"]]
            schedule.keep([] if row is None else [row], ways)
        schedule.done(unit)
    else:
        began = time.monotonic()
        times = asked.ask({**task, "task": "final"})["times"]
        each = (time.monotonic() - began) / len(unit.chains)
        dense = times.pop("dense")
        rows = [
            schedule.row(
                unit.dims,
                "final",
                {
                    "chain": name,
                    "latency_us": one["median_us"],
                    "p20_us": one["p20_us"],
                    "p80_us": one["p80_us"],
                    "dense_us": dense["median_us"],
                    "repeats": one["repeats"],
                    "seconds": each,
                    "device": asked.device,
                },
            )
            for name, one in times.items()
        ]
        schedule.done(unit, [row for row in rows if row is not None])
    print(f"{unit.dims}: {len(unit.chains)} chains, {unit.stage}, on {asked.device}", flush=True)


class _Asked:
    """A process on a device that answers questions (`ksopt.search.regret.worker`)."""

    def __init__(self, device: str, cores: list[int], folder: str) -> None:
        self.device = device
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ksopt.search.regret.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for this process, which then ends them
        )
        self._send({"device": device, "cores": cores, "folder": folder})

    def ask(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """What it answers.

        Raises:
            KsoptError: It failed.
        """
        self._send(task)
        return self.answer()

    def ask_for_some(self, task: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """What it says of each chain, as it comes.

        Raises:
            KsoptError: It failed.
        """
        self._send(task)
        while "row" in (found := self.answer()):
            yield found

    def answer(self) -> dict[str, Any]:
        """Its next answer."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise KsoptError(f"the process on {self.device} ended with {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise KsoptError(f"{self.device}: {found['error']}")
        return found

    def end(self) -> None:
        """End the process; what it was doing is done again."""
        self._process.terminate()

    def _send(self, value: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(value) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise KsoptError(f"the process on {self.device} has ended") from None

    def __enter__(self) -> _Asked:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()
        self._process.wait()


def _places(device: str, workers: int) -> list[str]:
    import torch

    from ksopt.search.crew import workplaces

    places = workplaces(torch.device(device), workers)
    if len(set(places)) < len(places) and device != "cpu":
        raise InvalidInputError(
            f"workers {workers}: this machine has {len(set(places))} devices like {device}"
        )
    return places


def _cores(count: int) -> list[list[int]]:
    """A share of the cores for each device; empty lists where they cannot be told apart."""
    if not hasattr(os, "sched_getaffinity"):
        return [[] for _ in range(count)]
    cores = sorted(os.sched_getaffinity(0))
    return [cores[at::count] or cores for at in range(count)]


def _machine(target: Mapping[str, Any] | None) -> Machine | None:
    from ksopt.search.ahead import Target

    return None if target is None else Target.from_json(target).machine


if __name__ == "__main__":
    sys.exit(main())
