"""Alternating least squares: each factor refitted in turn, all others held fixed.

With L = K_1 ... K_{l-1} and R = K_{l+1} ... K_L fixed, ||A - L K_l R||² is a quadratic in the
weights of K_l, and much smaller ones in truth: see `ksopt.projection.least_squares`. Each is
minimised, so the error never rises, for any chain; where it ends depends on where it starts.
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
    """Lower ||matrix - K_1 ... K_L|| from given weights.

    Args:
        matrix: [M, N], float64.
        chain: of that shape.
        weights: where to start, float64, left to right.
        sweeps: most passes over all factors.
        tolerance: stop when a pass lowers the error by less than this share of it, or when the
            relative error itself is below float64's rounding.

    Returns:
        The weights, and the passes made.
    """
    found = list(weights)
    norm = matrix.norm()
    error = (matrix - product(found)).norm()
    # What holds the supports of K_1 ... K_{l-1} and of K_{l+1} ... K_L, for 1 < l < L.
    after = suffixes(chain)
    before = [pattern.T for pattern in reversed(suffixes(chain.T))]
    between = [
        Between(before[index - 1], chain[index], after[index + 1], matrix.device)
        for index in range(1, len(chain) - 1)
    ]
    flipped = matrix.mT.contiguous()
    for sweep in range(1, sweeps + 1):
        # rights[l] = K_{l+2} ... K_L of this pass's beginning; lefts grow as factors are refitted.
        rights = [to_dense(found[-1])]
        for weight in reversed(found[1:-1]):
            rights.insert(0, times(weight, rights[0]))
        found[0] = first_factor(matrix, found[0], rights[0], after[1])
        left = to_dense(found[0])
        for index, factor in enumerate(between, start=1):
            found[index] = factor.refitted(matrix, found[index], left, rights[index])
            left = ks_reference(left, found[index].transpose(1, 2))
        last = first_factor(flipped, found[-1].transpose(1, 2), left.mT.contiguous(), before[-2].T)
        found[-1] = last.transpose(1, 2)
        previous, error = error, (matrix - ks_reference(left, last)).norm()
        if error > (1 - tolerance) * previous or error <= 1e-14 * norm:
            return found, sweep
    return found, sweeps
