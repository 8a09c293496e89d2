"""Fuzz the backend: random modules, compiled by ksopt, against eager mode.

    python -m tests.fuzz.capture --count 5000 --workers 2
    python -m tests.fuzz.capture --seed 123456 --count 1      # one module again
    python -m tests.fuzz.capture --file failing.py            # a program that was printed

Prints the first seed, a program for each difference, made small, and what was covered. Exits with
1 if there was a difference.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import Any

os.environ.setdefault("KSOPT_TUNE", "off")  # the operator's ways have tests of their own
os.environ.setdefault("OMP_NUM_THREADS", "1")

_PROGRESS = 300.0
"""Seconds between lines that say how far it is."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command; see the top of this file."""
    options = _options(arguments)
    if options.file:
        return _show(Path(options.file))
    seed = options.seed if options.seed is not None else int.from_bytes(os.urandom(4), "big")
    print(f"Seed {seed}. Again: python -m tests.fuzz.capture --seed {seed} ...", flush=True)
    total = Totals()
    start = time.monotonic()
    reported = start
    for result in _results(seed, options):
        total.add(result)
        if time.monotonic() > reported + _PROGRESS:
            reported = time.monotonic()
            print(f"... {total.modules} modules, {total.failures} differences", flush=True)
        if result.get("failure"):
            print(result["failure"], flush=True)
    print(total.text(time.monotonic() - start))
    return 1 if total.failures or not total.modules else 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz.capture",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--count", type=int, default=1_000_000, help="modules at the most")
    parser.add_argument("--seed", type=int, help="of the first module; fresh by default")
    parser.add_argument("--minutes", type=float, default=60.0, help="time at the most")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time")
    parser.add_argument("--handover", default="", help="eager, aot_eager or inductor for all")
    parser.add_argument("--shrink-seconds", type=float, default=90.0, help="for each difference")
    parser.add_argument("--file", help="a program to run again")
    return parser.parse_args(arguments)


class Totals:
    """What all modules came to."""

    def __init__(self) -> None:
        self.modules = self.failures = self.lowered = self.torchs = self.errors = self.quick = 0
        self.spellings: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self.missed: Counter[str] = Counter()

    def add(self, result: dict[str, Any]) -> None:
        """Count one module."""
        self.modules += result.get("modules", 0)
        self.failures += bool(result.get("failure"))
        for name in ("lowered", "torchs", "errors", "quick"):
            setattr(self, name, getattr(self, name) + bool(result.get(name)))
        for name in ("spellings", "notes", "missed"):
            getattr(self, name).update(result.get(name, {}))

    def text(self, seconds: float) -> str:
        """What is printed at the end."""
        lines = [
            f"{self.modules} modules in {seconds:.0f} s: {self.failures} differences.",
            f"In {self.lowered} a site was lowered, {self.errors} end in an error in eager mode, "
            f"in {self.torchs} torch.compile itself differs from eager mode, and in {self.quick} "
            "a backward pass is refused where the rewritten graph runs as it is, not by Inductor.",
            "Products lowered: " + _counted(self.spellings),
            "Not recognised: " + _counted(self.missed, 12, "; "),
        ]
        if self.notes:
            lines.append("Graphs left alone: " + _counted(self.notes, 12, "; "))
        return "\n".join(lines)


def _counted(counter: Counter[str], most: int = 50, joint: str = ", ") -> str:
    return joint.join(f"{name} {count}" for name, count in counter.most_common(most)) or "none"


def _results(seed: int, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What becomes of each module, from all processes as they go."""
    queue: Queue[dict[str, Any] | None] = Queue()
    threads = [
        threading.Thread(target=_worker, args=(seed, at, options, queue), daemon=True)
        for at in range(options.workers)
    ]
    for thread in threads:
        thread.start()
    ended = 0
    while ended < len(threads):
        result = queue.get()
        if result is None:
            ended += 1
        else:
            yield result


def _worker(
    seed: int, at: int, options: argparse.Namespace, queue: Queue[dict[str, Any] | None]
) -> None:
    """Every n-th module, in a separate process; its output goes into the queue."""
    module = (__package__ or "tests.fuzz") + ".worker"
    end = time.monotonic() + 60 * options.minutes  # the same clock in all processes
    settings = {**vars(options), "first": seed + at, "last": seed + options.count, "end": end}
    process = subprocess.Popen(
        [sys.executable, "-m", module, json.dumps(settings)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.extend(process.stderr or ()), daemon=True)
    reader.start()
    for line in process.stdout:
        if line.startswith("{"):
            queue.put(json.loads(line))
    if process.wait() != 0:
        reader.join(5)
        queue.put({"failure": f"A process ended with {process.returncode}:\n{''.join(errors)}"})
    queue.put(None)


def _show(path: Path) -> int:
    from .worker import be_quiet, compared

    be_quiet()
    outcome = compared(path.read_text(), str(path))
    for text in outcome.differences:
        print(text)
    for text in outcome.torchs:
        print("torch.compile itself:", text)
    print(f"{len(outcome.differences)} differences; lines lowered: {outcome.lowered}")
    return 1 if outcome.differences else 0


if __name__ == "__main__":
    sys.exit(main())
