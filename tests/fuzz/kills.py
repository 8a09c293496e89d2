"""``python -m tests.fuzz.kills``: commands are killed (SIGKILL) at random moments, and run again.

After each kill nothing that was finished may be lost and nothing half made may pass for whole; no
process may be left after ten seconds. After the same command has run again its work must be done
once, what was finished before must be as it was, and nothing may be left behind.

A folder sees one to six kills before its command is let through. The moments are uniform over the
time that the command takes undisturbed. With ``--aim writing`` they come within some milliseconds
after a file has appeared or gone, where a uniform moment rarely falls.

examples:
  python -m tests.fuzz.kills --what search --workers 2 --count 100
  python -m tests.fuzz.kills --what convert tune compile --count 100 --seed 5 --aim writing
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .kill_checks import Case, Compile, Convert, Search, Tune
from .victims import Victim

ORPHANS_S = 10.0
"""After so long nothing may be left of a command that was killed."""
_LONGEST_S = 180.0
_MOST_KILLS = 6
_AIMS = ("uniform", "writing")
_LATER_S = 0.03
"""A kill that is aimed comes at most so long after a change of the files."""


@dataclass
class Tally:
    """What was seen.

    Args:
        kills: Processes killed.
        early: Commands that had ended before their moment came: those do not count.
        again: Commands that were let through afterwards.
        orphans_s: The longest that a process outlived the killed one.
        faults: What must not be.
    """

    kills: int = 0
    early: int = 0
    again: int = 0
    orphans_s: float = 0.0
    faults: list[str] = field(default_factory=list)


class Harness:
    """Kills one command again and again.

    Args:
        case: The command.
        rng: Draws the moments and the victims.
        aim: "uniform" or "writing".
        place: A folder for the command's own folders.
        say: Gets a line for each kill.
    """

    def __init__(
        self, case: Case, rng: random.Random, aim: str, place: Path, say: Callable[[str], None]
    ) -> None:
        self._case, self._rng, self._aim, self._place, self._say = case, rng, aim, place, say
        self._folders = 0
        self._takes_s = 0.0
        self.tally = Tally()

    def run(self, count: int) -> Tally:
        """Kill it so many times."""
        self._undisturbed()
        while self.tally.kills < count:
            self._round(min(self._rng.randint(1, _MOST_KILLS), count - self.tally.kills))
        return self.tally

    def _folder(self, name: str = "") -> Path:
        self._folders += 1
        folder = self._place / (name or f"{self._case.name}-{self._folders}")
        folder.mkdir()
        return folder

    def _start(self, folder: Path, kills: int) -> Victim:
        arguments = self._case.arguments(folder, kills)
        return Victim(arguments, self._case.environment(folder), folder / "log")

    def _undisturbed(self) -> None:
        """The duration of the command without a kill, after which its invariants are checked."""
        folder = self._folder("reference")
        began = time.monotonic()
        victim = self._start(folder, 0)
        code = victim.wait(_LONGEST_S)
        self._takes_s = time.monotonic() - began
        try:
            self._case.check_done(folder, {}, code)
        except AssertionError as error:
            raise AssertionError(f"undisturbed: {error}\n{victim.printed()}") from None
        self._say(f"{self._case.name}: {self._takes_s:.1f} s undisturbed")

    def _round(self, kills: int) -> None:
        folder = self._folder()
        done = 0
        try:
            for _ in range(kills):
                done += self._kill(folder, done)
            victim = self._start(folder, done)
            stored = self._case.stored(folder)
            code = victim.wait(_LONGEST_S)
            self.tally.again += 1
            self._check(victim, lambda: self._case.check_done(folder, stored, code))
        except AssertionError as error:
            self.tally.faults.append(f"{folder}: {error}")
            self._say(f"FAULT {folder}: {error}")
        else:
            shutil.rmtree(folder)

    def _kill(self, folder: Path, done: int) -> int:
        """Run the command, kill it, check the remaining files; 1, or 0 if it ended before."""
        began = time.monotonic()
        victim = self._start(folder, done)
        moment = self._rng.uniform(0, self._takes_s)
        if self._aim == "writing":
            self._wait_for_a_change(victim, folder)
            time.sleep(self._rng.uniform(0, _LATER_S))
        elif victim.ends_within(moment):
            self._takes_s = time.monotonic() - began  # caches are warm now, or others are idle
        stored = self._case.stored(folder)
        others = victim.others()
        if victim.ended:
            self.tally.early += 1
            return 0
        who = "the command"
        if others and self._rng.random() < 0.25:
            who = "a process that it started"
            victim.kill(self._rng.choice(others))
            # It replaces it, or ends with a sentence.
            code = victim.wait(_LONGEST_S)
            self._check(victim, lambda: _no_traceback(victim, code))
        else:
            victim.kill()
        left, took = victim.orphans(ORPHANS_S)
        self.tally.orphans_s = max(self.tally.orphans_s, took)
        self.tally.kills += 1
        self._say(
            f"kill {self.tally.kills}: {who} after {moment:.2f} s, {len(others)} others, gone "
            f"after {took:.2f} s, {len(stored)} finished"
        )
        assert not left, f"still there after {ORPHANS_S:.0f} s: {left}"
        self._check(victim, lambda: self._case.check_killed(folder))
        now = self._case.stored(folder)
        lost = [name for name, value in stored.items() if now.get(name) != value]
        assert not lost, f"finished before the kill, and not there after: {lost}"
        return 1

    def _wait_for_a_change(self, victim: Victim, folder: Path) -> None:
        """Until the files have changed so many times as chance says, or the command has ended."""
        changes, before = self._rng.randint(1, 12), _names(folder)
        while changes and not victim.ended:
            time.sleep(0.001)
            now = _names(folder)
            changes -= now != before
            before = now

    def _check(self, victim: Victim, check: Callable[[], None]) -> None:
        try:
            check()
        except AssertionError as error:
            raise AssertionError(f"{error}\n{victim.printed()}") from None


def _names(folder: Path) -> frozenset[str]:
    return frozenset(
        os.path.join(place, name)  # noqa: PTH118
        for place, _, files in os.walk(folder)
        for name in [*files, "."]
        if name != "log"
    )


def _no_traceback(victim: Victim, code: int) -> None:
    assert code in (0, 1), f"exit code {code}"
    assert code == 0 or "\nksopt: " in f"\n{victim.printed()}", "it ended without a sentence"


def cases(names: Sequence[str], workers: int) -> list[Case]:
    """The commands of these names."""
    known: dict[str, Case] = {
        case.name: case for case in (Search(workers), Convert(), Tune(), Compile())
    }
    return [known[name] for name in names]


def main(arguments: Sequence[str] | None = None) -> int:
    """Kill as the arguments say; 1 if there was a fault."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz.kills",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = ("search", "convert", "tune", "compile")
    parser.add_argument("--what", nargs="+", choices=names, default=["search"])
    parser.add_argument("--workers", type=int, default=1, help="of a search (%(default)s)")
    parser.add_argument("--count", type=int, default=10, help="kills in all (%(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="of the moments (a fresh one)")
    parser.add_argument("--aim", choices=_AIMS, default="uniform", help="%(default)s")
    args = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(2**32) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    rng = random.Random(seed)
    place = Path(tempfile.mkdtemp(prefix="kills-"))
    faults = 0
    chosen = cases(args.what, args.workers)
    for turn, case in enumerate(chosen):
        count = args.count // len(chosen) + (turn < args.count % len(chosen))
        own = place / case.name
        own.mkdir()
        tally = Harness(case, rng, args.aim, own, lambda line: print(line, flush=True)).run(count)
        faults += len(tally.faults)
        print(
            f"{case.name}: {tally.kills} kills ({tally.early} commands had ended before), "
            f"{tally.again} runs to the end, the last process gone after at most "
            f"{tally.orphans_s:.2f} s, {len(tally.faults)} faults",
            flush=True,
        )
    if faults:
        print(f"what is left of the faults is in {place}", flush=True)
    else:
        shutil.rmtree(place)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
