"""Measures the search itself against a reference.

Every size is searched as a user would; then chains of the same spaces are measured in the same way,
at least ``--reference`` of them and for ``--times`` the search's time. Half of ``--reference`` are
drawn uniformly, the others are those expected to be fastest. The best of all and the recommended
chains are timed in turns in a separate process. Rows are stored at once: the same command
continues where it stopped.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from ksopt.errors import InvalidInputError, KsoptError
from ksopt.kernels.problem import DeviceSpec
from ksopt.measure import device as devices
from ksopt.search.layer_request import LayerRequest
from ksopt.search.options import LADDER
from ksopt.system.cpu import cpus_allowed
from regret import tables
from regret.device_process import DeviceProcess
from regret.predicting import processes
from regret.reference import Reference
from regret.rows import Book
from regret.schedule import Schedule
from regret.work import Work

_SIZES = ("384x384", "384x1536", "768x3072", "1024x4096", "4096x4096", "4096x11008")
_MOST_PREDICTING = 24


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    args = _parser().parse_args(arguments)
    try:
        if args.report is not None:
            _tell(Book.read(Path(args.report)))
            return 0
        return _run(args)
    except InvalidInputError as error:
        print(f"search_regret.py: {error}", file=sys.stderr)
        return 2
    except KsoptError as error:
        print(f"search_regret.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python docs/experiments/search_regret.py", description=__doc__, allow_abbrev=False
    )
    add = parser.add_argument
    add("--dims", nargs="+", default=list(_SIZES), metavar="INxOUT", help="sizes of layers")
    add("--budgets", nargs="+", default=list(LADDER), metavar="SIZE", help="the ladder")
    add("--dtype", default="bfloat16", help="float32, float16 or bfloat16 (default)")
    add("--batch", type=int, metavar="ROWS", help="rows of the input (8192, on a CPU 256)")
    add("--trials", type=int, default=72, help="chains that a search measures (%(default)s)")
    add("--reference", type=int, default=400, help="chains beside them, at least (%(default)s)")
    add(
        "--times",
        type=float,
        default=10.0,
        help="how many times as long as the search the reference holds the device, at least, as "
        "far as there are chains; 0: only --reference counts (%(default)s)",
    )
    add("--device", default="auto", help="as for ksopt search; several workers take those after it")
    add("--workers", type=int, default=1, help="devices, a process on each (%(default)s)")
    add("--seed", type=int, default=0, help="of the searches and of the draws (%(default)s)")
    add(
        "--timeout",
        type=float,
        metavar="S",
        help="begin nothing new after so many seconds; the last of them are for finals",
    )
    where = parser.add_mutually_exclusive_group(required=True).add_argument
    where("--out", metavar="FILE", help="rows, a JSON line each; tables lie beside it")
    where(
        "--report",
        metavar="FILE",
        help="write the tables of such a file again, finished or not, and measure nothing",
    )
    return parser


def _run(args: argparse.Namespace) -> int:
    began = time.monotonic()
    path = Path(args.out)
    device = devices.resolve(args.device)
    if args.workers < 1 or args.trials < 1 or args.reference < 0 or not 0 <= args.times < 1e6:
        raise InvalidInputError(
            "workers and trials must be at least 1, reference at least 0, and times from 0 to a "
            "million"
        )
    requests = [
        LayerRequest(
            dims,
            budgets=tuple(args.budgets),
            batch=args.batch,
            dtype=args.dtype,
            device=device.type,
            trials=args.trials,
            seed=args.seed,
            out=path.with_suffix("") / str(dims),
        )
        for dims in args.dims
    ]
    settings = {
        "dtype": requests[0].dtype,
        "batch": args.batch,
        "budgets": [step.text for step in requests[0].steps],
        "trials": args.trials,
        "seed": args.seed,
    }
    book = Book.open(path, settings)
    with ExitStack() as stack:
        places = _places(str(device), args.workers)
        folder = str(path.with_suffix(""))
        device_processes = [
            stack.enter_context(DeviceProcess(place, cores, folder))
            for place, cores in zip(places, _cores(len(places)), strict=True)
        ]
        hello = [one.hello() for one in device_processes]
        machine = _machine(hello[0]["target"])
        pool: Executor | None = None
        if machine is not None:
            workers = min(_MOST_PREDICTING, max(1, cpus_allowed() // 2))
            pool = processes(workers)
            stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        resolved = {str(r.size): replace(r, batch=r.batch or hello[0]["batch"]) for r in requests}
        # Listing a space takes several seconds, so it runs while the devices search.
        references = _Listing(resolved, machine, pool, args)
        run = Work(
            Schedule(book, resolved, references, args.times),
            args.timeout,
            began,
            len(device_processes),
        )
        threads = [threading.Thread(target=run.on, args=(one,)) for one in device_processes]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.5)
        except KeyboardInterrupt:
            run.schedule.stop()
            for one in device_processes:
                one.end()
            raise
    _tell(book)
    print(f"this run took {time.monotonic() - began:.0f} s on {len(places)} device(s)")
    for failure in run.failures:
        print(f"search_regret.py: {failure}", file=sys.stderr)
    return 1 if run.failures else 0


def _tell(book: Book) -> None:
    for written in tables.write(book):
        print(written)
    print()
    print(tables.markdown(book))


class _Listing(Mapping[str, Reference]):
    """The references by size, built concurrently because listing a space takes seconds."""

    def __init__(
        self,
        requests: Mapping[str, LayerRequest],
        machine: DeviceSpec | None,
        pool: Executor | None,
        args: argparse.Namespace,
    ) -> None:
        # With a pool, threads only wait for its processes.
        threads = ThreadPoolExecutor(1 if pool is None else len(requests))
        self._references = {
            dims: threads.submit(
                Reference.of, request, machine, pool, args.reference, args.seed + 1
            )
            for dims, request in requests.items()
        }
        threads.shutdown(wait=False)

    def __getitem__(self, dims: str) -> Reference:
        return self._references[dims].result()

    def __iter__(self) -> Iterator[str]:
        return iter(self._references)

    def __len__(self) -> int:
        return len(self._references)


def _places(device: str, workers: int) -> list[str]:
    import torch

    from ksopt.search.worker_pool import workplaces

    places = workplaces(torch.device(device), workers)
    if len(set(places)) < len(places) and device != "cpu":
        raise InvalidInputError(
            f"workers {workers}: this machine has {len(set(places))} devices like {device}"
        )
    return places


def _cores(count: int) -> list[list[int]]:
    """The cores of each device; empty lists if the system cannot pin them."""
    if not hasattr(os, "sched_getaffinity"):
        return [[] for _ in range(count)]
    cores = sorted(os.sched_getaffinity(0))
    return [cores[at::count] or cores for at in range(count)]


def _machine(target: Mapping[str, Any] | None) -> DeviceSpec | None:
    from ksopt.kernels.compile_ahead import Target

    return None if target is None else Target.from_json(target).spec


if __name__ == "__main__":
    sys.exit(main())
