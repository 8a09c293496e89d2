"""How much a command logs: what the logger ``ksopt`` says goes to stderr."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TextIO

LOGGER = "ksopt"


@contextlib.contextmanager
def logged(verbose: int, stream: TextIO) -> Iterator[None]:
    """Write what ksopt logs to a stream; as before outside of it.

    Args:
        verbose: 0 changes nothing, so that warnings alone are shown; 1 is for what is done, 2 for
            every detail.
        stream: Where to.
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
