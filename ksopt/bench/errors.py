"""Errors of benchmarks that other benchmarks handle."""

from __future__ import annotations

from ksopt.bench.rows import Row
from ksopt.errors import KsoptError


class DeviceLost(KsoptError, RuntimeError):
    """The device no longer works in this process, which a faulty kernel can cause.

    Attributes:
        rows: of the subject being measured, to be stored.
    """

    def __init__(self, message: str, rows: list[Row]) -> None:
        super().__init__(message)
        self.rows = rows
