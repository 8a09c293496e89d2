"""Progress of a long measurement as plain lines on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from ksopt.system.plurals import counted


def progress_lines(is_quiet: bool) -> Callable[[str], None]:
    """A function that prints a line of progress with the time of day; nothing if ``is_quiet``."""
    return _discard if is_quiet else _print


def print_left(count: int, noun: str) -> None:
    """Print how many products, layers or cases a stopped measurement left."""
    are, them = ("is", "it") if count == 1 else ("are", "them")
    left = f"{counted(count, noun)} {are} left"
    print(f"{left}: the same command goes on with {them}", file=sys.stderr)


def _discard(text: str) -> None:
    """Discard a line of progress."""


def _print(text: str) -> None:
    print(f"{time.strftime('%X')}  {text}", file=sys.stderr, flush=True)
