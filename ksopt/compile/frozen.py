"""Frozen dense weights whose values are Kronecker-sparse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ksopt.pattern import Pattern


class FrozenValues:
    def __init__(self, inputs: Sequence[Any]) -> None:
        self.inputs = inputs

    def pattern(self, at: int) -> Pattern | None:
        return None
