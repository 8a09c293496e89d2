"""The patterns that the paper benchmarks, and evenly spread samples of them.

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

_LARGEST_TENSOR = 2**31 - 1  # elements; the paper omits tensors that need 64-bit indices
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
        a: Class of the number of blocks.
        d: Class of the stride, which decides how a kernel can load: no stride, a stride below 8, a
            multiple of 3 from 12 on, a power of two from 8 on.
        rho: Class of the ratio of data to work, in quarters of about equal size.
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
    return tuple(pattern for pattern in (*alone, *repeated) if _is_benchmarked(pattern))


def stratified_sample(n: int, seed: int) -> tuple[Pattern, ...]:
    """A sample of n distinct `patterns`, spread over the classes of `Stratum`.

    Each next pattern is one whose classes have been drawn least so far, so rare classes (d = 1,
    many blocks) get their share. A smaller sample with the same seed is the beginning of a larger
    one.

    Args:
        n: Size of the sample, 1 to 627.
        seed: The same seed gives the same sample on any machine.

    Raises:
        InvalidInputError: n or the seed is not an integer in its range.

    Example:
        >>> [str(pattern) for pattern in stratified_sample(3, seed=0)]
        ['(4,128,128,64)', '(1,64,64,96)', '(32,192,192,4)']
    """
    call = f"stratified_sample({n!r}, {seed!r})"
    count = checked_int(n, "n", call)
    start = checked_int(seed, "seed", call, minimum=0)
    # Not random.shuffle: Python guarantees the same numbers in later versions for random() only.
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
    """The patterns whose energy the paper measures, without those that do not fit, as in Figure 8.

    Source: paper, appendix B.1. It does not state that tensors beyond 32-bit indices are omitted
    here as well; its own kernel could not have computed them.

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
        if _is_benchmarked(pattern)
    )


def proportional_sample(
    population: Sequence[Pattern], n: int, seed: int, strata: Callable[[Pattern], object]
) -> tuple[Pattern, ...]:
    """A sample of n patterns in random order, in which each stratum has its share.

    The population is sorted by strata and drawn from at even steps, from a random start. So every
    pattern is equally likely: unweighted shares and medians of the sample estimate those of the
    population. Any beginning of the sample is a sample, too.

    Args:
        population: The patterns to draw from.
        n: Size of the sample, at most that of the population.
        seed: The same seed gives the same sample.
        strata: (pattern) -> a sort key.

    Raises:
        InvalidInputError: n or the seed is not an integer in its range.

    Example:
        >>> sample = proportional_sample(patterns(), 3, 0, lambda pattern: pattern.a)
        >>> len(set(sample))
        3
    """
    call = f"proportional_sample({n!r}, {seed!r})"
    count = min(checked_int(n, "n", call), len(population))
    generator = random.Random(checked_int(seed, "seed", call, minimum=0))
    # Random order within a stratum. Python guarantees the same numbers for random() only.
    ordered = [
        pattern
        for _, _, pattern in sorted(
            ((strata(each), generator.random(), each) for each in population),
            key=lambda keyed: keyed[:2],
        )
    ]
    start, step = generator.random(), len(ordered) / count
    drawn = [ordered[int((start + place) * step)] for place in range(count)]
    return tuple(sorted(drawn, key=lambda _: generator.random()))


def _is_benchmarked(pattern: Pattern) -> bool:
    """Whether the paper benchmarks a pattern of its lists: b = c, b = 4c or c = 4b, and it fits."""
    return (
        (pattern.b in (pattern.c, 4 * pattern.c) or pattern.c == 4 * pattern.b)
        and BATCH * max(pattern.shape) <= _LARGEST_TENSOR
        and pattern.nnz <= _LARGEST_TENSOR
    )


def _first_above(value: float, classes: tuple[tuple[float, str], ...]) -> str:
    """The name of the first class whose upper end is not below the value."""
    return next(name for end, name in classes if value <= end)
