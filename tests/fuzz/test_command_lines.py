"""A short part of the command line's fuzzer, with a fresh seed; see `command_lines`.

Everything runs in processes of its own: one that ran many tests before is too large to fork from
under the limits that a case has.
"""

import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from .bad_words import Case
from .command_lines import Sandbox, preload, run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it forks, and looks into /proc")
COUNT = 60


@pytest.mark.slow
def test_bad_command_lines_are_refused() -> None:
    seed = os.environ.get("FUZZ_SEED") or str(random.SystemRandom().randrange(10**6))
    command = [sys.executable, "-m", "tests.fuzz.command_lines", "--count", str(COUNT)]
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        [*command, "--seed", seed], capture_output=True, text=True, cwd=root, timeout=280
    )
    assert ended.returncode == 0, (
        f"one of them again with: python -m tests.fuzz.command_lines --count {COUNT} --seed {seed} "
        f"--only NUMBER\n{ended.stdout}{ended.stderr}"
    )


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=preload) as executor:
        yield executor


SCRIPT = """
import os, sys, time
def build():
    {body}
"""


def faults_of(body: str) -> tuple[tuple[str, ...], bool]:
    """What is wrong with a case whose model does this; whether the sandbox is as before it."""
    with tempfile.TemporaryDirectory() as folder:
        sandbox = Sandbox(Path(folder) / "sandbox", heavy=False)
        (sandbox.place / "wrong.py").write_text(SCRIPT.format(body=body))
        words = ["convert", "--model", "wrong:build", "--plan", "plan.json", "--out", "folder"]
        before = sandbox.content()
        before.pop("wrong.py")
        outcome = run(sandbox, Case(words), real=False)
        after = sandbox.content()
        after.pop("wrong.py", None)
        return outcome.faults, after == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("os._exit(1)", "exit code 1"),
        ("os._exit(2)", "no sentence"),
        ("print('Traceback (most recent call last)', flush=True); os._exit(2)", "a traceback"),
        ("open('new', 'w'); raise ValueError('x')", "left behind: new"),
        ("open('full/precious', 'w'); raise ValueError('x')", "a file that was there is changed"),
        ("os.mkdir('new'); os.remove('file')", "left behind: file, new"),
        ("x = bytearray(2**30 + 2**28); raise ValueError('x')", "GiB of memory"),
        ("os.kill(os.getpid(), 9)", "exit code -9"),
        ("raise ValueError('x')", None),
    ],
)
def test_what_is_wrong_is_noticed_and_undone(
    process: ProcessPoolExecutor, body: str, fault: str | None
) -> None:
    faults, is_as_before = process.submit(faults_of, body).result(timeout=100)
    assert is_as_before
    if fault is None:
        assert faults == ()
    else:
        assert any(fault in one for one in faults), faults
