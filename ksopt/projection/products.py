"""Products of factors with dense matrices, in the shapes that projection needs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ksopt.patterns.pattern import Pattern
from ksopt.reference import ks_reference, to_dense


def times(weight: Tensor, dense: Tensor) -> Tensor:
    """K @ dense for K's weight [a, b, c, d]; only the support is multiplied."""
    return ks_reference(dense, weight, "batch_last")


def product(weights: Sequence[Tensor]) -> Tensor:
    """K_1 K_2 ... K_L as a dense matrix.

    Example:
        >>> import torch
        >>> product([torch.ones(1, 2, 1, 1), torch.ones(1, 1, 3, 1)])
        tensor([[1., 1., 1.],
                [1., 1., 1.]])
    """
    dense = to_dense(weights[-1])
    for weight in reversed(weights[:-1]):
        dense = times(weight, dense)
    return dense


def on_support(matrix: Tensor, pattern: Pattern) -> Tensor:
    """The weight [a, b, c, d] of a matrix [a*b*d, a*c*d] on the support of a pattern."""
    a, b, c, d = pattern.weight_shape
    blocks = matrix.reshape(a, b, d, a, c, d)
    # -> [b, c, a, d]: equal block row and column, equal offset inside
    return blocks.diagonal(dim1=0, dim2=3).diagonal(dim1=1, dim2=3).permute(2, 0, 1, 3)


def chain_error(matrix: Tensor, weights: Sequence[Tensor]) -> float:
    """The error of a chain: ||matrix - K_1 ... K_L|| / ||matrix|| in the Frobenius norm.

    Where the matrix is zero it is ||K_1 ... K_L||.
    """
    norm = matrix.norm().item()
    error = (matrix - product(weights)).norm().item()
    return error / norm if norm > 0 else error


def balanced(weights: Sequence[Tensor]) -> list[Tensor]:
    """Weights of the same product with balanced scales: training starts better, and nothing under-
    or overflows in a narrow dtype.

    For each feature between two factors, its incoming and outgoing weights get equal norms. An
    almost unused feature retains a share on its output's side, so that its gradient does not
    vanish. Then the factors get equal gains: a factor's gain is its amplification of random
    features, the square root of c times its weights' mean square.
    """
    scaled = list(weights)
    for _ in range(2):
        for index in range(len(scaled) - 1):
            scaled[index], scaled[index + 1] = _balanced_pair(scaled[index], scaled[index + 1])
    return _equal_gains(scaled)


def _balanced_pair(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    # Norms of K_l's columns and of K_{l+1}'s rows, one for each feature between them.
    columns = left.square().sum(1).sqrt().flatten()
    a, b, _, d = right.shape
    rows = right.square().sum(2).sqrt().flatten()
    floor = 1e-2 * rows.square().mean().sqrt()
    scale = (rows.clamp(min=floor) / columns).sqrt()
    scale = scale.where(scale.isfinite() & (scale > 0), 1.0)
    return (
        left * scale.reshape(left.shape[0], 1, left.shape[2], left.shape[3]),
        right / scale.reshape(a, b, 1, d),
    )


def _equal_gains(weights: list[Tensor]) -> list[Tensor]:
    gains = torch.stack([w.square().mean().mul(w.shape[2]).sqrt() for w in weights])
    gain = gains.log().mean().exp()
    if not (gain > 0 and gain.isfinite()):
        return weights
    return [weight * (gain / own) for weight, own in zip(weights, gains, strict=True)]
