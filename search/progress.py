"""What a person sees while a search runs: a bar on a terminal, lines elsewhere, or nothing."""

from __future__ import annotations

import time
from typing import Protocol, TextIO

from ksopt.search.results import TrialRecord

_SECONDS_BETWEEN_LINES = 10.0


class Progress(Protocol):
    """Told by `run_search` how far it is."""

    def note(self, text: str) -> None:
        """A stage begins."""

    def start(self, total: int, done: int) -> None:
        """``total`` trials, of which ``done`` come from earlier runs."""

    def trial(self, record: TrialRecord, best: TrialRecord | None) -> None:
        """A trial has ended; ``best`` is the fastest so far."""

    def close(self) -> None:
        """Nothing more comes; called once, also when the search fails."""


class Silent:
    """Shows nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def start(self, total: int, done: int) -> None:
        """Nothing."""

    def trial(self, record: TrialRecord, best: TrialRecord | None) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Lines:
    """Plain lines, at most one in ten seconds besides the stages: for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._total = self._done = 0
        self._best = _Best()
        self._last = time.monotonic()

    def note(self, text: str) -> None:
        """Print it."""
        print(text, file=self._stream, flush=True)

    def start(self, total: int, done: int) -> None:
        """Remember the numbers."""
        self._total, self._done = total, done

    def trial(self, record: TrialRecord, best: TrialRecord | None) -> None:
        """Print how far it is, if nothing was printed for a while."""
        self._done += 1
        if time.monotonic() - self._last >= _SECONDS_BETWEEN_LINES or self._done == self._total:
            self._last = time.monotonic()
            self.note(f"{self._done} of {self._total} chains measured{self._best.of(best)}")

    def close(self) -> None:
        """Nothing to close."""


class Bar:
    """A bar with the time left, on a terminal."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=Console(file=stream),
            transient=True,
        )
        self._task = self._bar.add_task("", total=None, visible=False)
        self._best = _Best()
        self._bar.start()

    def note(self, text: str) -> None:
        """Print it above the bar."""
        self._bar.console.print(text, markup=False, highlight=False)

    def start(self, total: int, done: int) -> None:
        """Show the bar."""
        self._bar.update(
            self._task, total=total, completed=done, visible=True, description="measuring chains"
        )

    def trial(self, record: TrialRecord, best: TrialRecord | None) -> None:
        """Move the bar."""
        doing = f"measuring chains{self._best.of(best)}"
        self._bar.update(self._task, advance=1, description=doing)

    def close(self) -> None:
        """Take the bar away."""
        self._bar.stop()


def for_terminal(stream: TextIO, quiet: bool = False) -> Progress:
    """The progress that suits a stream: a bar on a terminal, lines elsewhere, nothing if quiet."""
    if quiet:
        return Silent()
    return Bar(stream) if stream.isatty() else Lines(stream)


class _Best:
    """Says how fast the fastest chain is, and of which size where there are several."""

    def __init__(self) -> None:
        self._sizes: set[tuple[int, int]] = set()

    def of(self, best: TrialRecord | None) -> str:
        if best is None or best.ratio is None:
            return ""
        chain = best.facts.chain
        size = (chain.in_features, chain.out_features)
        self._sizes.add(size)
        of = f" of {size[0]}x{size[1]}" if len(self._sizes) > 1 else ""
        return f", best{of} {1 / best.ratio:.2f}x dense's speed"
