"""The command line under bad input: every refusal is a sentence and exit code 2, at once.

    python -m tests.fuzz.command_lines --count 1000 --seed 7
    python -m tests.fuzz.command_lines --seed 7 --only 123     # one case again, its output shown

A case is a command line that is bad in one place at least, or names a file that chance has changed.
It runs in a fork of this process, which has imported everything, or (one in 25) as a real process.
It fails if there is a traceback or an exit code that is not the documented one, if it leaves
anything on disk that a refusal should not, takes more than 1 GB of memory, or more than 10 seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from .bad_files import make_valid
from .bad_words import Case, draw

MOST_BYTES, MOST_SECONDS = 2**30, 10.0
# The machine may be busy: 10 s count as the process's own time, and so long it may wait.
_PATIENCE_S = 60.0
_REAL = 25  # one case in so many is a real process
_HEAVY = 200  # from so many cases on, vast numbers and measured folders are among them


@dataclass(frozen=True)
class Outcome:
    """What came of a case; ``faults`` is empty where it is right."""

    case: Case
    code: int
    output: str
    seconds: float
    peak_bytes: int
    faults: tuple[str, ...]


_OF_THE_DRIVER = ".nv"
# The digest of ksopt's own code, which a process caches for the next one, for any command.
_OF_THE_CODE = re.compile(r"home/cache(/[^/]+(/code(/[^/]+)?)?)?")
"""The folder in a home that CUDA's driver creates as soon as devices are queried."""


class Sandbox:
    """A folder where cases run, put back as it was after each."""

    def __init__(self, root: Path, heavy: bool) -> None:
        self._whole = root / "valid"
        self.place, self.outputs = root / "here", root / "outputs"
        make_valid(self._whole)
        if heavy:
            _measure(self._whole)
        self.outputs.mkdir()
        for name in ("tmp", "home"):
            (self._whole / name).mkdir()
        self.renew()

    def renew(self) -> None:
        """As at first."""
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir()
        for entry in self._whole.iterdir():
            target = self.place / entry.name
            if entry.is_fifo():
                os.mkfifo(target)
            elif entry.is_symlink():
                link = os.fspath(entry.readlink())
                target.symlink_to(link.replace(str(self._whole), str(self.place)))
            elif entry.is_dir():
                shutil.copytree(entry, target, symlinks=True)
            else:
                shutil.copy2(entry, target)
        lock = self.place / "linked" / ".lock"
        lock.unlink()
        lock.symlink_to(self.place / "full" / "precious")

    def content(self) -> dict[str, str]:
        """What is there, each file with a digest."""
        entries = {}
        for folder, folders, files in os.walk(self.place):
            folders[:] = [name for name in folders if name != _OF_THE_DRIVER]
            for name in (*folders, *files):
                path = Path(folder) / name
                what = "folder" if name in folders else "other"
                if path.is_symlink():
                    what = f"link to {path.readlink()}"
                elif path.is_file():
                    what = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
                entries[str(path.relative_to(self.place))] = what
        return entries

    def environment(self, case: Case) -> dict[str, str]:
        """The variables of a case's process."""
        inherited = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV")
        variables: dict[str, str | None] = {name: os.environ.get(name) for name in inherited}
        variables |= {"HOME": str(self.place / "home"), "TMPDIR": str(self.place / "tmp")}
        variables |= {"KSOPT_CACHE_DIR": str(self.place / "home" / "cache"), "COLUMNS": "100"}
        variables |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        variables |= case.environment
        return {name: value for name, value in variables.items() if value is not None}


def _measure(folder: Path) -> None:
    """A search and a benchmark, for their files to be mutated."""
    from ksopt.cli.main import main

    tiny = ["--device", "cpu", "--batch", "4"]
    search = ["search", "--dims", "8x16", "--budget", "50%", "--trials", "1", *tiny]
    with contextlib.chdir(folder), tempfile.TemporaryDirectory() as name, _silence():
        code = main([*search, "--out", name])
        assert code == 0, f"a search that is right ended with {code}"
        shutil.copy(Path(name) / "study.db", folder / "study.db")
        bench = ["bench", "kernels", "--patterns", "(1,4,4,2)", "(2,4,4,1)", *tiny]
        code = main([*bench, "--against", "bmm", "--out", "measured"])
        assert code == 0, f"a benchmark that is right ended with {code}"


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    with (
        Path(os.devnull).open("w") as nothing,
        contextlib.redirect_stdout(nothing),
        contextlib.redirect_stderr(nothing),
    ):
        yield


def run(sandbox: Sandbox, case: Case, real: bool) -> Outcome:
    """Run a case and judge it; the sandbox is as before afterwards."""
    before = sandbox.content()
    out, err = sandbox.outputs / "out", sandbox.outputs / "err"
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _become(sandbox, case, out, err, real)
    status, usage, killed = _waited(child, began)
    output = out.read_text(errors="replace") + err.read_text(errors="replace")
    code = os.waitstatus_to_exitcode(status)
    seconds = usage.ru_utime + usage.ru_stime
    peak = usage.ru_maxrss * 1024
    faults = [killed] if killed else []
    if code not in case.codes:
        faults.append(f"exit code {code}")
    if "Traceback (most recent call last)" in output:
        faults.append("a traceback")
    errors = err.read_text(errors="replace").strip().splitlines()
    unforeseen = [line for line in errors if re.match(r"ksopt: [A-Za-z_]+: ", line)]
    if unforeseen and errors[-1].endswith("(--traceback shows where)"):
        faults.append("an error that nobody foresaw")
    if code != 0 and not any(line.startswith("ksopt") for line in errors):
        faults.append("no sentence")
    if peak > MOST_BYTES:
        faults.append(f"{peak / 2**30:.1f} GiB of memory")
    if seconds > MOST_SECONDS and code != 0:
        faults.append(f"{seconds:.0f} s")
    after = sandbox.content()
    if after != before:
        changed = sorted(name for name in before | after if before.get(name) != after.get(name))
        changed = [name for name in changed if not _OF_THE_CODE.fullmatch(name)]
        meant = [name for name in changed if name.split("/")[0] in case.may_write]
        wrong = [name for name in changed if name not in meant or code == 2]
        if code != 0 and wrong:
            faults.append(f"left behind: {', '.join(wrong[:5])}")
        if any(before.get(name) not in (None, after.get(name)) for name in changed if code != 0):
            faults.append("a file that was there is changed")
        sandbox.renew()
    return Outcome(case, code, output, seconds, peak, tuple(faults))


