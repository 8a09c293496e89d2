"""The verbosity of a command: writes the records of the logger ``ksopt`` to stderr."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TextIO

LOGGER = "ksopt"


@contextlib.contextmanager
def logged(verbose: int, stream: TextIO) -> Iterator[None]:
    """Write ksopt's log records to a stream inside the block; restore the logger after it.

    Args:
        verbose: 0 changes nothing, so that only warnings are shown; 1 shows the steps, 2 every
            detail.
        stream: The stream to write to.
    """
    if not verbose:
        yield
        return
    logger, handler = logging.getLogger(LOGGER), logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s", "%H:%M:%S"))
    level, propagates = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if verbose == 1 else logging.DEBUG)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates
