"""The time to compile one kernel, and to load it from the cache on disk.

    python docs/experiments/compile_time.py

No GPU is needed: for each family of kernels, the three best predicted tiles for each of a few
problems are compiled for an H200 into an empty cache, then read from it as another process would.
Prints seconds to compile and milliseconds from the cache, median and maximum.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ksopt.jit import nvrtc
from ksopt.kernels import registry
from ksopt.kernels.families.base import KernelFamily, families
from ksopt.kernels.problem import DeviceSpec, Problem
from ksopt.patterns.chain import Pattern

H200 = DeviceSpec((9, 0), 132, 233_472)
ARCH = "sm_90a"
PATTERNS = [
    Pattern(*shape)
    for shape in (
        (4, 64, 64, 16),
        (1, 128, 128, 96),
        (1, 192, 768, 24),
        (16, 256, 256, 1),
        (1, 96, 96, 3),
    )
]
BATCHES = (16, 25_088)
TILES = 3


def sources() -> Iterator[tuple[str, str]]:
    """The (family, source) of every kernel, without duplicates."""
    seen: set[str] = set()
    for family in families():
        for pattern in PATTERNS:
            for dtype in ("float16", "float32"):
                for last in (False, True):
                    problem = Problem.of_factor(pattern, dtype, last)
                    for source in _of(family, problem):
                        if source not in seen:
                            seen.add(source)
                            yield family.name, source


def _of(family: KernelFamily, problem: Problem) -> Iterator[str]:
    for batch in BATCHES:
        for kernel in registry.ranked(family, problem, batch, H200)[:TILES]:
            yield from kernel.sources()


def main() -> None:
    nvrtc.version()  # loads the library before timing
    kernels = list(sources())
    names = list(dict.fromkeys(family for family, _ in kernels))
    cold: dict[str, list[float]] = {family: [] for family in names}
    warm: dict[str, list[float]] = {family: [] for family in names}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["KSOPT_CACHE_DIR"] = str(Path(folder) / "cache")
        for times in (cold, warm):
            for family, source in kernels:
                began = time.perf_counter()
                nvrtc.cubin(source, ARCH)
                times[family].append(time.perf_counter() - began)
    print(f"NVRTC {'.'.join(map(str, nvrtc.version()))}, {ARCH}, {len(kernels)} kernels")
    print("                              compile, s         from the cache, ms")
    print("family               kernels  median   most      median   most")
    for family in names:
        c, w = cold[family], warm[family]
        print(
            f"{family:20} {len(c):7} {statistics.median(c):7.2f} {max(c):6.2f}"
            f" {statistics.median(w) * 1e3:11.2f} {max(w) * 1e3:6.2f}"
        )


if __name__ == "__main__":
    main()
