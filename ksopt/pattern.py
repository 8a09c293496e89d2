"""Kronecker-sparse patterns and chains of them: pure algebra, no torch.

Source: Gonon, Zheng, Carrivain, Le, "Fast inference with Kronecker-sparse matrices" (the paper).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ksopt.errors import InvalidInputError


@dataclass(frozen=True, order=True)
class Pattern:
    """Support I_a (x) 1_{b x c} (x) I_d of a matrix with a*b*d rows and a*c*d columns."""

    a: int
    b: int
    c: int
    d: int

    @property
    def out_features(self) -> int:
        return self.a * self.b * self.d

    @property
    def in_features(self) -> int:
        return self.a * self.c * self.d

    @property
    def nnz(self) -> int:
        return self.a * self.b * self.c * self.d

    @property
    def weight_shape(self) -> tuple[int, int, int, int]:
        return (self.a, self.b, self.c, self.d)

    def __str__(self) -> str:
        return f"({self.a},{self.b},{self.c},{self.d})"


@dataclass(frozen=True, order=True)
class Chain:
    """A product K_1 K_2 ... K_L of Kronecker-sparse factors; K_L meets the input first."""

    patterns: tuple[Pattern, ...]

    def __iter__(self) -> Iterator[Pattern]:
        return iter(self.patterns)

    def __len__(self) -> int:
        return len(self.patterns)

    def __str__(self) -> str:
        return "*".join(str(p) for p in self.patterns)


__all__ = ["Chain", "InvalidInputError", "Pattern"]