def _become(sandbox: Sandbox, case: Case, out: Path, err: Path, real: bool) -> None:
    """In a child: be the process of a case, to its end."""
    os.setsid()
    os.chdir(sandbox.place)
    for path, stream in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    environment = sandbox.environment(case)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    words = [sys.executable, "-m", "ksopt", *case.words]
    if real:
        with contextlib.suppress(Exception):  # words that no process can get, such as NUL
            os.execve(sys.executable, words, environment)
    code = 70
    try:
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None
        sys.dont_write_bytecode = True  # a folder of Python's own would look like one of ksopt's
        sys.argv = ["ksopt", *case.words]
        sys.stdout = os.fdopen(1, "w", errors="backslashreplace", closefd=False)
        sys.stderr = os.fdopen(2, "w", errors="backslashreplace", closefd=False)
        from ksopt.cli.main import main

        try:
            code = main(case.words)
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _waited(child: int, began: float) -> tuple[int, resource.struct_rusage, str]:
    """Wait for a child, and end it where it takes too much."""
    killed, page = "", os.sysconf("SC_PAGE_SIZE")
    while True:
        done, status, usage = os.wait4(child, os.WNOHANG)
        if done:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # its own children
            return status, usage, killed
        if not killed:
            with contextlib.suppress(OSError, IndexError, ValueError):
                resident = int(Path(f"/proc/{child}/statm").read_text().split()[1]) * page
                if resident > 2 * MOST_BYTES:
                    killed = f"killed at {resident / 2**30:.1f} GiB"
            if time.monotonic() - began > _PATIENCE_S:
                killed = f"killed after {_PATIENCE_S:.0f} s"
            if killed:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.002)


def case_of(seed: int, number: int, sandbox: Sandbox, heavy: bool) -> Case:
    """The case of a number: the same for the same seed, independent of earlier cases."""
    return draw(random.Random(f"{seed}-{number}"), sandbox.place, heavy)


def preload() -> None:
    """Import the modules of all commands, so that a fork has them."""
    for name in (
        *("optuna.storages.journal", "safetensors.torch", "sqlalchemy.dialects.sqlite"),
        *("torch._dynamo", "ksopt.bench.run", "ksopt.compile.explain", "ksopt.conversion.folder"),
        *(
            "ksopt.search.saved_study",
            "ksopt.search.space.listing",
            "ksopt.search.study",
            "ksopt.tune",
        ),
    ):
        importlib.import_module(name)
    torch.set_num_threads(1)  # a fork waits for ever for threads that only its parent has


def attack(
    count: int, seed: int, only: int | None = None, show: bool = False
) -> list[tuple[int, Outcome]]:
    """Run cases, and tell how it went; those that failed.

    Args:
        count: How many.
        seed: Of all of them.
        only: The number of one case to run alone.
        show: Print every case, not only those that failed.
    """
    heavy = count >= _HEAVY or only is not None
    print(f"seed {seed}: {count} command lines", flush=True)
    preload()
    failed, codes, began = [], Counter[int](), time.monotonic()
    slowest = largest = 0.0
    with tempfile.TemporaryDirectory(prefix="ksopt-fuzz-") as name:
        sandbox = Sandbox(Path(name), heavy)
        numbers = range(count) if only is None else [only]
        for number in numbers:
            case = case_of(seed, number, sandbox, heavy)
            outcome = run(sandbox, case, real=number % _REAL == _REAL - 1)
            codes[outcome.code] += 1
            slowest, largest = max(slowest, outcome.seconds), max(largest, outcome.peak_bytes)
            if outcome.faults:
                failed.append((number, outcome))
                print(describe(number, outcome), flush=True)
            elif show or only is not None:
                print(describe(number, outcome), flush=True)
            for entry in sandbox.place.glob("bad*"):  # the case's own files
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    tallied = ", ".join(f"{times} with {code}" for code, times in sorted(codes.items()))
    print(
        f"seed {seed}: {len(numbers)} command lines ended ({tallied}), {len(failed)} wrongly; at "
        f"most {slowest:.1f} s and {largest / 2**20:.0f} MB; {time.monotonic() - began:.0f} s"
    )
    return failed


def describe(number: int, outcome: Outcome) -> str:
    """A case in some lines."""
    words = " ".join(
        repr(word if len(word) < 200 else word[:90] + "...") for word in outcome.case.words
    )
    about: Mapping[str, object] = outcome.case.environment
    return (
        f"case {number}: {'; '.join(outcome.faults) or 'right'}\n  ksopt {words}\n"
        f"  {dict(about) or ''} code {outcome.code}, {outcome.seconds:.1f} s\n"
        f"  {outcome.output.strip()[-1500:]}\n"
    )


def main() -> int:
    """The command line's own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--only", type=int, default=None, metavar="NUMBER")
    parser.add_argument("--show", action="store_true", help="print every case")
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    return 1 if attack(args.count, seed, args.only, args.show) else 0


if __name__ == "__main__":
    sys.exit(main())
