"""What a choice is made for: a problem, how its rows lie in memory, and how many they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ksopt import precision
from ksopt.kernels.problem import Problem
from ksopt.patterns.chain import Pattern

Rows = Literal["aligned", "unaligned", "scattered"]
"""Rows of x and y (batch_last: of features) that all begin at multiples of 16 bytes; others; and
those whose elements do not lie side by side. The fast kernels are for the first."""


@dataclass(frozen=True)
class Situation:
    """What a choice is made for.

    Attributes:
        problem: what is computed.
        rows: how x lies in memory.
        bits: batches of more than 2 ** (bits - 1) and at most 2 ** bits rows are one situation.
    """

    problem: Problem
    rows: Rows
    bits: int

    @classmethod
    def of(
        cls, pattern: Pattern, dtype: str, batch: int, batch_last: bool, exact: bool | None = None
    ) -> Situation:
        """That of a contiguous x which a GPU's allocator has placed.

        Args:
            pattern: support of K.
            dtype: such as "float16".
            batch: rows of x.
            batch_last: the layout.
            exact: for float32, whether to FP32 accuracy; None takes torch's setting at this moment.
        """
        if dtype != "float32":
            exact = True
        elif exact is None:
            exact = precision.is_exact()
        size = getattr(torch, dtype).itemsize
        row = batch if batch_last else pattern.in_features
        rows: Rows = "aligned" if row * size % 16 == 0 else "unaligned"
        return cls(Problem(pattern, dtype, batch_last, exact), rows, bits_of(batch))

    @property
    def largest_batch(self) -> int:
        """The most rows that are still the same situation."""
        return int(2**self.bits)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        p = self.problem
        return {
            "pattern": str(p.pattern),
            "dtype": p.dtype,
            "layout": "batch_last" if p.batch_last else "batch_first",
            "exact": p.exact,
            "rows": self.rows,
            "batch_up_to": self.largest_batch,
        }

    @classmethod
    def from_json(cls, values: Any) -> Situation:
        """The situation whose `to_json` gave ``values``.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: they are not such values.
        """
        problem = Problem(
            Pattern.parse(values["pattern"]),
            values["dtype"],
            values["layout"] == "batch_last",
            values["exact"],
        )
        found = cls(problem, values["rows"], bits_of(values["batch_up_to"]))
        if found.rows not in get_args(Rows) or found.to_json() != values:
            raise ValueError(f"not a situation: {values!r}")
        return found

    def __str__(self) -> str:
        values = self.to_json()
        words = [values["pattern"], values["dtype"], values["layout"]]
        words += [] if self.problem.exact else ["tf32"]
        words += [] if self.rows == "aligned" else [self.rows]
        return f"{' '.join(words)} batch<={self.largest_batch}"


def bits_of(batch: int) -> int:
    """The situation's ``bits`` for so many rows.

    Example:
        >>> [bits_of(batch) for batch in (1, 2, 3, 64, 65, 25_088)]
        [0, 1, 2, 6, 7, 15]
    """
    return max(0, batch - 1).bit_length()


def rows_of(x: Tensor, batch_last: bool, batch: int) -> Rows:
    """How x lies in memory, as the launcher will see it.

    Args:
        x: (*batch, N), or (N, *batch) when batch_last.
        batch_last: the layout.
        batch: rows of x.
    """
    size = x.element_size()
    if x.data_ptr() % 16 != 0 or (batch_last and batch * size % 16 != 0):
        return "unaligned"  # batch last, y's rows are as long as the batch
    if x.is_contiguous():
        row = batch if batch_last else x.shape[-1]
    elif x.stride(-1) != 1:
        return "scattered"
    else:
        row = x.stride(0) if batch_last else x.stride(-2)
    return "aligned" if row * size % 16 == 0 else "unaligned"
