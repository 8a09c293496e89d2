"""Constraints on the chains of a search, besides budget, rank and number of factors."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from ksopt.patterns.chain import Chain
from ksopt.patterns.pattern import Pattern
from ksopt.search.space.alignment import Alignment
from ksopt.search.space.block_sizes import ANY_SIZE, BlockSizes
from ksopt.search.space.families import EVERY, is_member


@dataclass(frozen=True)
class Constraints:
    """Constraints on every chain of a space; there are none by default.

    Args:
        families: The allowed families (`families.NAMES`); empty for any.
        block_sizes: The allowed b and c of factors.
        chainable: Whether only chainable chains are allowed (`Chain.is_chainable`).
        alignment: Requirements of the fast kernels on the sizes of factors; None for none.

    Example:
        >>> wide = Constraints(block_sizes=BlockSizes.parse("16-64"))
        >>> wide.admits(Chain.monarch(64, 64, p=2)), wide.admits(Chain.monarch(64, 64, p=8))
        (True, False)
    """

    families: tuple[str, ...] = ()
    block_sizes: BlockSizes = ANY_SIZE
    chainable: bool = False
    alignment: Alignment | None = None

    def admits(self, chain: Chain) -> bool:
        """Whether a chain meets all constraints."""
        return (
            all(map(self.admits_factor, chain))
            and (not self.chainable or chain.is_chainable)
            and (not self.families or any(is_member(name, chain) for name in self.families))
        )

    def names(self, chain: Chain) -> bool:
        """Whether a chain is of a family that is requested by name."""
        return any(is_member(name, chain) for name in self.families if name != EVERY)

    def admits_factor(self, pattern: Pattern) -> bool:
        """Whether the sizes of a factor are allowed."""
        return self.admits_rows(pattern.b, pattern.d) and self.admits_columns(pattern.c, pattern.d)

    def admits_rows(self, b: int, d: int) -> bool:
        """Whether a factor may have these b and d."""
        return self._allows_d(d) and self.block_sizes.holds(b) and b % self.row_step(d) == 0

    def admits_columns(self, c: int, d: int) -> bool:
        """Whether a factor may have these c and d."""
        return self._allows_d(d) and self.block_sizes.holds(c) and c % self.column_step(d) == 0

    def row_step(self, d: int) -> int:
        """The number of which b is a multiple, in a factor with this d."""
        step = self.block_sizes.step
        return step if self.alignment is None else lcm(step, self.alignment.row_step(d))

    def column_step(self, d: int) -> int:
        """The number of which c is a multiple, in a factor with this d."""
        step = self.block_sizes.step
        return step if self.alignment is None else lcm(step, self.alignment.column_step(d))

    @property
    def cut(self) -> bool:
        """Whether they constrain chains of no particular family."""
        return self.chainable or self.alignment is not None or self.block_sizes != ANY_SIZE

    @property
    def is_any_chain(self) -> bool:
        """Whether chains of no particular family are in the space."""
        return not self.families or EVERY in self.families

    @property
    def words(self) -> list[str]:
        """The constraints, each as a phrase that follows "chains"."""
        phrases = []
        if self.families:
            phrases.append(f"of {' or '.join(self.families)}")
        if self.block_sizes != ANY_SIZE:
            phrases.append(f"with every b and c {self.block_sizes.words}")
        if self.chainable:
            phrases.append("chainable")
        if self.alignment is not None:
            phrases.append(f"aligned ({self.alignment.words})")
        return phrases

    def _allows_d(self, d: int) -> bool:
        return self.alignment is None or self.alignment.allows_d(d)


NONE = Constraints()
