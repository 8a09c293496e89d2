"""Operands of products, and the list of the ways to write a product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .sketch import RefusedError, Sketch, divisors, features, rank_of_features


@dataclass(frozen=True)
class Operand:
    """An input of a product.

    Args:
        name: the variable.
        lead: its dims that are not features.
        a, b, c, d: the pattern that it is multiplied by; its features are a*c*d.
    """

    name: str
    lead: tuple[int, ...]
    a: int
    b: int
    c: int
    d: int

    @property
    def inputs(self) -> int:
        return self.a * self.c * self.d

    @property
    def outputs(self) -> int:
        return self.a * self.b * self.d


Spelling = Callable[[Sketch, Operand], str]
"""Writes statements; returns the variable of the result."""

SPELLINGS: dict[str, tuple[Spelling, float]] = {}
"""name -> how it is written, and how often compared with the others."""


def spelling(share: float = 1.0) -> Callable[[Spelling], Spelling]:
    def register(function: Spelling) -> Spelling:
        SPELLINGS[function.__name__] = (function, share)
        return function

    return register


def product(g: Sketch, name: str) -> str:
    """Multiply a variable, one way or another.

    Raises:
        RefusedError: that way does not fit it.
    """
    shape = g.shape(name)
    total = features(shape)
    if total < 2 or total > 96:
        raise RefusedError("too few features, or too many")
    lead = shape[: len(shape) - rank_of_features(shape)]
    a = g.rng.choice(divisors(total)[1:] if g.chance(0.85) else divisors(total))
    d = g.rng.choice(divisors(total // a)) if g.chance(0.35) else 1
    b = g.pick(1, 2, 3, 4, 5, 6, 8)
    if a * b * d > 96:
        raise RefusedError("too many features")
    names = list(SPELLINGS)
    which = g.rng.choices(names, [SPELLINGS[one][1] for one in names])[0]
    return SPELLINGS[which][0](g, Operand(name, lead, a, b, total // (a * d), d))


def groups(g: Sketch, x: Operand, *sizes: int) -> str:
    """An expression of x as [*lead, *sizes]."""
    if g.shape(x.name) == (*x.lead, *sizes) and g.chance(0.8):
        return x.name
    flat = len(g.shape(x.name)) == len(x.lead) + 1
    texts = ", ".join(map(str, sizes))
    if flat and g.chance(0.3):
        return f"{x.name}.unflatten(-1, ({texts}))"
    how = g.pick("view", "reshape", "reshape")
    return f"{x.name}.{how}({g.sizes((*x.lead, *sizes))})"


def rows(g: Sketch, x: Operand, *sizes: int) -> str:
    """An expression of x as [-1, *sizes]."""
    if len(x.lead) == 1:
        return groups(g, x, *sizes)
    return f"{x.name}.reshape(-1, {', '.join(map(str, sizes))})"


def flat(g: Sketch, x: Operand) -> str:
    """An expression of x as [*lead, features]."""
    if g.shape(x.name) == (*x.lead, x.inputs):
        return x.name
    if x.lead and g.chance(0.4):
        return f"{x.name}.flatten({len(x.lead)})"
    return groups(g, x, x.inputs)
