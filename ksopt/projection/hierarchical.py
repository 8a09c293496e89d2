"""Hierarchical factorization of longer chains: factors are split off one by one, each exactly.

From left to right, target = K_1 X with X of the support of K_2 ... K_L, then X = K_2 X', and so on.
K_1 preserves norms (see `two_factors.split`), so the squared errors of the splits add up. If the
features that each block of a split owns feed on one class of rows of the next factor, none of these
errors is larger than that of the best product: seen through the orthonormal columns split off
before, its factors only have such rows mixed, keep their supports, and are a candidate of every
split. The whole error is then at most sqrt(L - 1) times the best possible, and a product of the
chain is recovered. Chainable chains are of this kind (`preserves_optimum`), and others too.

Right to left is the same for the transposed chain. Other chains are split in the same way, without
a guarantee, except that no weights have an error below the first split's.

Source: Le, Zheng, Riccietti, Gribonval, "Butterfly factorization with error guarantees", 2024
(arXiv 2411.04506), the butterfly algorithm with orthonormalisation.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import torch
from torch import Tensor

from ksopt.patterns.chain import Chain
from ksopt.patterns.pattern import Pattern
from ksopt.patterns.support import product_support
from ksopt.projection.products import on_support
from ksopt.projection.two_factors import blocks, split


def suffixes(chain: Chain) -> list[Pattern]:
    """For l = 1, ..., L a pattern that contains the support of K_l ... K_L; for l > 1 it equals the
    support if that is Kronecker-sparse, else it is the least one by the divisors of all a and d.

    Example:
        >>> print(*suffixes(Chain.square_dyadic(8)))
        (1,8,8,1) (2,4,4,1) (4,2,2,1)
    """
    covers = []
    for first in range(len(chain) - 1):
        rest = chain[first:]
        g, h = _shared(rest.patterns)
        cover = Pattern(g, rest.out_features // (g * h), rest.in_features // (g * h), h)
        # The first split finds the product's zeros by itself. The others need the support, of the
        # core, so that a diagonal, which has many patterns, gets one that contains g and h.
        core = product_support([_core(pattern, g, h) for pattern in rest]) if first else None
        covers.append(cover if core is None else Pattern(g * core.a, core.b, core.c, core.d * h))
    return [*covers, chain[-1]]


def preserves_optimum(chain: Chain) -> bool:
    """Whether `left_to_right` comes within sqrt(L - 1) of the best product of this chain.

    Example:
        >>> preserves_optimum(Chain.square_dyadic(8)), preserves_optimum(Chain.kaleidoscope(8))
        (True, False)
    """
    supports = suffixes(chain)
    for index in range(len(chain) - 2):
        g, h = _shared(chain.patterns[index:])
        left, following = _core(chain[index], g, h), _core(chain[index + 1], g, h)
        for group in blocks(left, _core(supports[index + 1], g, h)):
            rows = group.features // (following.b * following.d) * following.d
            rows = rows + group.features % following.d
            if not bool((rows == rows[:, :1]).all()):
                return False
    return True


def left_to_right(matrix: Tensor, chain: Chain, double: bool) -> tuple[list[Tensor], float]:
    """Weights of a chain, with K_1 split off first.

    Args:
        matrix: [M, N], float64.
        chain: of that shape.
        double: see `two_factors.split`.

    Returns:
        A float64 weight for each factor, left to right, and the norm of the part that no product of
        the chain can represent: the entries outside its support, and the loss of the first split.
    """
    supports = suffixes(chain)
    whole = matrix.square().sum()
    rest = on_support(matrix, supports[0])
    # The representable part, which the first split may reduce; K_1 preserves its norm.
    reach = rest.square().sum()
    weights: list[Tensor] = []
    for pattern, right in zip(chain.patterns[:-1], supports[1:], strict=True):
        weight, rest = _split_off(rest, pattern, right, chain[len(weights) :], double)
        if not weights:
            reach = torch.minimum(reach, rest.square().sum())
        weights.append(weight)
    # A difference of squares: the possible rounding error is subtracted.
    lost = whole - reach - 64 * torch.finfo(matrix.dtype).eps * whole
    return [*weights, rest], lost.clamp(min=0).sqrt().item()


def _split_off(
    rest: Tensor, pattern: Pattern, right: Pattern, chain: Chain, double: bool
) -> tuple[Tensor, Tensor]:
    """The first factor of a chain, and the weight of the rest, from the product's weight.

    A divisor g of all a, and h of all d, splits the product into a batch of g * h smaller ones.
    """
    g, h = _shared(chain.patterns)
    weights = split(
        _dense_cores(rest, g, h), _core(pattern, g, h), _core(right, g, h), double=double
    )
    return _joined(weights[0], g, h), _joined(weights[1], g, h)


def _shared(patterns: Sequence[Pattern]) -> tuple[int, int]:
    return gcd(*(pattern.a for pattern in patterns)), gcd(*(pattern.d for pattern in patterns))


def _core(pattern: Pattern, g: int, h: int) -> Pattern:
    return Pattern(pattern.a // g, pattern.b, pattern.c, pattern.d // h)


def _dense_cores(weight: Tensor, g: int, h: int) -> Tensor:
    """[g*a, b, c, d*h] -> [g*h, a*b*d, a*c*d], zeros included."""
    a, b, c, d = weight.shape[0] // g, *weight.shape[1:3], weight.shape[3] // h
    # -> [g, h, b, c, a, d]
    cores = weight.reshape(g, a, b, c, d, h).permute(0, 5, 2, 3, 1, 4)
    if a == d == 1:
        return cores.reshape(g * h, b, c)
    dense = weight.new_zeros(g, h, a, b, d, a, c, d)
    # [g, h, b, c, a, d]: diagonal() puts the diagonal last
    dense.diagonal(dim1=2, dim2=5).diagonal(dim1=3, dim2=5).copy_(cores)
    return dense.reshape(g * h, a * b * d, a * c * d)


def _joined(weights: Tensor, g: int, h: int) -> Tensor:
    """[g*h, a, b, c, d] -> [g*a, b, c, d*h]."""
    _, a, b, c, d = weights.shape
    return weights.reshape(g, h, a, b, c, d).permute(0, 2, 3, 4, 5, 1).reshape(g * a, b, c, d * h)
