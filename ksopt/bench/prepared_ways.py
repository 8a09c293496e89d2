"""What a benchmark has prepared of one product, and how it says that its device is lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ksopt.bench.rows import Row
from ksopt.errors import KsoptError

Key = tuple[str, str]  # way, layout


class DeviceLost(KsoptError, RuntimeError):
    """The device no longer works in this process, which a faulty kernel can bring about.

    Attributes:
        rows: what is to be kept of the subject that it was lost on.
    """

    def __init__(self, message: str, rows: list[Row]) -> None:
        super().__init__(message)
        self.rows = rows


@dataclass
class PreparedWays:
    """The ways of one subject, prepared: to be called, or with a reason why not."""

    calls: dict[Key, Callable[[], object]] = field(default_factory=dict)
    chosen: dict[str, str] = field(default_factory=dict)  # by ksopt, of each layout
    shares: dict[Key, int] = field(default_factory=dict)  # products of one timed call
    reasons: dict[Key, str] = field(default_factory=dict)
