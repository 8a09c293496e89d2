"""The prepared ways of one product, and the error of a lost device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ksopt.bench.rows import Row
from ksopt.errors import KsoptError
from ksopt.measure.timing import Measurement

Key = tuple[str, str]  # way, layout


class DeviceLost(KsoptError, RuntimeError):
    """The device no longer works in this process, which a faulty kernel can cause.

    Attributes:
        rows: of the subject being measured, to be stored.
    """

    def __init__(self, message: str, rows: list[Row]) -> None:
        super().__init__(message)
        self.rows = rows


class FirstCall:
    """A way that is timed call by call: for some the one that is checked is long enough.

    Args:
        way: (x) -> y.
        device: where it computes.
    """

    def __init__(self, way: Callable[[Tensor], Tensor], device: torch.device) -> None:
        self._way, self._device = way, device
        self.us = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        """The result of the way."""
        self._wait()
        began = time.perf_counter()
        y = self._way(x)
        self._wait()
        self.us = 1e6 * (time.perf_counter() - began)
        return y

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


@dataclass
class PreparedWays:
    """The prepared ways of one subject: the call of each, its time, or the reason it has neither.

    Attributes:
        calls: to be timed.
        chosen: by ksopt, of each layout.
        shares: products of one timed call.
        reasons: for no call.
        times: of ways whose single call was far behind: they are called no more.
        checked_us: of the single calls of PyTorch's other ways.
    """

    calls: dict[Key, Callable[[], object]] = field(default_factory=dict)
    chosen: dict[str, str] = field(default_factory=dict)
    shares: dict[Key, int] = field(default_factory=dict)
    reasons: dict[Key, str] = field(default_factory=dict)
    times: dict[Key, Measurement] = field(default_factory=dict)
    checked_us: list[float] = field(default_factory=list)

    def is_far_behind(self, us: float, ratio: float, long_us: float) -> bool:
        """Whether a single call takes this many times another way's, and is long.

        The other one may have loaded kernels, too: that way is as fast, or faster.
        """
        return us > max(long_us, ratio * min(self.checked_us, default=us))
