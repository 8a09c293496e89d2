"""Alternating least squares: each factor refitted in turn, all others held fixed.

With L = K_1 ... K_{l-1} and R = K_{l+1} ... K_L fixed, ||A - L K_l R||² is a quadratic in the
weights of K_l. Its minimum solves P(LᵀL K_l RRᵀ) = P(LᵀA Rᵀ), P being the restriction to K_l's
support, and conjugate gradients come as near to it as they are let, each step lowering the error.
So the error never rises, for any chain; where it ends depends on where it starts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ksopt.pattern import Chain, Pattern
from ksopt.projection.products import on_support, product, times
from ksopt.reference import ks_reference, to_dense

# Steps of conjugate gradients for one factor before the next has its turn.
_STEPS = 8


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
    for sweep in range(1, sweeps + 1):
        # rights[l] = K_{l+1} ... K_L of this pass's beginning; lefts grow as factors are refitted.
        rights: list[Tensor | None] = [None]
        for weight in reversed(found[1:]):
            rights.insert(0, to_dense(weight) if rights[0] is None else times(weight, rights[0]))
        left: Tensor | None = None
        for index, pattern in enumerate(chain):
            found[index] = _refit(matrix, pattern, found[index], left, rights[index])
            own = found[index]
            left = to_dense(own) if left is None else ks_reference(left, own.transpose(1, 2))
        assert left is not None
        before, error = error, (matrix - left).norm()
        if error > (1 - tolerance) * before or error <= 1e-14 * norm:
            return found, sweep
    return found, sweeps


def _refit(
    matrix: Tensor, pattern: Pattern, weight: Tensor, left: Tensor | None, right: Tensor | None
) -> Tensor:
    """K_l nearer to its optimum, by conjugate gradients scaled with the diagonal."""
    goal = matrix if left is None else left.mT @ matrix
    goal = on_support(goal if right is None else goal @ right.mT, pattern)
    left_gram = None if left is None else left.mT @ left
    right_gram = None if right is None else right @ right.mT

    def curvature(direction: Tensor) -> Tensor:
        moved = to_dense(direction) if right_gram is None else times(direction, right_gram)
        return on_support(moved if left_gram is None else left_gram @ moved, pattern)

    a, b, c, d = pattern.weight_shape
    scale = weight.new_ones(pattern.weight_shape)
    if left_gram is not None:
        scale = scale * left_gram.diagonal().reshape(a, b, 1, d)
    if right_gram is not None:
        scale = scale * right_gram.diagonal().reshape(a, 1, c, d)
    scale = scale.clamp(min=torch.finfo(scale.dtype).tiny)

    residual = goal - curvature(weight)
    floor = 1e-30 * goal.square().sum()
    towards = residual / scale
    direction, now = towards, (residual * towards).sum()
    for _ in range(_STEPS):
        curved = curvature(direction)
        bend = (direction * curved).sum()
        if not (bend > 0 and residual.square().sum() > floor):
            break
        step = now / bend
        weight = weight + step * direction
        residual = residual - step * curved
        towards = residual / scale
        before, now = now, (residual * towards).sum()
        direction = towards + (now / before) * direction
    return weight
