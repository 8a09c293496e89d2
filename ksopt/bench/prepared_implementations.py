"""The prepared implementations of one product: what is called, and why others are not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ksopt.measure.timing import Measurement

Key = tuple[str, str]  # name, layout


@dataclass
class PreparedImplementations:
    """The prepared implementations of one subject: the call of each, its time, or why neither.

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
