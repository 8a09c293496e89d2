"""A pool of processes that predict times while others measure.

It is a separate module because functions of a script cannot be sent to another process.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import threading
from concurrent.futures import ProcessPoolExecutor


def processes(count: int) -> ProcessPoolExecutor:
    """A pool of ``count`` low-priority processes that end with this process."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(count, context, initializer=_stand_back)


def _stand_back() -> None:
    os.nice(10)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
