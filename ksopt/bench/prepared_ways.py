"""The prepared ways of one product, and the error of a lost device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ksopt.bench.rows import Row
from ksopt.errors import KsoptError

Key = tuple[str, str]  # way, layout


class DeviceLost(KsoptError, RuntimeError):
    """The device no longer works in this process, which a faulty kernel can cause.

    Attributes:
        rows: of the subject being measured, to be stored.
    """

    def __init__(self, message: str, rows: list[Row]) -> None:
        super().__init__(message)
        self.rows = rows


@dataclass
class PreparedWays:
    """The prepared ways of one subject: the call of each, or the reason it has none."""

    calls: dict[Key, Callable[[], object]] = field(default_factory=dict)
    chosen: dict[str, str] = field(default_factory=dict)  # by ksopt, of each layout
    shares: dict[Key, int] = field(default_factory=dict)  # products of one timed call
    reasons: dict[Key, str] = field(default_factory=dict)
