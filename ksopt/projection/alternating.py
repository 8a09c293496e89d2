"""Alternating least squares: each factor is refitted in turn, with all others fixed.

With L = K_1 ... K_{l-1} and R = K_{l+1} ... K_L fixed, ||A - L K_l R||² is a quadratic in the
weights of K_l, which decomposes into much smaller ones: see `ksopt.projection.least_squares`. Each
is minimised, so the error never rises, for any chain; the result depends on the initial weights.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ksopt.patterns.chain import Chain
from ksopt.projection.hierarchical import suffixes
from ksopt.projection.least_squares import Between, first_factor
from ksopt.projection.products import product, times
from ksopt.reference import ks_reference, to_dense


def alternate(
    matrix: Tensor, chain: Chain, weights: Sequence[Tensor], sweeps: int, tolerance: float
) -> tuple[list[Tensor], int]:
    """Reduce ||matrix - K_1 ... K_L|| from initial weights.

    Args:
        matrix: [M, N], float64.
        chain: of that shape.
        weights: initial ones, float64, left to right.
        sweeps: maximal number of passes over all factors.
        tolerance: stop when a pass lowers the error by less than this share of it, or when the
            relative error itself is below float64's rounding.

    Returns:
        The weights, and the number of passes.
    """
    fitted = list(weights)
    norm = matrix.norm()
    error = (matrix - product(fitted)).norm()
    # Patterns that contain the supports of K_1 ... K_{l-1} and of K_{l+1} ... K_L, for 1 < l < L.
    after = suffixes(chain)
    before = [pattern.T for pattern in reversed(suffixes(chain.T))]
    between = [
        Between(before[index - 1], chain[index], after[index + 1], matrix.device)
        for index in range(1, len(chain) - 1)
    ]
    flipped = matrix.mT.contiguous()
    for sweep in range(1, sweeps + 1):
        # rights[l] = K_{l+2} ... K_L of this pass's beginning; lefts grow as factors are refitted.
        rights = [to_dense(fitted[-1])]
        for weight in reversed(fitted[1:-1]):
            rights.insert(0, times(weight, rights[0]))
        fitted[0] = first_factor(matrix, fitted[0], rights[0], after[1])
        left = to_dense(fitted[0])
        for index, factor in enumerate(between, start=1):
            fitted[index] = factor.refitted(matrix, fitted[index], left, rights[index])
            left = ks_reference(left, fitted[index].transpose(1, 2))
        last = first_factor(flipped, fitted[-1].transpose(1, 2), left.mT.contiguous(), before[-2].T)
        fitted[-1] = last.transpose(1, 2)
        previous, error = error, (matrix - ks_reference(left, last)).norm()
        if error > (1 - tolerance) * previous or error <= 1e-14 * norm:
            return fitted, sweep
    return fitted, sweeps
