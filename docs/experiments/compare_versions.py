"""Compares search, explain, convert, tune, bench and doctor of two versions on the same inputs.

    git worktree add /tmp/before 792ddf8
    python docs/experiments/compare_versions.py /tmp/before .

Needs no GPU, and takes some 20 minutes. Both versions run the same commands in processes of their
own, with simulated times (`versions.played_times`), so that results that depend on times can be
compared, too. Prints a table, the differences, and which of them are deliberate
(`versions.deliberate`). Exits with 1 if any is not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from versions import documents
from versions.cases import CASES, Case
from versions.comparing import Deliberate, Difference, counted, differences, sorted_out
from versions.deliberate import DELIBERATE
from versions.running import ROOT, RunError, Version

_LAYERS = ("docs/experiments/versions/layers", "tests/compile/corpus", "tests/compile/models")
_SHOWN = 12


@dataclass(frozen=True)
class Outcome:
    """The outcome of one case.

    Attributes:
        case: the case.
        compared: the compared parts, with their numbers of entries.
        unexpected: differences that `DELIBERATE` does not list.
        deliberate: the other differences, by kind.
    """

    case: Case
    compared: str
    unexpected: list[Difference] = field(default_factory=list)
    deliberate: dict[Deliberate, list[Difference]] = field(default_factory=dict)

    @property
    def row(self) -> str:
        """The outcome's row of the table."""
        deliberate = sum(map(len, self.deliberate.values()))
        same = f"but for {deliberate} deliberate differences" if deliberate else "yes"
        same = "no" if self.unexpected else same
        return f"| {self.case.command} | {self.case.title} | {self.compared} | {same} |"


def compared(case: Case, before: Version, now: Version, home: Path) -> Outcome:
    """Run a case in both versions, and compare their outputs."""
    outputs: list[dict[str, Any]] = []
    for version in (before, now):
        folder = home / version.name
        folder.mkdir()
        try:
            outputs.append(case.run(version, folder))
        except RunError as error:
            outputs.append({"failed": str(error)})
    earlier, later = outputs
    differing = list(differences(earlier, later))
    if "failed" in earlier and "failed" in later:  # nothing was compared
        differing = [Difference("failed", earlier["failed"], later["failed"])]
    return Outcome(
        case, counted(earlier), *sorted_out(case.command, differing, DELIBERATE, case.title)
    )


def layers_case(modules: Path) -> Case:
    """Every layer of the corpus, and random modules, explained in one process."""
    folders = [*(ROOT / name for name in _LAYERS), modules]
    line = " ".join(map(str, folders))
    title = "the corpus of layers, whole models, random modules"
    return Case("explain", title, (line,), documents.explained, module="versions.explained")


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare and print; return 1 if there is an unexpected difference."""
    options = _options(arguments)
    with tempfile.TemporaryDirectory(prefix="ksopt-versions-") as name:
        home = Path(name)
        before, now = (
            Version(kind, tree.resolve(), home / f"{kind}-version")
            for kind, tree in (("before", options.before), ("now", options.now))
        )
        before.lay_out()
        now.lay_out()
        modules = home / "modules"
        cases = [*CASES, layers_case(modules)]
        cases = [one for one in cases if options.only in f"{one.command}: {one.title}"]
        if any(one.module == "versions.explained" for one in cases):
            words = ["versions.written", str(modules), str(options.modules)]
            now.run(home, words, path=[ROOT])
        outcomes = []
        print("| command | input | compared | the same |\n|---|---|---|---|", flush=True)
        for number, case in enumerate(cases):
            folder = home / f"case-{number}"
            folder.mkdir()
            outcomes.append(compared(case, before, now, folder))
            print(outcomes[-1].row, flush=True)
    _print_differences(outcomes)
    return 1 if any(one.unexpected for one in outcomes) else 0


def _print_differences(outcomes: Sequence[Outcome]) -> None:
    for one in outcomes:
        if one.unexpected:
            print(f"\n{one.case.command}, {one.case.title}: {len(one.unexpected)} differences")
            print(*(f"- {difference}" for difference in one.unexpected[:_SHOWN]), sep="\n")
    for kind in DELIBERATE:
        places = [each for one in outcomes for each in one.deliberate.get(kind, ())]
        if places:
            print(f"\nDeliberate, {kind.command}, {len(places)} times: {kind.reason}")
            print(f"- such as {places[0]}")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, help="a checkout of the version before")
    parser.add_argument("now", type=Path, help="a checkout of the version now")
    parser.add_argument("--only", default="", help="cases with this text in 'command: input'")
    parser.add_argument("--modules", type=int, default=100, help="random modules (%(default)s)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
