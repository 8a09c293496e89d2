"""The device that tiles are drawn for, and their compilation before they are tested."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ksopt.kernels.problem import DeviceSpec

# What runs elsewhere is chosen from the same tiles.
H200 = DeviceSpec((9, 0), multiprocessors=132, shared_bytes=228 * 1024)
_CORES = 16

Job = TypeVar("Job")


def compile_all(build: Callable[[Job], object], jobs: Sequence[Job]) -> None:
    """Build what the tests of a file take from the cache then, on all cores.

    Each process of pytest-xdist does so, for each has some of the tests. They begin at places of
    their own, and find in the cache what others have built.
    """
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = len(jobs) * number // processes
    with ThreadPoolExecutor(max(2, _CORES // processes)) as pool:
        list(pool.map(build, [*jobs[first:], *jobs[:first]]))
