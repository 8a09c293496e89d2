"""Random patterns, chains and rows, measured by ``--patterns random:N``.

The kernels were tuned on the paper's sizes. Random sizes are arbitrary, as in users' models, and a
new seed gives sizes that no kernel was tuned on. A subject is drawn as follows:

- three of ten are chains of two factors, the others one pattern (a,b,c,d);
- b and c are log-uniform from 1 to 1,024, half of the time multiples of 8;
- a is 1 for one in three, else log-uniform from 2 to 128;
- d is 1 for one in three, uniform from 2 to 8 for another, else log-uniform from 9 to 4,096;
- a chain's left factor divides the features between the two at random into its a, c and d;
- rows are log-uniform from 1 to 30,000.

A subject that fits no layer is drawn again: more than 65,536 features on a side, more than 2^26
weights in a factor, fewer than 16 features on both sides, or more than 2^28 elements of input and
output.
"""

from __future__ import annotations

import math
import random

from ksopt.patterns.chain import Chain, Pattern

_WIDEST, _LARGEST_A, _LARGEST_D, _MOST_ROWS = 1024, 128, 4096, 30_000
_MOST_FEATURES, _FEWEST_FEATURES, _MOST_WEIGHTS = 65_536, 16, 2**26
_MOST_ELEMENTS = 2**28


def draw(count: int, seed: int) -> tuple[tuple[Chain, int], ...]:
    """Random chains, of one factor for a pattern, each with the rows of its input.

    Args:
        count: number of subjects; they may repeat.
        seed: the same seed gives the same subjects; a smaller count gives their beginning.

    Example:
        >>> [(str(chain), rows) for chain, rows in draw(2, seed=1)] == list(
        ...     (str(chain), rows) for chain, rows in draw(3, seed=1)
        ... )[:2]
        True
    """
    # Only random() itself: Python guarantees its numbers in later versions, and no others.
    generator = random.Random(seed)
    return tuple(_subject(generator) for _ in range(count))


def _subject(generator: random.Random) -> tuple[Chain, int]:
    while True:
        is_chain = generator.random() < 0.3
        right = _pattern(generator)
        factors = (_in_front_of(right, generator), right) if is_chain else (right,)
        rows = _log_uniform(generator, 1, _MOST_ROWS)
        if all(map(_fits, factors)) and _are_few(factors, rows):
            return Chain(factors), rows


def _pattern(generator: random.Random) -> Pattern:
    a = 1 if generator.random() < 1 / 3 else _log_uniform(generator, 2, _LARGEST_A)
    b, c = _width(generator), _width(generator)
    return Pattern(a, b, c, _distance(generator))


def _in_front_of(right: Pattern, generator: random.Random) -> Pattern:
    """A factor whose input is the output of ``right``."""
    a, left = _divisor(right.out_features, generator)
    c, d = _divisor(left, generator)
    return Pattern(a, _width(generator), c, d)


def _width(generator: random.Random) -> int:
    if generator.random() < 0.5:
        return _log_uniform(generator, 8, _WIDEST) // 8 * 8
    return _log_uniform(generator, 1, _WIDEST)


def _distance(generator: random.Random) -> int:
    kind = generator.random()
    if kind < 1 / 3:
        return 1
    if kind < 2 / 3:
        return 2 + int(7 * generator.random())
    return _log_uniform(generator, 9, _LARGEST_D)


def _divisor(number: int, generator: random.Random) -> tuple[int, int]:
    """A divisor, uniformly drawn, and its cofactor."""
    below = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    divisors = sorted({*below, *(number // one for one in below)})
    one = divisors[int(len(divisors) * generator.random())]
    return one, number // one


def _log_uniform(generator: random.Random, least: int, most: int) -> int:
    return min(most, int(least * ((most + 1) / least) ** generator.random()))


def _fits(pattern: Pattern) -> bool:
    sides = pattern.in_features, pattern.out_features
    return (
        max(sides) <= _MOST_FEATURES
        and max(sides) >= _FEWEST_FEATURES
        and pattern.nnz <= _MOST_WEIGHTS
    )


def _are_few(factors: tuple[Pattern, ...], rows: int) -> bool:
    return all(rows * (one.in_features + one.out_features) <= _MOST_ELEMENTS for one in factors)
