"""Points of a series, each measured in a separate process and stored at once."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "how_it_grows.py"


@dataclass(frozen=True)
class Point:
    """The cost of one size.

    Args:
        what: The series.
        size: The size that grows.
        seconds: Wall time.
        cpu_s: CPU time of this process, on all processors.
        grown_mib: The growth of the peak resident memory.
        state: "done", "timeout", or "failed".
        note: A remark, such as the number of chains.
    """

    what: str
    size: int
    seconds: float
    cpu_s: float
    grown_mib: float
    state: str = "done"
    note: str = ""


def read(file: Path) -> list[Point]:
    """The points of a file; none if it does not exist."""
    if not file.exists():
        return []
    with file.open(encoding="utf-8", newline="") as stream:
        return [
            Point(
                row["what"],
                int(row["size"]),
                float(row["seconds"]),
                float(row["cpu_s"]),
                float(row["grown_mib"]),
                row["state"],
                row["note"],
            )
            for row in csv.DictReader(stream)
        ]


def write(file: Path, points: list[Point]) -> None:
    """Write all points to one file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8", newline="") as stream:
        rows = csv.DictWriter(stream, [one.name for one in fields(Point)], lineterminator="\n")
        rows.writeheader()
        rows.writerows(asdict(point) for point in points)


def measured(what: str, size: int, limit_s: float) -> Point:
    """The point of one size of a series, in a fresh process with a time limit."""
    command = [sys.executable, str(SCRIPT), "--point", what, str(size)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, errors = process.communicate(timeout=limit_s)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)  # its workers, too
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return Point(what, size, limit_s, 0.0, 0.0, "timeout")
    if process.returncode:
        words = (errors.strip().splitlines() or ["it said nothing"])[-1]
        return Point(what, size, 0.0, 0.0, 0.0, "failed", words)
    return Point(**json.loads(out.splitlines()[-1]))
