"""A Ctrl-C that a library caught prints nothing."""

import logging
import sys

from ksopt.search import keyboard_interrupts


def log_an_error_while_one_is_handled(first: BaseException) -> None:
    """As SQLAlchemy does of a cursor that cannot be closed either, where no handler reads it."""
    try:
        raise first
    except BaseException:
        try:
            raise ValueError("the cursor is gone")
        except ValueError:
            what = ("pool", logging.ERROR, __file__, 1, "Error closing cursor", (), sys.exc_info())
            logging.lastResort.handle(logging.LogRecord(*what))


def test_an_error_that_came_while_an_interrupt_was_handled_is_not_printed(capsys):
    with keyboard_interrupts.dropped(lambda: None):
        log_an_error_while_one_is_handled(KeyboardInterrupt())
    assert capsys.readouterr().err == ""


def test_other_errors_are(capsys):
    with keyboard_interrupts.dropped(lambda: None):
        log_an_error_while_one_is_handled(OSError("the disk is full"))
    assert "Error closing cursor" in capsys.readouterr().err
