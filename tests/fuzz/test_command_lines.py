"""A short part of the command line's fuzzer, with a fresh seed; see `command_lines`."""

import os
import random
import sys
from pathlib import Path

import pytest

from .bad_words import Case
from .command_lines import Sandbox, attack, describe, preload, run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it forks, and looks into /proc")
COUNT = 60
LARGEST = 3 * 2**30


@pytest.fixture(autouse=True)
def room() -> None:
    """A process that ran many tests before is too large for the limits of its children."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    if pages * os.sysconf("SC_PAGE_SIZE") > LARGEST:
        pytest.skip("this process is too large to fork from; run this file alone")


def test_bad_command_lines_are_refused() -> None:
    seed = int(os.environ.get("FUZZ_SEED") or random.SystemRandom().randrange(10**6))
    failed = attack(COUNT, seed)
    texts = "\n".join(describe(number, outcome) for number, outcome in failed)
    again = f"python -m tests.fuzz.command_lines --count {COUNT} --seed {seed} --only NUMBER"
    assert not failed, f"again with: {again}\n{texts}"


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    preload()
    return Sandbox(tmp_path / "sandbox", heavy=False)


SCRIPT = """
import os, sys, time
def build():
    {body}
"""


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("os._exit(1)", "exit code 1"),
        ("os._exit(2)", "no sentence"),
        ("print('Traceback (most recent call last)', flush=True); os._exit(2)", "a traceback"),
        ("open('new', 'w'); raise ValueError('x')", "left behind: new"),
        ("open('full/precious', 'w'); raise ValueError('x')", "a file that was there is changed"),
        ("x = bytearray(2**30 + 2**28); raise ValueError('x')", "GiB of memory"),
        ("os.kill(os.getpid(), 9)", "exit code -9"),
        ("raise ValueError('x')", None),
    ],
)
def test_what_is_wrong_is_noticed(sandbox: Sandbox, body: str, fault: str | None) -> None:
    (sandbox.place / "wrong.py").write_text(SCRIPT.format(body=body))
    case = Case(["convert", "--model", "wrong:build", "--plan", "plan.json", "--out", "folder"])
    outcome = run(sandbox, case, real=False)
    if fault is None:
        assert outcome.faults == ()
    else:
        assert any(fault in one for one in outcome.faults), outcome


def test_the_sandbox_is_as_it_was_after_each_case(sandbox: Sandbox) -> None:
    before = sandbox.content()
    (sandbox.place / "wrong.py").write_text(
        SCRIPT.format(body="os.mkdir('new'); os.remove('file')")
    )
    words = ["convert", "--model", "wrong:build", "--plan", "plan.json", "--out", "folder"]
    assert run(sandbox, Case(words), real=False).faults
    assert sandbox.content() == before
