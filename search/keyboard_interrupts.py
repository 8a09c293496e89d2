"""Ctrl-C handling that loses no interrupt.

Python raises KeyboardInterrupt at any point of the program. In a destructor or a callback of a C
library (a database's, torch's) the exception does not propagate, and the program runs on: Python
prints its traceback and drops it. Libraries may log it (SQLAlchemy's connection pool).
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def remembered() -> Iterator[Callable[[], bool]]:
    """Context that records Ctrl-C, which still raises KeyboardInterrupt; yields a test for it.

    In other threads than the main one, where no signal arrives, there never is one.

    Example:
        >>> with remembered() as interrupted:
        ...     interrupted()
        False
    """
    seen = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        seen.set()
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield seen.is_set
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        with dropped(lambda: None):
            yield seen.is_set
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def dropped(act: Callable[[], None]) -> Iterator[None]:
    """Inside the block, call `act` instead of printing a KeyboardInterrupt that Python drops.

    Records of it that a library logs and no handler takes are not printed either.
    """
    before = sys.unraisablehook
    unread = logging.lastResort  # prints what no handler takes

    def hook(what: sys.UnraisableHookArgs) -> None:
        if isinstance(what.exc_value, KeyboardInterrupt):
            act()
        else:
            before(what)

    sys.unraisablehook = hook
    if unread is not None:
        unread.addFilter(_is_no_interrupt)
    try:
        yield
    finally:
        sys.unraisablehook = before
        if unread is not None:
            unread.removeFilter(_is_no_interrupt)


def _is_no_interrupt(record: logging.LogRecord) -> bool:
    """Whether a log record has no KeyboardInterrupt in its chain of exceptions."""
    error = None if record.exc_info is None else record.exc_info[1]
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return False
        error = error.__cause__ or error.__context__
    return True
