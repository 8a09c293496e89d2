"""The patterns that the paper benchmarks, and samples of them that are spread evenly.

Source: paper, appendix B.1, Figure 8.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from ksopt.errors import InvalidInputError
from ksopt.patterns.chain import Pattern
from ksopt.patterns.validate import checked_int

BATCH = 25_088
"""The paper's batch: 128 sequences of 196 tokens."""

_LARGEST_TENSOR = 2**31 - 1  # elements; the paper leaves out what 32-bit indices cannot address
_WIDTHS = (48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_REPEATED_D = (4, 16, 64)
_ENERGY_A = (1, 4, 16, 32, 64)
_ENERGY_D = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
# For a > 1 the paper skips these (b, c): their rho is close to that of a cheaper pair.
_SKIPPED_WHEN_REPEATED = {
    (1024, 256),
    (256, 1024),
    (128, 512),
    (512, 128),
    (64, 256),
    (256, 64),
}
# Upper end and name of each class.
_A_CLASSES = ((1, "1"), (4, "2-4"), (16, "6-16"), (128, "24-128"))
_RHO_CLASSES = (
    (0.007, "up to 0.007"),
    (0.014, "0.007 to 0.014"),
    (0.022, "0.014 to 0.022"),
    (1, "above 0.022"),
)


@dataclass(frozen=True, order=True)
class Stratum:
    """The classes of a pattern, each with a name for tables.

    Attributes:
        a: By number of blocks.
        d: By stride, which decides how a kernel can load: no stride, a stride below 8, a multiple
            of 3 from 12 on, a power of two from 8 on.
        rho: By ratio of data to work, in quarters of about equal size.
    """

    a: str
    d: str
    rho: str

    @classmethod
    def of(cls, pattern: Pattern) -> Stratum:
        """The classes of one of the paper's patterns.

        Example:
            >>> Stratum.of(Pattern(4, 64, 64, 16))
            Stratum(a='2-4', d='8,16,32,64,128', rho='above 0.022')
        """
        if pattern.d == 1:
            d = "1"
        elif pattern.d < 8:
            d = "2,3,4,6"
        else:
            d = "12,24,48,96" if pattern.d % 3 == 0 else "8,16,32,64,128"
        return cls(_first_above(pattern.a, _A_CLASSES), d, _first_above(pattern.rho, _RHO_CLASSES))


def patterns() -> tuple[Pattern, ...]:
    """The 627 patterns, in the paper's order: all b, c with b = c, b = 4c or c = 4b that fit.

    Example:
        >>> len(patterns())
        627
    """
    alone = (Pattern(1, b, c, d) for b, c, d in product(_WIDTHS, _WIDTHS, _COUNTS))
    repeated = (
        Pattern(a, b, c, d)
        for a, b, c, d in product(_COUNTS[1:], _WIDTHS, _WIDTHS, _REPEATED_D)
        if (b, c) not in _SKIPPED_WHEN_REPEATED
    )
    return tuple(pattern for pattern in (*alone, *repeated) if _is_kept(pattern))


def stratified_sample(n: int, seed: int) -> tuple[Pattern, ...]:
    """n different patterns of `patterns`, spread over the classes of `Stratum`.

    Each next pattern is one whose classes have been drawn least so far, so rare classes (d = 1,
    many blocks) get their share, and a smaller sample with the same seed is the beginning of a
    larger one.

    Args:
        n: How many, 1 to 627.
        seed: Which of the many such samples; the same seed gives the same sample anywhere.

    Raises:
        InvalidInputError: n or the seed is not an integer in its range.

    Example:
        >>> [str(pattern) for pattern in stratified_sample(3, seed=0)]
        ['(4,128,128,64)', '(1,64,64,96)', '(32,192,192,4)']
    """
    call = f"stratified_sample({n!r}, {seed!r})"
    count = checked_int(n, "n", call)
    start = checked_int(seed, "seed", call, minimum=0)
    # Not random.shuffle: Python promises the same numbers in later versions for random() alone.
    generator = random.Random(start)
    left = sorted(patterns(), key=lambda _: generator.random())
    if count > len(left):
        raise InvalidInputError(f"{call}: n must be at most {len(left)}, got {count}")
    classes = {pattern: tuple(vars(Stratum.of(pattern)).items()) for pattern in left}
    drawn: Counter[tuple[str, str]] = Counter()
    sample = []
    for _ in range(count):
        pattern = min(left, key=lambda each: sum(drawn[label] for label in classes[each]))
        left.remove(pattern)
        drawn.update(classes[pattern])
        sample.append(pattern)
    return tuple(sample)


def energy_patterns() -> tuple[Pattern, ...]:
    """The patterns whose energy the paper measures, those that fit, as in Figure 8.

    Source: paper, appendix B.1. It does not say that what 32-bit indices cannot address is left
    out here as well; its own kernel could not have computed that.

    Example:
        >>> str(energy_patterns()[0])
        '(1,48,48,1)'
    """
    return tuple(
        pattern
        for pattern in (
            Pattern(a, b, c, d)
            for a, b, c, d in product(_ENERGY_A, _WIDTHS, _WIDTHS, _ENERGY_D)
            if (b, c) not in _SKIPPED_WHEN_REPEATED
        )
        if _is_kept(pattern)
    )


def proportional_sample(
    population: Sequence[Pattern], n: int, seed: int, strata: Callable[[Pattern], object]
) -> tuple[Pattern, ...]:
    """n patterns, each stratum with its share, in a random order.

    Every so many-th pattern is drawn from the population sorted by strata, from a random one on. So
    every pattern is as likely as any other: shares and medians of the sample are, without weights,
    estimates of the population's. The first ones of the sample are a sample, too.

    Args:
        population: What is drawn from.
        n: How many; all of them, if there are no more.
        seed: Which of the many such samples.
        strata: What a pattern is sorted by; what can be compared.

    Raises:
        InvalidInputError: n or the seed is not an integer in its range.

    Example:
        >>> found = proportional_sample(patterns(), 3, 0, lambda pattern: pattern.a)
        >>> len(set(found))
        3
    """
    call = f"proportional_sample({n!r}, {seed!r})"
    count = min(checked_int(n, "n", call), len(population))
    generator = random.Random(checked_int(seed, "seed", call, minimum=0))
    # Within a stratum in a random order, which is Python's promise for random() alone.
    ordered = [
        pattern
        for _, _, pattern in sorted(
            ((strata(each), generator.random(), each) for each in population),
            key=lambda found: found[:2],
        )
    ]
    start, step = generator.random(), len(ordered) / count
    drawn = [ordered[int((start + place) * step)] for place in range(count)]
    return tuple(sorted(drawn, key=lambda _: generator.random()))


def _is_kept(pattern: Pattern) -> bool:
    """Whether the paper benchmarks a pattern of its lists: b = c, b = 4c or c = 4b, and it fits."""
    return (
        (pattern.b in (pattern.c, 4 * pattern.c) or pattern.c == 4 * pattern.b)
        and BATCH * max(pattern.shape) <= _LARGEST_TENSOR
        and pattern.nnz <= _LARGEST_TENSOR
    )


def _first_above(value: float, classes: tuple[tuple[float, str], ...]) -> str:
    """The name of the first class whose upper end is not below the value."""
    return next(name for end, name in classes if value <= end)
