"""Progress of a long measurement as plain lines on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable


def progress_lines(is_quiet: bool) -> Callable[[str], None]:
    """A function that prints a line of progress with the time of day; nothing if ``is_quiet``."""
    return _discard if is_quiet else _print


def _discard(text: str) -> None:
    """Discard a line of progress."""


def _print(text: str) -> None:
    print(f"{time.strftime('%X')}  {text}", file=sys.stderr, flush=True)
