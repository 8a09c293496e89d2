"""The time of one call, for the host that waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

import torch

from ksopt.measure import device_types

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class TimedCall(Generic[_Arguments, _Result]):
    """A function that returns its results and records the time of its last call.

    The time ends when the device has computed the result. Unlike a sample (timers.py), it contains
    what the host does: in a first call, compilation, loading of libraries and allocation.

    Args:
        function: to be called.
        device: where it computes.

    Attributes:
        us: microseconds of the last call; 0 before the first, and after one that raised.
    """

    def __init__(self, function: Callable[_Arguments, _Result], device: torch.device) -> None:
        self._function, self._device = function, device
        self.us = 0.0

    def __call__(self, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        """The result of the function."""
        self.us = 0.0
        self._wait()
        began = time.perf_counter_ns()
        result = self._function(*args, **kwargs)
        self._wait()
        self.us = (time.perf_counter_ns() - began) / 1e3
        return result

    def _wait(self) -> None:
        device_types.synchronize(self._device)
