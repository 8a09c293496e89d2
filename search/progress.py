"""Progress display of a search: a bar on a terminal or in a notebook, lines elsewhere."""

from __future__ import annotations

import io
import sys
import time
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from ksopt.search.results import TrialRecord
from ksopt.system.plurals import counted

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress

_SECONDS_BETWEEN_LINES = 10.0
_SECONDS_BETWEEN_CELLS = 0.25
_COLUMNS_OF_A_CELL = 100


class Progress(Protocol):
    """Receiver of the progress of `run_search`."""

    def note(self, text: str) -> None:
        """Report that a stage begins."""

    def start(self, total: int, done: int) -> None:
        """Report ``total`` trials, of which ``done`` are from earlier runs."""

    def trial(self, record: TrialRecord, best: TrialRecord | None) -> None:
        """Report the end of a trial; ``best`` is the fastest so far."""

    def close(self) -> None:
        """End the display; called once, also when the search fails."""


class Silent:
    """Progress without output."""

    def note(self, text: str) -> None:
        """Do nothing."""

    def start(self, total: int, done: int) -> None:
        """Do nothing."""

    def trial(self, record: TrialRecord, best: TrialRecord | None) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class Lines:
    """Progress as plain lines for logs and pipes, at most one in ten seconds besides the stages."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._total = self._done = 0
        self._best = _Best()
        self._last = time.monotonic()

    def note(self, text: str) -> None:
        """Print the stage."""
        print(text, file=self._stream, flush=True)

    def start(self, total: int, done: int) -> None:
        """Store the numbers."""
        self._total, self._done = total, done

    def trial(self, record: TrialRecord, best: TrialRecord | None) -> None:
        """Print the progress, if nothing was printed for a while."""
        self._done += 1
        if time.monotonic() - self._last >= _SECONDS_BETWEEN_LINES or self._done == self._total:
            self._last = time.monotonic()
            self.note(
                f"{self._done} of {counted(self._total, 'chain')} measured{self._best.of(best)}"
            )

    def close(self) -> None:
        """Do nothing."""


class Bar:
    """Progress bar with the remaining time, on a terminal."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console

        self._bar = _bar_on(Console(file=stream))
        self._task = self._bar.add_task("", total=None, visible=False)
        self._best = _Best()
        self._bar.start()

    def note(self, text: str) -> None:
        """Print the stage above the bar."""
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
        """Remove the bar."""
        self._bar.stop()


class Cell(Bar):
    """Progress bar in a notebook, under the running cell: rich's own bar there needs widgets.

    Args:
        display: IPython's module of that name.
    """

    def __init__(self, display: Any) -> None:
        from rich.console import Console

        console = Console(
            file=io.StringIO(),
            record=True,
            color_system="truecolor",
            width=_COLUMNS_OF_A_CELL,
            force_terminal=True,
            force_jupyter=False,
        )
        self._bar = _bar_on(console)
        self._task = self._bar.add_task("", total=None, visible=False)
        self._best = _Best()
        self._display = display
        self._shown = display.display(display.HTML(""), display_id=True)
        self._last = 0.0

    def note(self, text: str) -> None:
        """Show the stage until the next one."""
        self._bar.update(self._task, description=text, visible=True)
        self._show(at_once=True)

    def start(self, total: int, done: int) -> None:
        """Show the bar."""
        super().start(total, done)
        self._show(at_once=True)

    def trial(self, record: TrialRecord, best: TrialRecord | None) -> None:
        """Move the bar."""
        super().trial(record, best)
        self._show()

    def close(self) -> None:
        """Remove the bar."""
        self._shown.update(self._display.HTML(""))

    def _show(self, at_once: bool = False) -> None:
        now = time.monotonic()
        if at_once or now - self._last >= _SECONDS_BETWEEN_CELLS:
            self._last = now
            console = self._bar.console
            console.print(self._bar.get_renderable())
            lines = console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
            self._shown.update(self._display.HTML(lines))


def _bar_on(console: Console) -> RichProgress:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


def for_terminal(stream: TextIO, quiet: bool = False) -> Progress:
    """The progress that suits a stream: a bar on a terminal or in a notebook, lines elsewhere.

    Args:
        stream: the output; a notebook's cell is used instead if there is one.
        quiet: show nothing.
    """
    if quiet:
        return Silent()
    display = _display_of_notebook()
    if display is not None:
        return Cell(display)
    return Bar(stream) if stream.isatty() else Lines(stream)


def _display_of_notebook() -> Any:
    """IPython's display in a notebook's kernel; else None."""
    ipython = sys.modules.get("IPython")
    if ipython is None:
        return None
    is_notebook = getattr(ipython.get_ipython(), "kernel", None) is not None
    return ipython.display if is_notebook else None


class _Best:
    """Text on the speed of the fastest chain, with its size if there are several."""

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
