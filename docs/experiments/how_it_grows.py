"""The cost of ksopt as sizes grow, and fitted laws.

    python docs/experiments/how_it_grows.py --what capture rows
    python docs/experiments/how_it_grows.py --laws

Each point is measured in a separate process, with a time limit, and written to
``docs/data/growth-SERIES.csv`` at once: the same command continues where it was stopped. No GPU is
needed. The series of workers simulates them: they sleep instead of measuring. ``--laws`` measures
nothing, and prints the law of every series that has a file, and that of its peak memory where that
grows.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from growth import fitting, points, series
from growth.points import Point

DATA = Path(__file__).parents[1] / "data"
# Memory has a law where the largest size takes so many MiB, and so many times those of the least.
_GROWN_MIB, _GROWN = 8.0, 1.5


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the requested series, and print the laws."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    names = [*series.ALL]
    parser.add_argument("--what", nargs="+", choices=names, default=names, help="series (all)")
    parser.add_argument("--most", type=int, help="the largest size")
    parser.add_argument("--limit-s", type=float, default=120.0, help="of a point (%(default)s)")
    parser.add_argument("--out", type=Path, default=DATA, help="folder (docs/data)")
    parser.add_argument("--laws", action="store_true", help="measure nothing")
    parser.add_argument("--point", nargs=2, metavar=("SERIES", "SIZE"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.point:
        print(json.dumps(asdict(one(args.point[0], int(args.point[1])))))
        return 0
    print(
        f"{'series':20} {'sizes':>16} {'least s':>9} {'most s':>9} {'MiB':>7}  law of CPU seconds"
    )
    for what in args.what:
        file = args.out / f"growth-{what}.csv"
        known = points.read(file)
        if not args.laws:
            known = grown(what, known, file, args.limit_s, args.most)
        if known:
            print(line(what, known), flush=True)
    return 0


def one(what: str, size: int) -> Point:
    """Measure one point in this process."""
    work = series.ALL[what].prepare(size)
    gc.collect()  # what the preparation leaves is not a cost of the work
    gc.freeze()
    memory, began, cpu = _peak_mib(), time.perf_counter(), _cpu_s()
    note = work()
    seconds, cpu_s = time.perf_counter() - began, _cpu_s() - cpu
    grown_mib = _peak_mib() - memory
    return Point(what, size, round(seconds, 5), round(cpu_s, 5), round(grown_mib, 1), note=note)


def grown(
    what: str, known: list[Point], file: Path, limit_s: float, most: int | None
) -> list[Point]:
    """The points with missing ones measured; stops after one that takes too long."""
    for size in series.ALL[what].sizes:
        if any(point.state == "timeout" for point in known):
            break
        is_known = any(point.size == size for point in known)
        if not is_known and (most is None or size <= most):
            known = [*known, points.measured(what, size, limit_s)]
            points.write(file, known)
    return known


def line(what: str, known: Sequence[Point]) -> str:
    """The row of a series in the table."""
    done = [point for point in known if point.state == "done"]
    left = [f"{point.size}: {point.state} {point.note}" for point in known if point not in done]
    if not done:
        return f"{what:20} {'; '.join(left)}"
    sizes = f"{done[0].size}-{done[-1].size}"
    law = _law(what, done, [point.cpu_s for point in done]) or "too few points"
    least, high = min(one.seconds for one in done), max(one.seconds for one in done)
    mib = [one.grown_mib for one in done]
    row = f"{what:20} {sizes:>16} {least:9.3f} {high:9.3f} {max(mib):7.0f}  {law}"
    if mib[-1] >= max(_GROWN_MIB, _GROWN * mib[0]):
        memory = _law(what, done, mib)
        left = [f"MiB: {memory}", *left] if memory else left
    return "; ".join([row, *left])


def _law(what: str, done: Sequence[Point], costs: Sequence[float]) -> str | None:
    law = fitting.fit([point.size for point in done], costs)
    if law is None:
        return None
    words = f"{law.base:.3g} + {law.scale:.3g} * {series.ALL[what].of}"
    return f"{words}^({law.power:.2f} +- {law.margin:.2f}), within {100 * law.error:.0f} %"


def _cpu_s() -> float:
    """CPU seconds of this process and of its ended children."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _peak_mib() -> float:
    """The peak resident memory. (getrusage's includes the parent's.)"""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (peak,) = (row for row in status.splitlines() if row.startswith("VmHWM"))
    return int(peak.split()[1]) / 1024


if __name__ == "__main__":
    sys.exit(main())
