"""The time that a busy worker outlives its killed parent: multiprocessing's (spawn) and ksopt's.

python docs/experiments/spawned_workers.py
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

# A worker computes and does not look at its parent, as in a long call of a library.
BUSY = """
import time
def busy(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(10 ** 5))
"""
SPAWN = """
import multiprocessing, time
from busy import busy
if __name__ == "__main__":
    worker = multiprocessing.get_context("spawn").Process(target=busy, args=({seconds},))
    worker.start()
    time.sleep(2)
    print(worker.pid, flush=True)
    worker.join()
"""
OWN = """
import time
from ksopt.system.worker_process import WorkerProcess
if __name__ == "__main__":
    worker = WorkerProcess("task")
    time.sleep(2)
    print(worker.pid, flush=True)
    time.sleep({seconds})
"""
TASK = """
from busy import busy
busy({seconds})
"""


def outlived_s(program: str, folder: Path, seconds: float) -> float:
    """Seconds from the parent's end to its worker's, at most ``seconds``."""
    for name, text in (("busy", BUSY), ("task", TASK), ("parent", program)):
        text = text.replace("{seconds}", str(seconds))
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    command = [sys.executable, folder / "parent.py"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
        began = time.monotonic()
        while time.monotonic() - began < seconds and _is_running(worker):
            time.sleep(0.02)
        return time.monotonic() - began


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each kind of worker."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=12.0, help="that a worker is busy")
    seconds = parser.parse_args(arguments).seconds
    for name, program in (("multiprocessing (spawn)", SPAWN), ("ksopt's WorkerProcess", OWN)):
        with tempfile.TemporaryDirectory() as folder:
            print(f"{name}: {outlived_s(program, Path(folder), seconds):.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
