"""A few kills, with a fresh seed; see `kills`."""

import random
import sys
from pathlib import Path

import pytest

from .kill_checks import Case, Search, Tune
from .kills import ORPHANS_S, Harness
from .victims import Victim

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc"),
]


@pytest.mark.parametrize(
    ("case", "aim"),
    [(Search(workers=2), "uniform"), (Tune(), "writing")],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_killed_command_loses_nothing_and_does_nothing_twice(
    case: Case, aim: str, tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    tally = Harness(case, random.Random(seed), aim, tmp_path, print).run(1)
    assert tally.kills == 1
    assert tally.again >= 1
    assert tally.faults == []
    assert tally.orphans_s < ORPHANS_S


START = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print("started", flush=True)
time.sleep(60)
"""


def test_a_process_that_outlives_its_parent_is_seen(tmp_path: Path) -> None:
    """Whatever session it is in; and it does not outlive the harness."""
    victim = Victim(["-c", START], {}, tmp_path / "log")
    while "started" not in victim.printed():
        assert not victim.ended, victim.printed()
    victim.kill()
    left, took = victim.orphans(0.5)
    assert len(left) == 1
    assert "time.sleep(60)" in left[0]
    assert took >= 0.5
    assert victim.orphans(5)[0] == []


class Careless(Search):
    """Says that more was finished than there is."""

    def stored(self, folder: Path) -> dict[str, object]:
        """One more at each call."""
        self.__dict__["count"] = self.__dict__.get("count", 0) + 1
        return {"0": self.__dict__["count"]}


def test_what_is_lost_is_noticed(tmp_path: Path) -> None:
    tally = Harness(Careless(workers=1), random.Random(0), "uniform", tmp_path, print).run(1)
    assert len(tally.faults) == 1
    assert "finished before the kill, and not there after: ['0']" in tally.faults[0]
